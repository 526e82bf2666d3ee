"""``mlx-flash generate``: text, as ``mlx_lm.generate`` makes it."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.generate import stream_generate
from mlx_lm.sample_utils import make_sampler
from rich.progress import DownloadColumn, MofNCompleteColumn

from mlx_flash.commands.common import load_tokenizer, make_config, print_json, print_rich, shows_progress
from mlx_flash.commands.report import GenerationReport, ProgressBar, Recorder, make_report, render_generation
from mlx_flash.compat.loading import makes_own_cache
from mlx_flash.errors import ConfigError
from mlx_flash.experts.trace import RoutingTrace
from mlx_flash.model import FlashLLM, load_model, resolve
from mlx_flash.residency.plan import DEFAULT_PREFILL_STEP_SIZE


def generate(args: argparse.Namespace, out: TextIO) -> int:
    """``mlx-flash generate``: text goes to stdout as it comes."""
    if args.seed is not None:
        mx.random.seed(args.seed)
    path = resolve(args.model)
    tokenizer = load_tokenizer(path, args)
    for token in args.extra_eos_token:
        tokenizer.add_eos_token(token)
    prompt = encode_prompt(tokenizer, args)
    began = time.perf_counter()
    model = load(path, args, len(prompt))
    with model if isinstance(model, FlashLLM) else contextlib.nullcontext():
        run = Recorder(model, len(prompt), time.perf_counter() - began)
        step = run.plan.prefill_step_size if run.plan else args.prefill_step_size or DEFAULT_PREFILL_STEP_SIZE
        with (
            ProgressBar("Prefill", MofNCompleteColumn(), shows_progress(args)) as progress,
            routing_trace(model, args),
        ):
            options = generation_options(args, tokenizer)
            responses = stream_generate(
                model, tokenizer, prompt, prefill_step_size=step, prompt_progress_callback=progress, **options
            )
            interrupted = follow(responses, run, None if args.json else out)
    if run.tokens:
        tell(args, make_report(run, args.model, step), out)
    if interrupted:
        raise KeyboardInterrupt
    return 0


@contextlib.contextmanager
def routing_trace(model: nn.Module, args: argparse.Namespace) -> Iterator[None]:
    """Records which experts are routed to, if that was asked for.

    Raises:
        ConfigError: experts are not read one by one.
    """
    if args.routing_trace is None:
        yield
        return
    experts = model.engine.experts if isinstance(model, FlashLLM) and model.engine is not None else None
    if experts is None:
        raise ConfigError(
            "--routing-trace records experts that are read one by one, and none are. Hint: this needs a mixture of "
            "experts, a budget that holds some of them but not all, and neither --resident nor --expert-pool-gb 0."
        )
    with RoutingTrace(args.routing_trace, args.model, experts.stacks) as trace:
        experts.listeners.append(trace)
        try:
            yield
        finally:
            experts.listeners.remove(trace)


def encode_prompt(tokenizer: Any, args: argparse.Namespace) -> list[int]:
    """The tokens that ``mlx_lm.generate`` makes of the same flags.

    Raises:
        ConfigError: there are none.
    """
    prompt = args.prompt.replace("\\n", "\n").replace("\\t", "\t")
    prompt = sys.stdin.read() if prompt == "-" else prompt
    use_chat_template = not args.ignore_chat_template and tokenizer.has_chat_template
    if use_chat_template:
        prompt = apply_chat_template(tokenizer, prompt, args)
    tokens = cast(list[int], tokenizer.encode(prompt, add_special_tokens=not use_chat_template))
    if not tokens:
        raise ConfigError("the prompt has no tokens. Hint: --prompt takes text, or - to read it from stdin.")
    return tokens


def apply_chat_template(tokenizer: Any, prompt: str, args: argparse.Namespace) -> str:
    """The prompt as the user's turn of a chat, the system's before it and the begun answer after it."""
    turns = [("system", args.system_prompt), ("user", prompt), ("assistant", args.prefill_response)]
    has_prefill = args.prefill_response is not None
    text = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns if content is not None],
        tokenize=False,
        continue_final_message=has_prefill,
        add_generation_prompt=not has_prefill,
        **args.chat_template_config,
    )
    return cast(str, text)


def load(path: Path, args: argparse.Namespace, num_prompt_tokens: int) -> nn.Module:
    """The model: streamed, or for a ``--resident`` run as mlx-lm loads it."""
    config = make_config(args)
    if args.resident or not config.enabled:
        model = cast(nn.Module, mlx_lm_utils.load_model(path)[0])
        return mlx_lm_utils.load_adapters(model, args.adapter_path) if args.adapter_path else model
    if config.context_length is None:
        config = replace(config, context_length=needed_context(args, num_prompt_tokens, path))
    with ProgressBar("Loading", DownloadColumn(), shows_progress(args)) as progress:
        return load_model(path, config, adapter_path=args.adapter_path, progress=progress)[0]


def needed_context(args: argparse.Namespace, num_prompt_tokens: int, path: Path) -> int | None:
    """Return the greatest length of the KV cache in this run; None when nothing limits it."""
    lengths = []
    if args.max_tokens > 0:
        lengths.append(num_prompt_tokens + args.max_tokens)
    if args.max_kv_size is not None and not makes_own_cache(path):
        # a rotating cache adds the tokens of a call to those it keeps
        lengths.append(args.max_kv_size + (args.prefill_step_size or DEFAULT_PREFILL_STEP_SIZE))
    return min(lengths, default=None)


def generation_options(args: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    """What ``mlx_lm.generate`` gives to ``stream_generate`` for the same flags."""
    sampler = make_sampler(
        args.temp,
        args.top_p,
        args.min_p,
        args.min_tokens_to_keep,
        top_k=args.top_k,
        xtc_probability=args.xtc_probability,
        xtc_threshold=args.xtc_threshold,
        xtc_special_tokens=tokenizer.encode("\n") + list(tokenizer.eos_token_ids),
    )
    return {
        "max_tokens": args.max_tokens,
        "sampler": sampler,
        "max_kv_size": args.max_kv_size,
        "kv_bits": args.kv_bits,
        "kv_group_size": args.kv_group_size,
        "quantized_kv_start": args.quantized_kv_start,
    }


def follow(responses: Generator[Any, None, None], run: Recorder, out: TextIO | None) -> bool:
    """Notes responses as they come, and writes their text. Returns whether the user ended it."""
    try:
        with contextlib.closing(responses):
            for response in responses:
                run.add(response)
                if out is not None:
                    print(response.text, end="", file=out, flush=True)
    except KeyboardInterrupt:
        return True
    finally:
        if out is not None and run.tokens:
            print(file=out, flush=True)
    return False


def tell(args: argparse.Namespace, report: GenerationReport, out: TextIO) -> None:
    """Writes the summary of a run, as JSON to stdout or for people to stderr."""
    if args.json:
        print_json(report.to_json(), out)
    elif args.verbose:
        print_rich(render_generation(report), sys.stderr)
