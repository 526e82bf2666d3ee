"""Every error mlx-flash raises on purpose: what was asked, what was found, where, and a hint if the user can act."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class FlashError(Exception):
    """Base class of all errors of mlx-flash."""


class ConfigError(FlashError, ValueError):
    """A setting has a wrong type, is out of range, or contradicts another one."""


class BudgetError(ConfigError):
    """The RAM budget cannot hold the plan.

    Attributes:
        minimum_bytes: the smallest workable budget in bytes.
    """

    def __init__(self, message: str, minimum_bytes: int) -> None:
        super().__init__(message)
        self.minimum_bytes = minimum_bytes


class PictureError(FlashError, ValueError):
    """A picture is none, is broken, is too large, or does not suit the model."""


class CheckpointError(FlashError, ValueError):
    """The model directory is not a usable checkpoint."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """The directory, or a file it must hold, does not exist."""


class HeaderError(CheckpointError):
    """A safetensors header breaks the format."""


class IndexFileError(CheckpointError):
    """``model.safetensors.index.json`` contradicts the files beside it."""


class ReadError(FlashError, OSError):
    """Bytes of a tensor could not be read while running.

    The model stays usable: the next forward pass reads the bytes again.
    """


class TruncatedFileError(ReadError):
    """A file ends before the bytes that its header promised."""


class FileChangedError(ReadError):
    """A file is not, or no longer, the one the model was loaded from."""


class WriteError(FlashError, OSError):
    """A file could not be written, or does not hold what was written to it."""


class CacheError(FlashError, RuntimeError):
    """A prompt cache does not hold the tokens that it should, because a call was interrupted."""


class StreamedWeightsError(FlashError, RuntimeError):
    """An operation would read or write slot contents as if they were weights."""


class ClosedError(FlashError, RuntimeError):
    """The model was closed."""


class SelfTestError(FlashError, RuntimeError):
    """No way of reading brings all bytes to the memory of MLX's device, or the one that is needed does not."""


class PeerError(FlashError, RuntimeError):
    """Another rank of a model was lost, or computes something else."""


class CompilerError(FlashError, RuntimeError):
    """The C++ compiler that MLX started for a kernel failed, or was killed."""


class RefusedError(FlashError, ValueError):
    """The server does not begin with a request, or ends it.

    Attributes:
        status: the HTTP status of the answer.
        field: the field of the request that is wrong; None if it is none in particular.
    """

    def __init__(self, message: str, status: int, field: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.field = field


class CompatibilityError(FlashError, ImportError):
    """The installed MLX or mlx-lm lacks something that mlx-flash relies on."""


@contextmanager
def mlx_explained() -> Iterator[None]:
    """Raise a CompatibilityError in a block that imports MLX and mlx-lm, where the system lacks what these need."""
    try:
        yield
    except ValueError as error:
        if "raise maximum limit" not in str(error):
            raise
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        raise CompatibilityError(
            f"mlx-lm cannot be imported: it sets the hard limit of open files to 4096, and this process has {most} and "
            "may not raise it. Hint: LimitNOFILE=4096 of a systemd service, --ulimit nofile=4096 of a container, or "
            "a shell without `ulimit -Hn`."
        ) from error
    except ImportError as error:
        if "/mlx/core." not in (error.path or ""):
            raise
        hint = "on Linux MLX needs a back end: pip install 'mlx[cpu]', 'mlx[cuda12]' or 'mlx[cuda13]'."
        raise CompatibilityError(f"MLX cannot be loaded: {error}. Hint: {hint}") from error
