"""The command line: ``mlx-flash generate`` and ``mlx-flash plan``.

What was asked for goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.generate import stream_generate
from mlx_lm.sample_utils import make_sampler
from rich.console import Console, RenderableType
from rich.progress import DownloadColumn, MofNCompleteColumn

from mlx_flash.arguments import make_parser
from mlx_flash.checkpoint.layout import load_config
from mlx_flash.config import FlashConfig
from mlx_flash.errors import ConfigError, FlashError
from mlx_flash.model import FlashLLM, load_model, prepare, resolve
from mlx_flash.report import (
    GenerationReport,
    Json,
    ProgressBar,
    Recorder,
    make_report,
    planning_to_json,
    render_generation,
    render_plan,
)
from mlx_flash.residency.plan import DEFAULT_PREFILL_STEP_SIZE

EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 2, 130, 141
"""The last two are what a shell reports of programs that the signals end."""

TRACEBACK_VARIABLE = "MLX_FLASH_TRACEBACK"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: the arguments; None takes the process's.

    Returns:
        The exit status.
    """
    parser = make_parser(generate, plan)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    out = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):  # libraries print warnings
            return cast(int, args.command(args, out))
    except KeyboardInterrupt:
        print("mlx-flash: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # for the flush when Python ends
        return EXIT_BROKEN_PIPE
    except Exception as error:  # noqa: BLE001 the last line of defence; nothing is swallowed, only worded
        return _tell(error, args.traceback or bool(os.environ.get(TRACEBACK_VARIABLE)))


def _tell(error: Exception, with_traceback: bool) -> int:
    if with_traceback:
        traceback.print_exception(error)
    print(f"mlx-flash: error: {_one_line(error)}", file=sys.stderr)
    return EXIT_ERROR


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.strerror}: {error.filename}"
    text = " ".join(str(error).split())
    if isinstance(error, FlashError | ValueError | OSError):
        return text
    return f"{type(error).__name__}: {text}. Hint: --traceback, or {TRACEBACK_VARIABLE}=1, shows where it came from."


# Commands


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
        with ProgressBar("Prefill", MofNCompleteColumn(), shows_progress(args)) as progress:
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


def plan(args: argparse.Namespace, out: TextIO) -> int:
    """``mlx-flash plan``: reads no weights."""
    path = resolve(args.model)
    tokenizer = None
    with contextlib.suppress(OSError, ValueError):  # a folder without one can be planned for too
        tokenizer = load_tokenizer(path, args)
    _, _, layout, made = prepare(path, make_config(args, args.context_length))
    del tokenizer  # it had to be there: it is part of the process when text is generated
    if args.json:
        print_json(planning_to_json(args.model, layout, made), out)
    else:
        print_rich(render_plan(args.model, layout, made), out)
    return 0


def load_tokenizer(path: Path, args: argparse.Namespace) -> Any:
    """mlx-lm's tokenizer, as ``mlx_lm.generate`` loads it."""
    eos_token_ids = load_config(path).get("eos_token_id")
    settings = {"trust_remote_code": args.trust_remote_code}
    return mlx_lm_utils.load_tokenizer(path, settings, eos_token_ids=eos_token_ids)


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
    if args.resident:
        return cast(nn.Module, mlx_lm_utils.load_model(path)[0])
    config = make_config(args, args.context_length or needed_context(args, num_prompt_tokens))
    with ProgressBar("Loading", DownloadColumn(), shows_progress(args)) as progress:
        return load_model(path, config, progress=progress)[0]


def needed_context(args: argparse.Namespace, num_prompt_tokens: int) -> int | None:
    """The longest that the KV cache gets in a run; None when nothing limits it."""
    lengths = []
    if args.max_tokens > 0:
        lengths.append(num_prompt_tokens + args.max_tokens)
    if args.max_kv_size is not None:  # a rotating cache holds a whole call's tokens beside what it keeps
        lengths.append(args.max_kv_size + (args.prefill_step_size or DEFAULT_PREFILL_STEP_SIZE))
    return min(lengths, default=None)


def make_config(args: argparse.Namespace, context_length: int | None) -> FlashConfig:
    """The settings of streaming."""
    return FlashConfig(
        ram_budget_gb=args.ram_budget_gb,
        context_length=context_length,
        prefill_step_size=args.prefill_step_size,
        num_slots=args.num_slots,
        io=args.io,
        read_size_mb=args.read_size_mb,
        queue_depth=args.queue_depth,
    )


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


def shows_progress(args: argparse.Namespace) -> bool:
    """Whether somebody is looking who wants to see it."""
    return bool(args.verbose) and sys.stderr.isatty()


def tell(args: argparse.Namespace, report: GenerationReport, out: TextIO) -> None:
    """Writes the summary of a run, as JSON to stdout or for people to stderr."""
    if args.json:
        print_json(report.to_json(), out)
    elif args.verbose:
        print_rich(render_generation(report), sys.stderr)


def print_json(value: Json, out: TextIO) -> None:
    """One object on one line."""
    print(json.dumps(value, allow_nan=False), file=out, flush=True)


def print_rich(value: RenderableType, out: TextIO) -> None:
    """For people: as wide as the terminal, 80 columns without one."""
    Console(file=out, markup=False, highlight=False, emoji=False).print(value)
