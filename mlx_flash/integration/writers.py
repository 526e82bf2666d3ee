"""The refusal of programs that load a model in order to change its weights."""

from __future__ import annotations

from collections.abc import Container

from mlx_flash.compat.callers import calling_modules
from mlx_flash.errors import StreamedWeightsError


def refuse_writers(writers: Container[str]) -> None:
    """Refuse callers that change or write weights."""
    for module in calling_modules():
        if module in writers:
            raise StreamedWeightsError(
                f"{module} needs the model's weights to change or write them; a streamed model has them for moments. "
                "Hint: run it without the patch (remove_flash_patch(), or FlashConfig(enabled=False))."
            )
