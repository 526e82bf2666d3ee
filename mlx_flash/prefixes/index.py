"""Which pages of a store there are, in SQLite: how they follow one another, when they were used last, and by whom now.

The page files are the truth, the index is what makes looking fast. Of two pages that follow one another the second is
evicted first, so what is found from the beginning on has no holes.
"""

from __future__ import annotations

import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path

from mlx_flash.prefixes.files import PageInfo, path_of
from mlx_flash.prefixes.sessions import living

SCHEMA = """
CREATE TABLE pages (
    page TEXT PRIMARY KEY, parent TEXT NOT NULL, kind TEXT NOT NULL, number INTEGER NOT NULL,
    tokens INTEGER NOT NULL, model TEXT NOT NULL, title TEXT NOT NULL, nbytes INTEGER NOT NULL, last_used REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX children ON pages (parent);
CREATE INDEX ages ON pages (last_used, number DESC);
CREATE TABLE pins (session TEXT NOT NULL, page TEXT NOT NULL, PRIMARY KEY (session, page)) WITHOUT ROWID;
CREATE INDEX pinned ON pins (page);
CREATE TABLE writers (session TEXT PRIMARY KEY, nbytes INTEGER NOT NULL) WITHOUT ROWID;
"""

_LEAF = """
SELECT page, parent, nbytes, last_used FROM pages AS p
WHERE page != ? AND NOT EXISTS (SELECT 1 FROM pages AS c WHERE c.parent = p.page)
    AND NOT EXISTS (SELECT 1 FROM pins WHERE pins.page = p.page)
ORDER BY last_used, number DESC LIMIT 1
"""

_FOLLOWING = """
WITH RECURSIVE following (page) AS (
    SELECT page FROM pages WHERE page = ?
    UNION SELECT p.page FROM pages AS p JOIN following AS f ON p.parent = f.page
) SELECT page FROM following
"""

_UNUSED = "SELECT page FROM pages WHERE page NOT IN (SELECT page FROM pins) AND (model = ? OR ? IS NULL)"

_UNREACHABLE = """
SELECT page FROM pages AS p WHERE parent != '' AND NOT EXISTS (SELECT 1 FROM pages AS q WHERE q.page = p.parent)
"""

_FEW = 500
"""Parameters of one statement; older versions of SQLite take 999."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """What a store holds of one model.

    Attributes:
        model: its fingerprint.
        title: its name, for people.
        pages: how many, snapshots included.
        tokens: that they hold, those of beginnings that prompts have in common counted once.
        nbytes: what their files take, in bytes.
        last_used: when one of them was last used, in seconds since 1970.
    """

    model: str
    title: str
    pages: int
    tokens: int
    nbytes: int
    last_used: float


class Index:
    """The index of a store. Threads may use it at the same time.

    Every method raises ``sqlite3.DatabaseError`` when the index is damaged, cannot be written, or stays locked.

    Args:
        connection: to a database with our tables.
        directory: of the store.
        session: who uses it; empty for an index in memory, which leaves the files alone.
    """

    def __init__(self, connection: sqlite3.Connection, directory: Path, session: str) -> None:
        self._connection = connection
        self._folder = directory / "pages"
        self._sessions = directory / "sessions"
        self._session = session
        self._lock = threading.RLock()

    @property
    def is_stored(self) -> bool:
        """Whether it is on disk; what one in memory says goes for this process only."""
        return bool(self._session)

    def close(self) -> None:
        """Closes the database. Again does nothing."""
        with self._lock:
            self._connection.close()

    def existing(self, pages: Sequence[str]) -> set[str]:
        """Those of the pages that are there."""
        found: set[str] = set()
        with self._lock:
            for start in range(0, len(pages), _FEW):
                some = pages[start : start + _FEW]
                marks = ",".join("?" * len(some))
                rows = self._connection.execute(f"SELECT page FROM pages WHERE page IN ({marks})", some)
                found.update(page for (page,) in rows)
        return found

    def leading(self, pages: Sequence[str]) -> int:
        """How many of the pages are there, up to the first that is not."""
        found = self.existing(pages)
        return next((i for i, page in enumerate(pages) if page not in found), len(pages))

    def has(self, page: str) -> bool:
        """Whether a page is there."""
        return bool(self.existing([page]))

    def pin(self, pages: Sequence[str]) -> int:
        """Keeps pages from being evicted until they are released or this session ends, however; they are used now.

        Args:
            pages: that follow one another.

        Returns:
            How many of them are there, up to the first that is not; these are pinned.
        """
        with self.transaction():
            count = self.leading(pages)
            rows = [(self._session, page) for page in pages[:count]]
            self._connection.executemany("INSERT OR IGNORE INTO pins VALUES (?, ?)", rows)
            # for those before it the time of their last one counts, see _evict
            last = (time.time(), pages[count - 1] if count else "")
            self._connection.execute("UPDATE pages SET last_used = ? WHERE page = ?", last)
            return count

    def release(self, pages: Sequence[str]) -> None:
        """Lets go of pages that this session pinned."""
        with self.transaction():
            rows = [(self._session, page) for page in pages]
            self._connection.executemany("DELETE FROM pins WHERE session = ? AND page = ?", rows)

    def make_room(self, nbytes: int, parent: str, limit: int | None, floor: int) -> bool:
        """Sets room aside for a page, until it is added or given up; evicts the pages used longest ago for it.

        Args:
            nbytes: of the page.
            parent: is not evicted.
            limit: the most that all pages may take; None for no limit.
            floor: so many bytes of the disk are left free.

        Returns:
            Whether there is room.
        """
        with self.transaction():
            self.forget_the_dead()
            if limit is not None:
                self._evict(self._taken() + nbytes - limit, parent)
            self._evict(floor + nbytes - self._free(), parent)
            is_enough = limit is None or self._taken() + nbytes <= limit
            is_enough = is_enough and self._free() - nbytes >= floor
            if is_enough:
                self._connection.execute("INSERT OR REPLACE INTO writers VALUES (?, ?)", (self._session, nbytes))
            return is_enough

    def give_up(self) -> None:
        """Gives back the room that was set aside."""
        with self.transaction():
            self._connection.execute("DELETE FROM writers WHERE session = ?", (self._session,))

    def add(self, info: PageInfo) -> bool:
        """Adds a page whose file is written and flushed.

        Returns:
            Whether it is there now; not when the page before it, or its file, was removed meanwhile.
        """
        with self.transaction():
            self._connection.execute("DELETE FROM writers WHERE session = ?", (self._session,))
            path = path_of(self._folder, info.key.page)
            is_reachable = not info.key.parent or self.has(info.key.parent)
            if not is_reachable or not path.exists():
                self.remove([info.key.page])
                return False
            self.insert(info, time.time())
            return True

    def drop(self, page: str) -> int:
        """Removes a page, and all that follow it, whoever uses them. Returns how many these were."""
        with self.transaction():
            return self.remove([row[0] for row in self._connection.execute(_FOLLOWING, (page,))])

    def clear(self, model: str | None) -> None:
        """Removes all pages, or those of one model, that nobody uses."""
        with self.transaction():
            self.forget_the_dead()
            self.remove([row[0] for row in self._connection.execute(_UNUSED, (model, model))])

    def models(self) -> list[StoredModel]:
        """What there is, the model used last first."""
        columns = "model, max(title), count(*), sum(tokens), sum(nbytes), max(last_used)"
        query = f"SELECT {columns} FROM pages GROUP BY 1 ORDER BY 6 DESC"
        with self._lock:
            return [StoredModel(*row) for row in self._connection.execute(query)]

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.DatabaseError):  # what failed says more
                    self._connection.execute("ROLLBACK")
                raise

    def insert(self, info: PageInfo, last_used: float) -> None:
        key = info.key
        row = (*astuple(key), info.nbytes, last_used)
        self._connection.execute("INSERT OR IGNORE INTO pages VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)

    def _taken(self) -> int:
        query = "SELECT (SELECT total(nbytes) FROM pages) + (SELECT total(nbytes) FROM writers WHERE session != ?)"
        return int(self._connection.execute(query, (self._session,)).fetchone()[0])

    def _free(self) -> int:
        return shutil.disk_usage(self._folder).free

    def _evict(self, excess: int, keep: str) -> None:
        """Removes so many bytes, if there are so many that may go. A page's last use is also that of the one before."""
        if excess > self._taken():
            return  # all of them would not be enough
        while excess > 0:
            row = self._connection.execute(_LEAF, (keep,)).fetchone()
            if row is None:
                return
            page, parent, nbytes, last_used = row
            self.remove([page])
            later = (last_used, parent)
            self._connection.execute("UPDATE pages SET last_used = max(last_used, ?) WHERE page = ?", later)
            excess -= nbytes

    def sizes(self) -> dict[str, int]:
        """Bytes of all pages, by name."""
        with self._lock:
            return dict(self._connection.execute("SELECT page, nbytes FROM pages"))

    def unreachable(self) -> list[str]:
        """Pages whose one before is not there."""
        with self._lock:
            return [row[0] for row in self._connection.execute(_UNREACHABLE)]

    def remove(self, pages: Sequence[str]) -> int:
        """Removes pages, their files first: a page without a file is noticed when it is read."""
        for page in pages:
            if self.is_stored:
                path_of(self._folder, page).unlink(missing_ok=True)
        return self.forget(pages)

    def forget(self, pages: Sequence[str]) -> int:
        """Removes pages, and leaves their files alone."""
        rows = [(page,) for page in pages]
        self._connection.executemany("DELETE FROM pages WHERE page = ?", rows)
        self._connection.executemany("DELETE FROM pins WHERE page = ?", rows)
        return len(rows)

    def forget_the_dead(self) -> set[str]:
        """Lets go of what sessions kept that have ended. Returns those that have not."""
        if not self.is_stored:
            return set()
        sessions = self._connection.execute("SELECT session FROM pins UNION SELECT session FROM writers").fetchall()
        alive = living(self._sessions, self._session)
        dead = [row for row in sessions if row[0] not in alive]
        self._connection.executemany("DELETE FROM pins WHERE session = ?", dead)
        self._connection.executemany("DELETE FROM writers WHERE session = ?", dead)
        return alive
