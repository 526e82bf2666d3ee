"""``mlx-flash run``: a model or a Modelfile, prompted, in conversation, or served."""

from __future__ import annotations

import argparse
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
from mlx_flash.commands.render import render_generation
from mlx_flash.commands.report import Recorder, make_report
from mlx_flash.config import FlashConfig, did_you_mean
from mlx_flash.errors import ConfigError
from mlx_flash.layout.hub import is_ollama_name
from mlx_flash.loading import load
from mlx_flash.model import FlashLLM
from mlx_flash.modelfile.conversation import Conversation
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
        from mlx_flash.commands.serve import serve_modelfile  # an extra

        return serve_modelfile(modelfile, config, args)
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
