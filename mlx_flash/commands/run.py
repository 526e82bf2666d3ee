"""``mlx-flash run``: a model or a Modelfile, prompted, in conversation, or served."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import mlx.nn as nn
import mlx_lm

from mlx_flash.commands.chat import BYE, HELP
from mlx_flash.commands.common import dial, note, print_rich
from mlx_flash.commands.interrupt import AnswerStoppedError, Interrupts
from mlx_flash.commands.mlx_lm import serve_with
from mlx_flash.commands.render import render_generation
from mlx_flash.commands.report import Recorder, make_report
from mlx_flash.config import FlashConfig, did_you_mean
from mlx_flash.engine.prepare import resolve
from mlx_flash.engine.tokenizer import load_tokenizer
from mlx_flash.errors import ConfigError
from mlx_flash.layout.hub import is_ollama_name
from mlx_flash.loading import load
from mlx_flash.model import FlashLLM
from mlx_flash.modelfile.conversation import Conversation, first_messages
from mlx_flash.modelfile.parse import Modelfile, read_modelfile
from mlx_flash.residency.plan import DEFAULT_PREFILL_STEP_SIZE

COMMANDS = (*BYE, "/clear", "/?", "/help")


def run(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash run``."""
    modelfile, prompt = _described(args)
    for found in modelfile.notes:
        note(f"{modelfile.path}:{found.line}: {found.text}")
    config = FlashConfig.resolve(modelfile=modelfile.flash, **dial(args))
    if args.serve:
        return serve_with(config, server_flags(modelfile, args), out, args.api_key_file, args.no_auth)
    began = time.perf_counter()
    with loaded(modelfile, config) as (model, tokenizer):
        conversation = Conversation(model, tokenizer, modelfile, args.max_tokens)
        answer = partial(_answer, conversation, model, time.perf_counter() - began, args.verbose, out)
        if prompt is not None or not sys.stdin.isatty():
            answer(sys.stdin.read() if prompt is None else prompt)
        else:
            _converse(conversation, answer)
    return 0


def _described(args: argparse.Namespace) -> tuple[Modelfile, str | None]:
    """Return the Modelfile, or one that only names a model, and the prompt of the command line.

    Raises:
        ConfigError: there are too many words, or neither a model nor a Modelfile.
    """
    words = list(args.words)
    model = None
    if args.file is None and words and (len(words) > 1 or _names_model(words[0])):
        model = words.pop(0)
    if len(words) > 1:
        raise ConfigError(f"run takes one prompt, not {len(words)}. Hint: put a prompt of several words in quotes.")
    prompt = words[0] if words else None
    if model is not None:
        return Modelfile(path=Path(model), base=model), prompt
    if args.file is None and not Path("Modelfile").exists():
        raise ConfigError('run found neither a model nor ./Modelfile. Hint: mlx-flash run DIR_OR_REPO "PROMPT"')
    return read_modelfile(args.file or "Modelfile"), prompt


def _names_model(word: str) -> bool:
    """Return True for a folder, and for the form of a Hugging Face repository, or of a name of Ollama."""
    return Path(word).is_dir() or re.fullmatch(r"[\w.-]+/[\w.-]+", word) is not None or is_ollama_name(word)


def _answer(
    conversation: Conversation, model: nn.Module, load_seconds: float, verbose: bool, out: TextIO, text: str
) -> None:
    """Print the answer to a message until it ends or the user presses Ctrl-C."""
    recorder = Recorder(model, 0, load_seconds)
    with Interrupts() as interrupts:
        pieces = conversation.answer(text, interrupts.check, recorder.add, lambda: interrupts.stopped)
        try:
            with closing(pieces):
                for piece in pieces:
                    print(piece, end="", file=out, flush=True)
        except AnswerStoppedError:
            pass  # stopped before the first token
    print(file=out, flush=True)
    if verbose and recorder.tokens:
        recorder.num_prompt_tokens = conversation.num_new_tokens
        step = recorder.plan.prefill_step_size if recorder.plan else DEFAULT_PREFILL_STEP_SIZE
        print_rich(render_generation(make_report(recorder, "", step)), sys.stderr)


def _converse(conversation: Conversation, answer: Callable[[str], None]) -> None:
    """Answer line by line, until the user ends the conversation."""
    note(HELP)
    while True:
        try:
            print(">>> ", end="", file=sys.stderr, flush=True)
            text = input().strip()
        except EOFError:
            return
        if text in BYE:
            return
        if text == "/clear":
            conversation.clear()
        elif text in COMMANDS:
            print(HELP, file=sys.stderr)
        elif text.startswith("/") and len(text.split()) == 1:
            print(f"there is no command {text}{did_you_mean(text, COMMANDS)}", file=sys.stderr)
        elif text:
            answer(text)


@contextmanager
def loaded(modelfile: Modelfile, config: FlashConfig) -> Iterator[tuple[nn.Module, Any]]:
    """Yield the model and its tokenizer, streamed unless the Modelfile says ``FLASH false``."""
    adapter = None if modelfile.adapter is None else str(modelfile.adapter)
    settings = {} if modelfile.chat_template is None else {"chat_template": modelfile.chat_template}
    if config.enabled:
        model, tokenizer = load(modelfile.base, config, adapter_path=adapter, tokenizer_config=settings)
    else:
        model, tokenizer = mlx_lm.load(modelfile.base, adapter_path=adapter, tokenizer_config=settings)
    with model if isinstance(model, FlashLLM) else nullcontext():
        yield model, tokenizer


def server_flags(modelfile: Modelfile, args: argparse.Namespace) -> list[str]:
    """Return the Modelfile as flags of ``mlx_lm.server``. Parameters without a flag are reported on stderr."""
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
        note(f"{modelfile.path}: PARAMETER {name} has no effect here: clients of the server set it")
    return [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]


def _chat_template(modelfile: Modelfile) -> str | None:
    """Return the chat template, extended by the messages that every conversation begins with."""
    first = first_messages(modelfile)
    template = modelfile.chat_template
    if not first:
        return template
    if template is None:
        template = load_tokenizer(resolve(modelfile.base)).chat_template
    if template is None:
        print(f"{modelfile.path}: SYSTEM and MESSAGE have no effect: the model has no chat template", file=sys.stderr)
        return None
    return opening(first) + template


def opening(messages: list[dict[str, str]]) -> str:
    """Return Jinja that puts messages before those of a request. The request's own system prompt wins."""
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
    """Return a Jinja literal: JSON, without surrogate pairs, which Jinja does not join."""
    return json.dumps(messages, ensure_ascii=False)
