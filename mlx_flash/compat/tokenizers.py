"""mlx-lm's loader of tokenizers, spared two copies of the vocabulary as Python objects.

mlx-lm parses all of ``tokenizer.json`` to look at its decoder, and transformers to look at its added tokens. Both keep
what they parsed while the tokenizers library builds the vocabulary: 400 MB for 262 144 entries.
"""

from __future__ import annotations

import json
import mmap
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from mlx_lm import tokenizer_utils
from mlx_lm import utils as mlx_lm_utils
from transformers import tokenization_utils_base

from mlx_flash.compat.require import require, require_that

TOKENIZER_FILE = "tokenizer.json"

_READERS = (tokenizer_utils, tokenization_utils_base)
"""Modules that parse the whole file and use none of its model."""

_MODEL = re.compile(rb',\s*"model"\s*:\s*\{')
"""The beginning of the vocabulary. In a vocabulary, a number follows the word; within a string, quotes are escaped."""

_KEPT = ("added_tokens", "decoder")
_lock = threading.Lock()

stock_load_tokenizer = require(mlx_lm_utils, "load_tokenizer", "model_path", "tokenizer_config_extra", "eos_token_ids")
for _module in _READERS:
    require_that(vars(_module).get("json") is json, f"{_module.__name__}.json is not the standard library's module")


_CALL_FIELDS = ("_tool_call_start", "_tool_call_end", "_tool_parser", "_response_format")
for _name in ("_tokenizer", "_chat_template", *_CALL_FIELDS):
    _names = require(tokenizer_utils, "TokenizerWrapper").__init__.__code__.co_names
    require_that(_name in _names, f"TokenizerWrapper has no field {_name}")


class _Json:
    """The module ``json``, whose ``load`` leaves out the model of a tokenizer's file."""

    @staticmethod
    def load(file: IO[str]) -> Any:
        if Path(file.name).name == TOKENIZER_FILE and (found := without_model(Path(file.name))) is not None:
            return found
        return json.load(file)

    def __getattr__(self, name: str) -> Any:
        return getattr(json, name)


def load_tokenizer(*args: Any, **kwargs: Any) -> Any:
    """Return what ``mlx_lm.utils.load_tokenizer`` returns. Raises: ValueError: the file is damaged, among others."""
    try:
        with _lock, _json_replaced():
            return stock_load_tokenizer(*args, **kwargs)
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise ValueError(str(error)) from error  # the tokenizers library raises nothing more precise


def give_calls(tokenizer: Any, start: str, end: str, parse: Callable[..., Any], states: dict[str, Any]) -> None:
    """Give a tokenizer of mlx-lm marks around tool calls, a parser, and states of answers, in mlx-lm's form."""
    vars(tokenizer).update(zip(_CALL_FIELDS, (start, end, parse, states), strict=True))


def change_messages(tokenizer: Any, change: Callable[[list[Any]], list[Any]]) -> None:
    """Make a tokenizer of mlx-lm change the messages before its chat template renders them."""
    fields = vars(tokenizer)
    stock = fields["_chat_template"] or partial(fields["_tokenizer"].apply_chat_template, tokenize=False)
    fields["_chat_template"] = lambda messages, **options: stock(change(messages), **options)


@contextmanager
def _json_replaced() -> Iterator[None]:
    try:
        for module in _READERS:
            vars(module)["json"] = _Json()
        yield
    finally:
        for module in _READERS:
            vars(module)["json"] = json


def without_model(path: Path) -> dict[str, Any] | None:
    """Return what a tokenizer's file holds before its model; None where that cannot be told apart from the rest."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = _MODEL.search(content)
        head = b"" if found is None else content[: found.start()] + b"}"
    try:
        parsed = json.loads(head)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) and all(key in parsed for key in _KEPT) else None
