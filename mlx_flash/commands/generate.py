"""``mlx-flash generate``: text, as ``mlx_lm.generate`` makes it."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, cast

import mlx.core as mx
import mlx.nn as nn
from jinja2 import TemplateError
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.sample_utils import make_sampler

from mlx_flash.commands.common import (
    LOOP_FLAGS,
    Status,
    load_tokenizer,
    make_config,
    note,
    print_json,
    print_rich,
    prompt_text,
    turns,
)
from mlx_flash.commands.models import ask_to_download, fetched, model_of
from mlx_flash.commands.report import Recorder, Responses, follow, make_report, render_run
from mlx_flash.commands.vision import is_vision, seeing
from mlx_flash.compat.loaders import makes_own_cache
from mlx_flash.engine.prepare import resolve
from mlx_flash.errors import ConfigError
from mlx_flash.generation import stream_generate
from mlx_flash.integration.mlx_lm import apply_flash_patch
from mlx_flash.loading import apply_adapter, load_model
from mlx_flash.model import FlashLLM
from mlx_flash.modelfile.parse import find_modelfile
from mlx_flash.ranks import launched_group, rank_output, read_on_rank_0
from mlx_flash.residency.plan import DEFAULT_PREFILL_STEP_SIZE, step_in_words

_TEMPLATE_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors of templates: their own refusals, and those of any expression."""


def generate(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash generate``: write text as it is generated, then a summary: JSON, or text on stderr."""
    if args.seed is not None:
        mx.random.seed(args.seed)
    if args.prompt_cache_file is not None:
        raise ConfigError(
            f"--prompt-cache-file {args.prompt_cache_file}: only mlx-lm's own program reads such files. "
            "Hint: mlx-flash exec -- mlx_lm.generate streams with it; kv_prefixes keeps computed prompts by itself."
        )
    path = model_of(args)
    answering = answer_about_pictures if is_vision(args, path, prefers=False) else answer
    if (group := launched_group()) is not None:
        out = rank_output(group, out)
        args.verbose = args.verbose and group.rank() == 0
    with answering(args, path) as (run, responses):
        follow(responses, run, None if args.json else out)
    if run.tokens:
        report = make_report(run, args.model)
        if args.json:
            print_json(report, out)
        elif args.verbose:
            print_rich(render_run(report), sys.stderr)
        elif not report["prefill_as_mlx_lm"]:
            note(f"mlx-flash: {step_in_words(run.plan.prefill_step_size, make_config(args))}")
    if run.interrupt is not None:
        raise run.interrupt
    return 0


@contextlib.contextmanager
def answer(args: argparse.Namespace, path: Path) -> Iterator[tuple[Recorder, Responses]]:
    """Yield the answer to a prompt, as mlx-lm generates it, and its recorder."""
    if args.draft_model is not None:
        args.draft_model = find_modelfile(args.draft_model).base
        ask_to_download(args.draft_model, args)
        fetched(args.draft_model)
    tokenizer = load_tokenizer(path, args, make_config(args))
    for token in args.extra_eos_token:
        tokenizer.add_eos_token(token)
    prompt = encode_prompt(tokenizer, args)
    began = time.perf_counter()
    model, draft = load(path, args, len(prompt))
    with contextlib.ExitStack() as stack:
        for streamed in (model, draft):
            if isinstance(streamed, FlashLLM):
                stack.enter_context(streamed)
        run = Recorder(model, len(prompt), time.perf_counter() - began)
        progress = stack.enter_context(Status("Prefill", args.verbose)).show
        options = generation_options(args, tokenizer)
        options["draft_model"] = draft
        if args.num_draft_tokens is not None:
            options["num_draft_tokens"] = args.num_draft_tokens
        options |= {"prefill_step_size": model.plan.prefill_step_size, "prompt_progress_callback": progress}
        yield run, stream_generate(model, tokenizer, prompt, **options)


_WITHOUT = {
    "adapter_path": None,
    "draft_model": None,
    "prefill_response": None,
    "xtc_probability": 0.0,
    "min_tokens_to_keep": 1,
}
"""Flags that mlx-vlm's loops have nothing for, and their defaults."""


@contextlib.contextmanager
def answer_about_pictures(args: argparse.Namespace, path: Path) -> Iterator[tuple[Recorder, Responses]]:
    """Yield the answer to a prompt with pictures, as mlx-vlm generates it, and its recorder."""
    for name, default in _WITHOUT.items():
        if getattr(args, name) != default:
            raise ConfigError(
                f"--{name.replace('_', '-')} is not available for models that see, which mlx-vlm's loops run. "
                "Hint: leave it out."
            )
    began, text, is_chat = time.perf_counter(), prompt_text(args, read_on_rank_0), not args.ignore_chat_template
    options: dict[str, Any] = {}
    if is_chat:  # as in mlx-vlm's program, reasoning is off unless it is asked for
        options = {"enable_thinking": False, **(args.chat_template_config or {})}
    most, messages = args.max_tokens if args.max_tokens > 0 else None, turns(args, text) if is_chat else text
    pictures = args.image or ()
    with seeing(args, path, messages, pictures, num_tokens=most, is_chat=is_chat, **options) as found:
        model, processor, prompt = found
        tokenizer = getattr(processor, "tokenizer", processor)
        tokenizer.stopping_criteria.add_eos_token_ids(args.extra_eos_token)
        run = Recorder(model.language_model, len(prompt.tokens), time.perf_counter() - began)
        loop = {name: getattr(args, name) for name in (*LOOP_FLAGS, "top_p", "min_p", "top_k")}
        loop |= {"temperature": args.temp, "prefill_step_size": run.plan.prefill_step_size}
        yield run, prompt.responses(model, processor, **loop)


def encode_prompt(tokenizer: Any, args: argparse.Namespace) -> list[int]:
    """Return the tokens that ``mlx_lm.generate`` makes of the same flags."""
    prompt = prompt_text(args, read_on_rank_0)
    use_chat_template = not args.ignore_chat_template and tokenizer.has_chat_template
    if use_chat_template:
        prompt = apply_chat_template(tokenizer, prompt, args)
    tokens = cast(list[int], tokenizer.encode(prompt, add_special_tokens=not use_chat_template))
    if not tokens:
        raise ConfigError("the prompt has no tokens. Hint: --prompt takes text, or - to read it from stdin.")
    return tokens


def apply_chat_template(tokenizer: Any, prompt: str, args: argparse.Namespace) -> str:
    """Return the prompt as a chat: system prompt, user's turn, beginning of the answer."""
    has_prefill = args.prefill_response is not None
    try:
        text = tokenizer.apply_chat_template(
            turns(args, prompt),
            tokenize=False,
            continue_final_message=has_prefill,
            add_generation_prompt=not has_prefill,
            **(args.chat_template_config or {}),
        )
    except _TEMPLATE_ERRORS as error:
        name = "" if type(error) is TemplateError else f"{type(error).__name__}: "
        raise ConfigError(
            f"the chat template refuses the messages: {name}{error}. "
            "Hint: some templates take no system prompt, or want turns of user and assistant to alternate."
        ) from error
    return cast(str, text)


def load(path: Path, args: argparse.Namespace, num_prompt_tokens: int) -> tuple[FlashLLM, nn.Module | None]:
    """Return the model, and the draft model or None."""
    config = make_config(args)
    needed = needed_context(args, num_prompt_tokens, path)
    with Status("Loading", args.verbose) as status:
        if args.draft_model is None:
            options: dict[str, Any] = {"progress": status.show_bytes, "group": launched_group()}
            options |= {"needed_context": needed}
            return load_model(path, config, adapter_path=args.adapter_path, **options)[0], None
        if config.context_length is None:
            config = replace(config, context_length=needed)
        with apply_flash_patch(config):
            model, draft = cast(FlashLLM, mlx_lm_utils.load_model(path)[0]), load_draft(args, path)
        if args.adapter_path:
            apply_adapter(model, args.adapter_path)
        model.start(status.show_bytes)  # both start here, since they share the budget
        return model, draft


def load_draft(args: argparse.Namespace, path: Path) -> nn.Module:
    """Return the model of ``--draft-model``."""
    draft = resolve(args.draft_model)
    sizes = [load_tokenizer(folder, args).vocab_size for folder in (draft, path)]
    if sizes[0] != sizes[1]:
        raise ConfigError(f"--draft-model {args.draft_model} has {sizes[0]} tokens, the model has {sizes[1]}")
    return cast(nn.Module, mlx_lm_utils.load_model(draft)[0])


def needed_context(args: argparse.Namespace, num_prompt_tokens: int, path: Path) -> int | None:
    """Return the greatest length of the KV cache in this run; None when nothing limits it."""
    lengths = []
    if args.max_tokens > 0:
        lengths.append(num_prompt_tokens + args.max_tokens)
    if args.max_kv_size is not None and not makes_own_cache(path):
        # A rotating cache adds the tokens of a call to those it keeps.
        lengths.append(args.max_kv_size + (args.prefill_step_size or DEFAULT_PREFILL_STEP_SIZE))
    return min(lengths, default=None)


def generation_options(args: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    """Return what ``mlx_lm.generate`` gives to ``stream_generate`` for the same flags."""
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
    return {"sampler": sampler, **{name: getattr(args, name) for name in LOOP_FLAGS}}
