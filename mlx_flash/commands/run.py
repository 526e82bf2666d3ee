"""``mlx-flash run``: what a Modelfile describes, prompted, in conversation, or served."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TextIO

import mlx.nn as nn
import mlx_lm
from mlx_lm import utils as mlx_lm_utils

from mlx_flash.commands.common import dial
from mlx_flash.commands.mlx_lm import serve_with
from mlx_flash.config import FlashConfig
from mlx_flash.model import FlashLLM, load, resolve
from mlx_flash.modelfile.conversation import Conversation, first_messages
from mlx_flash.modelfile.parse import Modelfile, read_modelfile

BYE = ("/bye", "/exit", "/quit")


def run(args: argparse.Namespace, out: TextIO) -> int:
    """``mlx-flash run``."""
    modelfile = read_modelfile(args.file)
    for note in modelfile.notes:
        print(f"{args.file}:{note.line}: {note.text}", file=sys.stderr)
    config = FlashConfig.resolve(modelfile=modelfile.flash, **dial(args))
    if args.serve:
        return serve_with(config, server_flags(modelfile, args), out)
    with loaded(modelfile, config) as (model, tokenizer):
        conversation = Conversation(model, tokenizer, modelfile, args.max_tokens)
        for text in _prompts(args.prompt):
            for piece in conversation.answer(text):
                print(piece, end="", file=out, flush=True)
            print(file=out, flush=True)
    return 0


@contextmanager
def loaded(modelfile: Modelfile, config: FlashConfig) -> Iterator[tuple[nn.Module, Any]]:
    """The model and its tokenizer, streamed unless the Modelfile says ``FLASH false``."""
    adapter = None if modelfile.adapter is None else str(modelfile.adapter)
    settings = {} if modelfile.chat_template is None else {"chat_template": modelfile.chat_template}
    if config.enabled:
        model, tokenizer = load(modelfile.base, config, adapter_path=adapter, tokenizer_config=settings)
    else:
        model, tokenizer = mlx_lm.load(modelfile.base, adapter_path=adapter, tokenizer_config=settings)
    with model if isinstance(model, FlashLLM) else nullcontext():
        yield model, tokenizer


def _prompts(given: str | None) -> Iterator[str]:
    """What the user says: one prompt, all of a piped stdin, or line by line."""
    if given is not None:
        yield given
    elif not sys.stdin.isatty():
        yield sys.stdin.read()
    else:
        print(f"Ctrl-D or {BYE[0]} ends the conversation.", file=sys.stderr)
        yield from _lines()


def _lines() -> Iterator[str]:
    while True:
        try:
            print(">>> ", end="", file=sys.stderr, flush=True)
            text = input()
        except EOFError:
            return
        if text.strip() in BYE:
            return
        if text.strip():
            yield text


def server_flags(modelfile: Modelfile, args: argparse.Namespace) -> list[str]:
    """The flags of ``mlx_lm.server`` that say what the Modelfile does; what none of them can say goes to stderr."""
    parameters = modelfile.parameters
    max_tokens = parameters.max_tokens(0) if args.max_tokens is None else args.max_tokens
    flags = {
        "--model": modelfile.base,
        "--adapter-path": modelfile.adapter,
        "--host": args.host,
        "--port": args.port,
        "--temp": parameters.temperature,
        "--top-p": parameters.top_p,
        "--top-k": parameters.top_k,
        "--min-p": parameters.min_p,
        "--max-tokens": max_tokens if max_tokens is not None and max_tokens > 0 else None,
        "--prefill-step-size": args.prefill_step_size,
        "--chat-template": _chat_template(modelfile),
    }
    unsaid = {
        "stop": modelfile.stop or None,
        "seed": parameters.seed,
        "repeat_penalty": parameters.repeat_penalty,
        "num_predict": max_tokens if max_tokens is not None and max_tokens <= 0 else None,
    }
    for name in (name for name, value in unsaid.items() if value is not None):
        print(f"{args.file}: PARAMETER {name} has no default in the server: clients say it", file=sys.stderr)
    return [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]


def _chat_template(modelfile: Modelfile) -> str | None:
    """The chat template, with what every conversation begins with made part of it."""
    first = first_messages(modelfile)
    template = modelfile.chat_template
    if not first:
        return template
    if template is None:
        template = mlx_lm_utils.load_tokenizer(resolve(modelfile.base)).chat_template
    if template is None:
        print(f"{modelfile.path}: SYSTEM and MESSAGE have no effect: the model has no chat template", file=sys.stderr)
        return None
    return opening(first) + template


def opening(messages: list[dict[str, str]]) -> str:
    """Jinja that puts messages before those of a request, whose own system prompt replaces theirs."""
    system = [message for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    return (
        "{%- if messages and messages[0]['role'] == 'system' -%}"
        f"{{%- set messages = messages[:1] + {_jinja(others)} + messages[1:] -%}}"
        "{%- else -%}"
        f"{{%- set messages = {_jinja(system + others)} + messages -%}}"
        "{%- endif -%}"
    )


def _jinja(messages: list[dict[str, str]]) -> str:
    """A literal: Jinja reads JSON's, but joins no surrogate pairs."""
    return json.dumps(messages, ensure_ascii=False)
