"""The boundary of a request: whatever its work raises ends that request alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlx_flash.compat.compiler import explained
from mlx_flash.errors import CheckpointError, FlashError, RefusedError

_log = logging.getLogger("mlx_flash")


@contextmanager
def ends_alone(fail: Callable[[RefusedError], None]) -> Iterator[None]:
    """Give what a block raises to the request that it works for. The thread goes on after the block.

    Args:
        fail: takes the error.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 a request may fail in any way: in a template, a sampler, a parser
        fail(refusal_of(error))


@contextmanager
def refused(field: str) -> Iterator[None]:
    """Turn what a block raises into a refusal of the request, whose content is wrong.

    Args:
        field: of the request.

    Raises:
        RefusedError: the block raised something.
    """
    try:
        yield
    except (FlashError, MemoryError):
        raise
    except Exception as error:
        raise RefusedError(f"{field} cannot be used: {type(error).__name__}: {error}", 400, field) from error


def refusal_of(error: Exception) -> RefusedError:
    """Return an error as its client gets it, and log it without text that may quote the prompt."""
    if isinstance(error, RefusedError):
        cause = error.__cause__
        _log.info("a request failed: %s", error if cause is None else type(cause).__name__)
        return error
    error = explained(error)
    is_ours = isinstance(error, FlashError)
    _log.error("a request failed: %s", error if is_ours else type(error).__name__)
    _log.debug("its origin:", exc_info=error)
    status = 400 if isinstance(error, CheckpointError) else 500  # of a model that the request names
    refused = RefusedError(str(error) if is_ours else f"{type(error).__name__}: {error}", status)
    refused.__cause__ = error.with_traceback(None)  # whose frames hold the caches of the request
    return refused
