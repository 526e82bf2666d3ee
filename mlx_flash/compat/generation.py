"""mlx-lm's generation loop, which its other functions look up by name."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

from mlx_flash.compat.require import require, require_that

GenerateStep = Callable[..., Iterator[tuple[int, Any]]]
DraftStep = Callable[..., Iterator[tuple[int, Any, bool]]]

_module = importlib.import_module("mlx_lm.generate")  # the package has a function of this name

stock_generate_step: GenerateStep = require(
    _module, "generate_step", "prompt", "model", "stream", "max_tokens", "sampler", "prompt_cache", "prefill_step_size"
)
stock_speculative_generate_step: DraftStep = require(
    _module,
    "speculative_generate_step",
    "prompt",
    "model",
    "draft_model",
    "stream",
    "num_draft_tokens",
    "max_tokens",
    "sampler",
    "prompt_cache",
    "prefill_step_size",
)
stock_stream_generate: Callable[..., Iterator[Any]] = require(_module, "stream_generate", "model", "tokenizer")
stock_generate: Callable[..., str] = require(_module, "generate", "model", "tokenizer")
generation_stream: Any = require(_module, "generation_stream")

require_that("generate_step" in stock_stream_generate.__code__.co_names, "stream_generate calls no generate_step")
require_that(
    "speculative_generate_step" in stock_stream_generate.__code__.co_names,
    "stream_generate calls no speculative_generate_step",
)
require_that("stream_generate" in stock_generate.__code__.co_names, "generate calls no stream_generate")


def with_names(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Return a copy of a function of mlx-lm in which some global names mean something else."""
    stock = cast(types.FunctionType, function)
    copy = types.FunctionType(
        stock.__code__, {**stock.__globals__, **names}, stock.__name__, stock.__defaults__, stock.__closure__
    )
    copy.__kwdefaults__ = stock.__kwdefaults__
    copy.__doc__ = stock.__doc__
    return copy
