"""``mlx-flash run`` and ``chat``: a model or a Modelfile, prompted, in conversation, or served."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from huggingface_hub.utils.tqdm import disable_progress_bars

from mlx_flash.commands.arguments import default_of
from mlx_flash.commands.common import Status, make_config, note, note_lines
from mlx_flash.commands.preview import is_remote
from mlx_flash.commands.talk import COMPLETIONS, LAST, Talk, alarm, begun, kept, make_reader
from mlx_flash.commands.vision import SeeingConversation, is_vision, seeing_talk
from mlx_flash.config import FlashConfig
from mlx_flash.engine.engine import Progress
from mlx_flash.engine.prepare import resolve
from mlx_flash.engine.tokenizer import load_tokenizer
from mlx_flash.errors import ConfigError
from mlx_flash.layout.hub import is_ollama_name
from mlx_flash.loading import apply_adapter, load
from mlx_flash.model import FlashLLM
from mlx_flash.modelfile.conversation import Conversation
from mlx_flash.modelfile.namedfiles import named_models
from mlx_flash.modelfile.parse import Modelfile, read_modelfile
from mlx_flash.ranks import launched_group


class Format:
    """The form of the answers of one model.

    Args:
        text: ``json``, or a file with a JSON schema.
        tokenizer: mlx-lm's wrapper. Made before the plan, which then counts the memory of this.

    Raises:
        ConfigError: the file is no schema, or llguidance is not installed.
        RefusedError: the schema is not supported, or the model's answers have no form that it could have.
    """

    def __init__(self, text: str, tokenizer: Any) -> None:
        from mlx_flash.server.grammars import Grammars, schema_grammar

        try:
            schema = None if text == "json" else json.loads(Path(text).read_bytes())
            self._rule = schema_grammar(schema, "--format")
        except ModuleNotFoundError as error:
            raise ConfigError("--format needs llguidance. Hint: pip install llguidance") from error
        except (FileNotFoundError, TypeError, json.JSONDecodeError) as error:
            raise ConfigError(f"--format {text}: {error}. Hint: json, or a file with a JSON schema.") from error
        self._tokenizer, self._grammars = tokenizer, Grammars(tokenizer, len(tokenizer))
        self.processors([])  # makes the table of the vocabulary

    def processors(self, prompt: list[int]) -> list[Any]:
        """Return the logits processors of the answer to a prompt."""
        from mlx_flash.server.prompts import state_of, whole
        from mlx_flash.server.request import GenerationRequest

        request = GenerationRequest(model="", messages=(), grammar=self._rule)
        grammar = self._grammars.of(request, whole(prompt, state_of(self._tokenizer, prompt)))
        return [self._grammars.processor(str(grammar))]


def run(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash run`` and ``chat``: answer a prompt, hold a conversation, or serve."""
    if args.pipeline or launched_group() is not None:
        raise ConfigError(f"{args.command} is for one rank. Hint: mlx-flash exec -- mlx_lm.chat --model MODEL")
    last = kept(LAST) if args.resume else None
    modelfile, prompt = _described(args, None if last is None else last[0])
    note_lines(modelfile)
    config = make_config(args, modelfile.flash)
    if args.serve:
        from mlx_flash.commands.serve import serve_modelfile  # an extra

        return serve_modelfile(modelfile, config, args)
    if not is_remote(modelfile.base):
        resolve(modelfile.base)  # an error comes before a prompt is read
    prompt = sys.stdin.read() if prompt == "-" else prompt
    if prompt is not None and not prompt.strip():
        raise ConfigError("the prompt is empty. Hint: give it in quotes, or - to read it from standard input.")
    read = make_reader(COMPLETIONS) if prompt is None else None  # before loading: libraries are in the budget, too
    is_typed = read is not None and sys.stdin.isatty()
    if read is not None and not is_typed:
        read = begun(read)
    if args.seed is not None:
        mx.random.seed(args.seed)
    began = time.perf_counter()
    with ExitStack() as stack:
        opening, kind = _opening(args, modelfile, config)

        def open_() -> tuple[Any, Any]:
            with Status(f"loading {modelfile.base}", is_shown=not args.quiet) as status:
                return stack.enter_context(opening(status.show_bytes))

        conversation = kind(*open_(), modelfile)
        if last is not None:
            conversation.resume(last[1])
        conversation.pictures = [str(file.absolute()) for file in args.image or ()]
        loading = time.perf_counter() - began
        talk = Talk(conversation, loading, out, bool(args.verbose), is_typed or args.resume, reopen=open_)
        if read is None or prompt is not None:
            talk.answer(str(prompt))
            return 0

        def release() -> None:
            conversation.release()
            stack.close()

        def read_or_release() -> str:
            with alarm(args.keepalive, release):
                return read()

        return talk.converse(read_or_release, is_typed)


def _opening(
    args: argparse.Namespace, modelfile: Modelfile, config: FlashConfig
) -> tuple[Callable[[Progress], AbstractContextManager[tuple[Any, Any]]], Callable[..., Conversation]]:
    """Return what opens a model, any number of times, and what makes a conversation with it."""
    _download(modelfile.base)
    path, settings = resolve(modelfile.base), {"trust_remote_code": bool(args.trust_remote_code)}
    options: dict[str, Any] = {}
    if args.format is not None:
        options["processors"] = Format(args.format, load_tokenizer(path, settings)).processors
    if not is_vision(args, path, prefers=False):
        xtc = {"xtc_probability": args.xtc_probability, "xtc_threshold": args.xtc_threshold}
        kind = partial(Conversation, max_kv_size=args.max_kv_size, xtc=xtc, **options)
        return partial(loaded, modelfile, config, tokenizer_config=settings), kind
    if modelfile.adapter is not None or modelfile.chat_template is not None or args.xtc_probability or args.max_kv_size:
        raise ConfigError(
            f"{modelfile.base} sees, and mlx-vlm takes no ADAPTER, TEMPLATE, --xtc-probability or --max-kv-size. "
            "Hint: leave them out, or give --no-vision."
        )
    return partial(seeing_talk, args, path, config), partial(SeeingConversation, **options)


def _download(base: str) -> None:
    """Download a model that is not here, with Hugging Face's own progress, which would mix with our line."""
    if is_remote(base):
        note(f"{base} is not on this machine and is downloaded; `mlx-flash pull {base}` shows its plan first")
        resolve(base)
    disable_progress_bars()


def _described(args: argparse.Namespace, model: str | None) -> tuple[Modelfile, str | None]:
    """Return the Modelfile, or one that only names a model, with what flags say, and the prompt of the command line.

    Args:
        args: of the command.
        model: that of the conversation that goes on.

    Raises:
        ConfigError: there are too many words, or neither a model nor a Modelfile.
    """
    words, model = (
        [*args.words, *([] if args.prompt is None else [args.prompt])],
        args.model or (model if args.file is None else None),
    )
    if args.model is None and args.file is None and words and (len(words) > 1 or _names_model(words[0])):
        model = words.pop(0)
    if len(words) > 1:
        raise ConfigError(f"run takes one prompt, not {len(words)}. Hint: put a prompt of several words in quotes.")
    if model is None and args.command == "chat":
        model = default_of("chat", "--model")
    if model is not None and args.file is not None:
        raise ConfigError(f"run: both a model, {model}, and a Modelfile, {args.file}, are given. Hint: leave one out.")
    if model is None and args.file is None and not Path("Modelfile").exists():
        raise ConfigError('run found neither a model nor ./Modelfile. Hint: mlx-flash run DIR_OR_REPO "PROMPT"')
    found = read_modelfile(args.file or "Modelfile") if model is None else described_model(model)
    given = {"temperature": args.temp, "top_p": args.top_p, "num_predict": args.max_tokens}
    parameters = replace(found.parameters, **{name: value for name, value in given.items() if value is not None})
    adapter = Path(args.adapter_path) if args.adapter_path else found.adapter
    system = args.system_prompt or found.system
    return replace(found, parameters=parameters, adapter=adapter, system=system), words[0] if words else None


def described_model(name: str) -> Modelfile:
    """Return the Modelfile with a name or at a path, or one that only names a folder or repository."""
    if Path(name).is_file() and not name.endswith(".gguf"):
        return read_modelfile(name)
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
    if not tokenizer.has_chat_template:
        note(f"mlx-flash: {modelfile.base} has no chat template: it continues a text of the messages' lines")
    with model if isinstance(model, FlashLLM) else nullcontext():
        yield model, tokenizer
