"""The batches that answer requests together, as the settings say."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_flash.generation import generate_step, speculative_generate_step
from mlx_flash.model import FlashLLM
from mlx_flash.residency.plan import DEFAULT_PREFILL_STEP_SIZE
from mlx_flash.server.job import Jobs
from mlx_flash.server.lone import Loop
from mlx_flash.server.rows import ServedRows

if TYPE_CHECKING:  # an extra
    from mlx_flash.server.seeing import Sight


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Limits of a model's batches, with mlx-lm's values.

    Attributes:
        prefill_step_size: prompt tokens in one forward call.
        decode_concurrency, prompt_concurrency: the most answers, and prompts, that are computed together.
        prompt_cache_size: the most prompt caches that are kept.
        prompt_cache_bytes: the most bytes of these; None takes half of what the plan reserves.
        num_draft_tokens: the most tokens that are guessed at a time with a draft model; None for as many as pay.
        kv_bits, kv_group_size, quantized_kv_start: as of ``mlx_lm.generate``. Requests are answered one after another.
    """

    prefill_step_size: int = DEFAULT_PREFILL_STEP_SIZE
    decode_concurrency: int = 32
    prompt_concurrency: int = 8
    prompt_cache_size: int = 10
    prompt_cache_bytes: int | None = None
    num_draft_tokens: int | None = None
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 5000


def make_rows(
    model: FlashLLM,
    draft: Any,
    options: BatchOptions,
    jobs: Jobs,
    *,
    is_shared: bool,
    sight: Sight | None = None,
) -> ServedRows:
    """Return what computes the requests of a model.

    Args:
        model: the model.
        draft: a model that guesses tokens; None for none.
        options: limits.
        jobs: the requests.
        is_shared: other ranks compute the same requests.
        sight: of a model that sees.
    """
    loop = _loop(model, draft, options, sight)
    has_cheap_passes = not is_shared and not model.plan.read_bytes  # nothing is read for another pass
    hooks: dict[str, Any] = {"on_prompt": jobs.note_prompt, "reading_of": jobs.reading_of, "is_apart": jobs.is_apart}
    return ServedRows(
        model,
        is_shared=is_shared,
        loop=loop,
        inputs_of=jobs.inputs_of,
        takes_turns=True,
        takes_turns_alone=has_cheap_passes,
        completion_batch_size=options.decode_concurrency if loop is None else 1,
        prefill_batch_size=options.prompt_concurrency if loop is None else 1,
        prefill_step_size=min(options.prefill_step_size, model.plan.prefill_step_size),
        stream=mx.default_stream(mx.default_device()),
        **({} if is_shared else hooks),  # all ranks compute a pass to its end
    )


def _loop(model: FlashLLM, draft: Any, options: BatchOptions, sight: Sight | None) -> Loop | None:
    """Return the loop that answers requests one after another; None where they are computed together."""
    quantized: dict[str, Any] = {"kv_bits": options.kv_bits, "kv_group_size": options.kv_group_size}
    quantized |= {"quantized_kv_start": options.quantized_kv_start}
    if sight is not None:  # the same tokens may stand for other pictures, so caches are not kept
        return Loop(partial(sight.steps, **quantized), sight.make_cache, keeps_caches=False)
    if draft is not None:
        drafted = {"model": model, "draft_model": draft}
        if options.num_draft_tokens is not None:
            drafted["num_draft_tokens"] = options.num_draft_tokens
        caches = [partial(make_prompt_cache, each) for each in (model, draft)]
        return Loop(partial(speculative_generate_step, **drafted), lambda: [e for make in caches for e in make()])
    if options.kv_bits is not None:
        return Loop(partial(generate_step, model=model, **quantized), partial(make_prompt_cache, model))
    return None
