"""mlx-lm's generation loop, which its other functions look up by name, and its generator of batches."""

from __future__ import annotations

import dis
import importlib
import types
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple, cast

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


def with_names(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Return a copy of a function of mlx-lm in which some global names mean something else."""
    stock = cast(types.FunctionType, function)
    copy = types.FunctionType(
        stock.__code__, {**stock.__globals__, **names}, stock.__name__, stock.__defaults__, stock.__closure__
    )
    copy.__kwdefaults__ = stock.__kwdefaults__
    copy.__doc__ = stock.__doc__
    return copy


StockBatchGenerator: Any = require(_module, "BatchGenerator")

Progress: Any = require(_module, "PromptProcessingBatch").Response
"""Tokens done and tokens to do of a prompt: (uid, progress, end_of_segment, end_of_prompt)."""

_generation_batch: Any = require(_module, "GenerationBatch")
require(_generation_batch, "extend", "batch")

Response: Any = _generation_batch.Response
"""A token: (uid, token, logprobs, finish_reason, prompt_cache, all_tokens)."""

merge_caches: Callable[[list[list[Any]]], list[Any]] = require(_module, "_merge_caches", "caches")

stock_batch_generate: Callable[..., Any] = require(
    _module, "batch_generate", "model", "prompts", "prompt_caches", "max_tokens", "return_prompt_caches", "kwargs"
)

for _caller, _called in (
    (stock_stream_generate, "generate_step"),
    (stock_stream_generate, "speculative_generate_step"),
    (stock_generate, "stream_generate"),
    (stock_batch_generate, "BatchGenerator"),
):
    require_that(_called in _caller.__code__.co_names, f"{_caller.__name__} calls no {_called}")
for _name in ("_next", "insert_segments", "extract_cache", "remove", "stats", "close"):
    require(StockBatchGenerator, _name)
# Of the compiled code: inspect.getsource() would parse the module for each of them, 0.15 s in all.
_set = {each.argval for each in dis.get_instructions(StockBatchGenerator.__init__) if each.opname == "STORE_ATTR"}
_wanted = "_unprocessed_sequences", "_counters", "completion_batch_size", "prefill_batch_size"
for _attribute in (*_wanted, "_uid_count", "_prompt_batch", "_generation_batch", "_old_wired_limit"):
    require_that(_attribute in _set, f"BatchGenerator sets no {_attribute}")


class Wanted(NamedTuple):
    """The work that ``batch_generate`` was called for."""

    caches: bool  # whether it returns prompt caches
    lengths: list[int]  # the most tokens of the longest sequences, prompt and answer, that are computed together
    given: Sequence[list[Any]]  # the prompt caches to go on from, if there are any


def wanted_of(frame: FrameType) -> Wanted | None:
    """Return what ``batch_generate`` was called for, from its frame; None if the frame is another's."""
    if frame.f_code is not stock_batch_generate.__code__:
        return None
    given = frame.f_locals
    prompts, most = given["prompts"], given["max_tokens"]
    answers = [most] * len(prompts) if isinstance(most, int) else most
    caches = given["prompt_caches"] or [()] * len(prompts)
    before = [max((getattr(entry, "offset", 0) for entry in cache), default=0) for cache in caches]
    lengths = sorted(map(sum, zip(before, map(len, prompts), answers, strict=False)), reverse=True)
    options = given["kwargs"]
    num_together = max(options.get("completion_batch_size", 32), options.get("prefill_batch_size", 8))
    num_together += 1  # one that has ended is kept while the next one begins
    return Wanted(given["return_prompt_caches"], lengths[:num_together], given["prompt_caches"] or ())


class Waiting(NamedTuple):
    """A sequence that was inserted, as mlx-lm keeps it."""

    uid: int
    segments: list[list[int]]
    max_tokens: int
    cache: list[Any]
    tokens: list[int]
    sampler: Any
    processors: Any
    stop_sequences: Any

    @property
    def most_tokens(self) -> int:
        """The most tokens that its cache will have."""
        return len(self.tokens) + sum(map(len, self.segments)) + int(self.max_tokens)


class BatchGenerator(StockBatchGenerator):  # type: ignore[misc]
    """mlx-lm's, for a subclass that computes the sequences in its own way."""

    @property
    def waiting(self) -> list[Waiting]:
        """The sequences that were inserted and not taken."""
        return [Waiting(*sequence) for sequence in self._unprocessed_sequences]

    @property
    def num_waiting(self) -> int:
        return len(self._unprocessed_sequences)

    def insert_as(self, uid: int, segments: list[list[int]], **options: Any) -> None:
        """Insert one sequence under a number that the caller chooses."""
        self._uid_count = uid
        self.insert_segments([segments], **{name: [value] for name, value in options.items()})

    def forget(self, uids: set[int]) -> None:
        super().remove(uids & {sequence[0] for sequence in self._unprocessed_sequences})

    def count(self, *, prompt_tokens: int, new_tokens: int, seconds: float) -> None:
        """Count what a call of ``next`` did."""
        counters = self._counters
        counters.prompt_tokens += prompt_tokens
        counters.generation_tokens += new_tokens
        counters.generation_steps += bool(new_tokens)
        if prompt_tokens:
            counters.prompt_time += seconds
        else:
            counters.decode_time += seconds


class Group(StockBatchGenerator):  # type: ignore[misc]
    """mlx-lm's, for sequences of another generator, which keep their numbers.

    Several sequences have as many segments, none longer than a step: so their prompts end in the same call.
    """

    _generation_batch: Any

    def __init__(self, model: Any, sequences: Sequence[Waiting], **options: Any) -> None:
        super().__init__(model, **options)
        self._old_wired_limit = None  # the other generator sets Metal's limit, and puts it back
        self.uids = [each.uid for each in sequences]
        self.sequences = sequences if len(sequences) > 1 else ()  # a lone one's cache is not needed any more
        self.num_restored = 0  # tokens that came from the prefix cache
        for each in sequences:
            copied = each._replace(segments=[*each.segments], tokens=[*each.tokens])
            self._unprocessed_sequences.append(tuple(copied))

    def __len__(self) -> int:
        return len(self._unprocessed_sequences) + len(self._prompt_batch.uids) + len(self._generation_batch.uids)

    @property
    def num_prompts(self) -> int:
        return len(self._unprocessed_sequences) + len(self._prompt_batch.uids)

    @property
    def newest(self) -> int | None:
        """Number of the sequence whose answer began last; None while prompts are computed."""
        uids = self._generation_batch.uids
        return uids[-1] if uids else None

    def take(self, other: Group) -> None:
        self._generation_batch.extend(other._generation_batch)
