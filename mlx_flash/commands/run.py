"""``mlx-flash run``: a model or a Modelfile, prompted, in conversation, or served."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

import mlx.nn as nn
import mlx_lm
from huggingface_hub.utils.tqdm import disable_progress_bars

from mlx_flash.commands.common import make_config, note, note_lines
from mlx_flash.commands.preview import is_remote
from mlx_flash.commands.slash import COMPLETIONS
from mlx_flash.commands.statusline import Status
from mlx_flash.commands.talk import Talk
from mlx_flash.commands.typedlines import make_reader
from mlx_flash.config import FlashConfig
from mlx_flash.engine.engine import Progress
from mlx_flash.engine.prepare import resolve
from mlx_flash.errors import ConfigError
from mlx_flash.layout.hub import is_ollama_name
from mlx_flash.loading import apply_adapter, load
from mlx_flash.model import FlashLLM
from mlx_flash.modelfile.conversation import Conversation
from mlx_flash.modelfile.namedfiles import named_models
from mlx_flash.modelfile.parse import Modelfile, read_modelfile


def run(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash run``."""
    modelfile, prompt = _described(args)
    note_lines(modelfile)
    config = make_config(args, modelfile.flash)
    if args.serve:
        from mlx_flash.commands.serve import serve_modelfile  # an extra

        return serve_modelfile(modelfile, config, args)
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    talk_about(args, modelfile, config, prompt, out)
    return 0


def talk_about(
    args: argparse.Namespace,
    modelfile: Modelfile,
    config: FlashConfig,
    prompt: str | None,
    out: TextIO,
    tokenizer_config: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> None:
    """Load a model, and answer a prompt or hold a conversation.

    Args:
        args: ``max_tokens``, ``verbose`` and ``quiet``.
        modelfile: the model, its prompts and its sampling.
        config: how to stream.
        prompt: the only message; None converses.
        out: receives the answers.
        tokenizer_config: settings of the tokenizer.
        options: further arguments of :class:`Conversation`.
    """
    if args.max_tokens is not None:
        modelfile = replace(modelfile, parameters=replace(modelfile.parameters, num_predict=args.max_tokens))
    read = make_reader(COMPLETIONS) if prompt is None else None  # before loading: libraries are in the budget, too
    _download(modelfile.base)
    began = time.perf_counter()
    with ExitStack() as stack:
        with Status(f"loading {modelfile.base}", is_shown=not args.quiet) as status:
            loading = loaded(modelfile, config, status.show_loading, tokenizer_config)
            model, tokenizer = stack.enter_context(loading)
        if not tokenizer.has_chat_template:
            note(f"mlx-flash: {modelfile.base} has no chat template: it continues a text of the messages' lines")
        conversation = Conversation(model, tokenizer, modelfile, **options)
        talk = Talk(conversation, model, time.perf_counter() - began, out, bool(args.verbose))
        if read is not None:
            talk.converse(read)
        elif prompt is not None:
            talk.answer(prompt)


def _download(base: str) -> None:
    """Download a model that is not here, with Hugging Face's own progress, which would mix with our line."""
    if is_remote(base):
        note(f"{base} is not on this machine and is downloaded; `mlx-flash pull {base}` shows its plan first")
        resolve(base)
    disable_progress_bars()


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
        return described_model(model), prompt
    if args.file is None and not Path("Modelfile").exists():
        raise ConfigError('run found neither a model nor ./Modelfile. Hint: mlx-flash run DIR_OR_REPO "PROMPT"')
    return read_modelfile(args.file or "Modelfile"), prompt


def described_model(name: str) -> Modelfile:
    """Return the Modelfile with a name, or one that only names a folder or repository."""
    if not Path(name).is_dir() and (path := named_models().get(name)):
        return read_modelfile(path)
    return Modelfile(path=Path(name), base=name)


def _names_model(word: str) -> bool:
    """Return True for a folder, a named Modelfile, and for the form of a repository or of a name of Ollama."""
    is_repository = re.fullmatch(r"[\w.-]+/[\w.-]+", word) is not None
    return Path(word).is_dir() or word in named_models() or is_repository or is_ollama_name(word)


@contextmanager
def loaded(
    modelfile: Modelfile,
    config: FlashConfig,
    progress: Progress | None = None,
    tokenizer_config: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[tuple[nn.Module, Any]]:
    """Yield the model and its tokenizer, streamed unless the Modelfile says ``FLASH false``."""
    adapter = None if modelfile.adapter is None else str(modelfile.adapter)
    template = {} if modelfile.chat_template is None else {"chat_template": modelfile.chat_template}
    settings = {**tokenizer_config, **template}
    if config.enabled:
        options = {"adapter_path": adapter, "tokenizer_config": settings, "progress": progress}
        model, tokenizer = load(modelfile.base, config, **options)  # type: ignore[arg-type]
    else:
        model, tokenizer = mlx_lm.load(modelfile.base, tokenizer_config=settings)
        if adapter is not None:
            apply_adapter(model, adapter)
    with model if isinstance(model, FlashLLM) else nullcontext():
        yield model, tokenizer
