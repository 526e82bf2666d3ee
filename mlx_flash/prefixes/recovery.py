"""Opening the index of a store, whatever state its files are in.

The index is compared with the page files whenever a store is opened, so one that is lost, damaged or of another version
is made again from them. Where nothing may be written it is made in memory.
"""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from mlx_flash.errors import ReadError
from mlx_flash.prefixes.files import PARTIAL_SUFFIX, SUFFIX, PageFile, PageInfo, path_of
from mlx_flash.prefixes.index import SCHEMA, Index
from mlx_flash.prefixes.sessions import only_one

FORMAT = 2
"""Of the index; one of another number is set aside."""

INDEX_NAME = "index.sqlite"
ASIDE_NAME = "index.damaged"

BUSY_SECONDS = 10.0
"""Others hold the index for milliseconds. Who waits longer waits for a process that was stopped."""

_NOT_DAMAGED = ("locked", "readonly", "full", "unable to open")
"""In what SQLite says of an index that cannot be used and yet is as it should be."""

_log = logging.getLogger("mlx_flash")


def open_index(directory: Path, session: str) -> Index:
    """Opens the index of a store, or makes it; afterwards it says what the files are.

    Args:
        directory: of the store; it must be there, with its folders.
        session: who uses it.

    Raises:
        OSError: the directory cannot be read or written.
        sqlite3.DatabaseError: likewise; an index that is damaged is made again.
    """
    path = directory / INDEX_NAME
    with only_one(directory / "lock"):
        try:
            return _reconciled(Index(_connect(path), directory, session), directory)
        except sqlite3.DatabaseError as error:
            if any(word in str(error) for word in _NOT_DAMAGED):
                raise
            _set_aside(path, str(error))
            return _reconciled(Index(_connect(path), directory, session), directory)


def index_in_memory(directory: Path) -> Index:
    """An index made from the files of a store, of which nothing is written; empty when there are none."""
    index = Index(_connect_memory(), directory, "")
    try:
        return _reconciled(index, directory)
    except (FileNotFoundError, NotADirectoryError):
        pass  # nothing was stored yet
    except OSError as error:
        _log.warning("the pages in %s cannot be read: %s", directory, error.strerror or error)
    return Index(_connect_memory(), directory, "")


def index_as_it_is(directory: Path) -> Index:
    """An index to look at, made from the files when there is none that can be used."""
    connection = None
    try:
        path = f"{(directory / INDEX_NAME).absolute().as_uri()}?mode=ro"
        connection = sqlite3.connect(path, uri=True, timeout=BUSY_SECONDS, isolation_level=None)
        _check(connection)
        return Index(connection, directory, "")
    except sqlite3.DatabaseError:
        if connection is not None:
            connection.close()
        return index_in_memory(directory)


def _connect(path: Path) -> sqlite3.Connection:
    """A connection to a database that is whole and has our tables."""
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        path.chmod(0o600)
        connection.execute("PRAGMA journal_mode = WAL")
        # what is committed last may be lost with the power; the files are there, and the next who opens finds them
        connection.execute("PRAGMA synchronous = NORMAL")
        (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if not num_tables:
            connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT")
        _check(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _connect_memory() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    connection.executescript(SCHEMA)
    return connection


def _check(connection: sqlite3.Connection) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version != FORMAT:
        raise sqlite3.DatabaseError(f"it is of version {version}, not {FORMAT}")
    (answer,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if answer != "ok":
        raise sqlite3.DatabaseError(f"it is damaged: {answer}")


def _set_aside(path: Path, reason: str) -> None:
    aside = path.with_name(ASIDE_NAME)
    _log.warning("%s is not used: %s. It is kept as %s, and made again from the pages.", path, reason, aside.name)
    path.replace(aside)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _reconciled(index: Index, directory: Path) -> Index:
    """Makes an index say what the files are: adds whole ones, and removes whatever nobody could find.

    Raises:
        OSError: the folder cannot be read, or a file cannot be removed.
        sqlite3.DatabaseError: the index cannot be used.
    """
    folder = directory / "pages"
    try:
        with index.transaction():
            found = _page_files(folder, index.forget_the_dead(), index.is_stored)
            known = index.sizes()
            index.forget([page for page in known if found.get(page) != known[page]])
            infos = [info for page in found if found[page] != known.get(page) for info in _look_at(index, folder, page)]
            for info in infos:
                index.insert(info, path_of(folder, info.key.page).stat().st_mtime)
            while pages := index.unreachable():
                index.remove(pages)
    except BaseException:
        index.close()
        raise
    return index


def _page_files(folder: Path, alive: set[str], may_remove: bool) -> dict[str, int]:
    """Bytes of every page file, by name; removes unfinished files of sessions that have ended."""
    sizes = {}
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # it was finished or removed meanwhile
            if path.suffix == SUFFIX:
                sizes[path.stem] = path.stat().st_size
            elif may_remove and path.suffix == PARTIAL_SUFFIX and path.stem.partition(".")[2] not in alive:
                path.unlink()
    return sizes


def _look_at(index: Index, folder: Path, page: str) -> list[PageInfo]:
    """What a file says of itself; nothing when it is damaged, and then it is removed."""
    try:
        with closing(PageFile(folder, page)) as file:
            return [file.info]
    except FileNotFoundError:
        pass  # it was removed meanwhile
    except ReadError as error:
        _log.warning("%s. It is not used; what was in it is computed again when it is needed.", error)
        index.remove([page])
    except OSError as error:
        _log.warning("%s is not used: %s", path_of(folder, page), error.strerror or error)
    return []
