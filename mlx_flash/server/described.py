"""Models that Modelfiles describe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlx_flash.config import FlashConfig
from mlx_flash.modelfile.conversation import DEFAULT_REPEAT_LAST_N, first_messages
from mlx_flash.modelfile.parse import Modelfile
from mlx_flash.server.catalog import Source
from mlx_flash.server.sampling import Defaults

_ALL = 1_000_000


def source_of(
    modelfile: Modelfile, name: str, config: FlashConfig, defaults: Defaults, settings: dict[str, Any] | None = None
) -> Source:
    """Return the model of a Modelfile.

    Args:
        modelfile: the Modelfile.
        name: by which requests name it.
        config: how to stream.
        defaults: of what it leaves open.
        settings: of the tokenizer.
    """
    template = {} if modelfile.chat_template is None else {"chat_template": modelfile.chat_template}
    return Source(
        name=name,
        base=modelfile.base,
        adapter=None if modelfile.adapter is None else str(modelfile.adapter),
        config=config,
        tokenizer_settings={**(settings or {}), **template},
        defaults=_defaults(modelfile, defaults),
        first_messages=tuple(first_messages(modelfile)),
        modelfile=modelfile,
    )


def _defaults(modelfile: Modelfile, defaults: Defaults) -> Defaults:
    parameters = modelfile.parameters
    given: dict[str, Any] = {
        "temperature": parameters.temperature,
        "top_p": parameters.top_p,
        "top_k": parameters.top_k,
        "min_p": parameters.min_p,
        "seed": parameters.seed,
        "stop": modelfile.stop or None,
    }
    if parameters.num_predict is not None and parameters.num_predict > 0:
        given["max_tokens"] = parameters.num_predict
    last = DEFAULT_REPEAT_LAST_N if parameters.repeat_last_n is None else parameters.repeat_last_n
    if parameters.repeat_penalty is not None and last:
        given["repetition_penalty"] = parameters.repeat_penalty
        given["repetition_context_size"] = _ALL if last == -1 else last
    return replace(defaults, **{name: value for name, value in given.items() if value is not None})
