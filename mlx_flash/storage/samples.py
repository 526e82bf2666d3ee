"""Files that reading is tried with."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from mlx_flash.errors import WriteError
from mlx_flash.sessions import PrivateFolder


@contextmanager
def temporary_file(base: Path, purpose: str, pieces: Iterable[bytes | memoryview]) -> Iterator[Path]:
    """Yield a file with some bytes in a :class:`PrivateFolder`, which is removed after the block.

    Raises:
        WriteError: it cannot be written.
    """
    with closing(PrivateFolder(base, purpose)) as folder:
        path = folder.path / "file"
        try:
            with path.open("wb") as file:
                file.writelines(pieces)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise WriteError(
                f"cannot write the file for {purpose} in {base}: {error.strerror}. Hint: free some space."
            ) from error
        yield path
