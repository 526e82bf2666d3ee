"""A store's index as long as it can be used, and one in memory from then on."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar

from mlx_flash.errors import ClosedError, WriteError
from mlx_flash.prefixes.index import Index, StoredModel
from mlx_flash.prefixes.recovery import ASIDE_NAME, index_as_it_is, index_in_memory, open_index
from mlx_flash.prefixes.sessions import Session

_log = logging.getLogger("mlx_flash")

T = TypeVar("T")


class StoreAccess:
    """The use of a store's directory by this process. Threads may share it.

    When the directory cannot be written, or stops being writable, a warning says so, and what is there is still read.

    Args:
        directory: of the store; made when it is not there.
        zero_write: whether nothing may be written, from the beginning on.

    Attributes:
        directory: of the store.
        folder: of the pages.
        is_closed: whether the use has ended.
    """

    def __init__(self, directory: Path, *, zero_write: bool) -> None:
        self.directory = directory
        self.folder = directory / "pages"
        self._lock = threading.RLock()
        self._session: Session | None = None
        self.is_closed = False
        self._index = index_in_memory(directory) if zero_write else self._open()

    @property
    def is_writable(self) -> bool:
        """Whether pages can be stored."""
        return self._index.is_stored

    @property
    def index(self) -> Index:
        """The index; what it raises is for :meth:`stop_storing`."""
        return self._index

    @property
    def session(self) -> str:
        """Name of this use, while pages can be stored."""
        return self._session.name if self._session is not None else ""

    def ask(self, question: Callable[[Index], T]) -> T:
        """An answer of the index.

        Raises:
            ClosedError: the store was closed.
        """
        with self._lock:
            if self.is_closed:
                raise ClosedError(f"the prefix store in {self.directory} was closed")
            try:
                return question(self._index)
            except sqlite3.DatabaseError as error:
                if not self._index.is_stored:
                    raise
                self.stop_storing(error)
                return question(self._index)

    def stop_storing(self, error: Exception) -> None:
        """Goes on with an index in memory, made from the files."""
        with self._lock:
            if self._index.is_stored:
                self._tell(error)
                with suppress(sqlite3.DatabaseError):
                    self._index.close()
                self._index = index_in_memory(self.directory)

    def close(self) -> None:
        """Ends the use; what it pinned is let go of. Again does nothing."""
        with self._lock:
            if not self.is_closed:
                self.is_closed = True
                self._index.close()
                if self._session is not None:
                    self._session.close()

    def _open(self) -> Index:
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            self._session = Session(self.directory / "sessions")
            return open_index(self.directory, self._session.name)
        except (OSError, sqlite3.DatabaseError) as error:
            self._tell(error)
            return index_in_memory(self.directory)

    def _tell(self, error: Exception) -> None:
        _log.warning(
            "nothing more is stored in %s: %s. What is there is still read. Hint: make room, or check who may write.",
            self.directory,
            error,
        )


def list_prefixes(directory: Path) -> list[StoredModel]:
    """What a store holds of each model, the one used last first; nothing is changed.

    Args:
        directory: of the store; it need not exist.
    """
    with closing(index_as_it_is(directory)) as index:
        return index.models()


def clear_prefixes(directory: Path, model: str | None = None) -> list[StoredModel]:
    """Removes the pages that nobody has pinned. Returns what is left.

    Args:
        directory: of the store; it need not exist.
        model: fingerprint of the only model to remove; None for all.

    Raises:
        WriteError: they cannot be removed.
    """
    if not (directory / "pages").is_dir():
        return []
    try:
        with closing(Session(directory / "sessions")) as session, closing(open_index(directory, session.name)) as index:
            index.clear(model)
            (directory / ASIDE_NAME).unlink(missing_ok=True)
            return index.models()
    except (OSError, sqlite3.DatabaseError) as error:
        raise WriteError(f"cannot clear {directory}: {error}. Hint: check who may write there.") from error
