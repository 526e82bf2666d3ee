"""Prompt caches between two tokens: they say what mlx-lm's would say, although a pass is still to come.

When mlx-lm hands a token out, it has begun to compute the next one, so the caller's cache holds the token. Here a token
is computed when the next one is asked for, and guesses may be ahead. Until then each entry of the cache has a class
that tells mlx-lm's length, and takes an owed token back for nothing. What looks at the contents has them made right.

Each entry is marked as long as something is pending, whatever its class: where interrupts have cut a change of classes
in two, the next call of the model still finds the mark, and goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache as cached
from typing import Any, cast

from mlx_lm.models.cache import RotatingKVCache

from mlx_flash.compat.caches import entries_of
from mlx_flash.compat.callers import frames
from mlx_flash.engine.undo import is_broken
from mlx_flash.errors import CacheError
from mlx_flash.kv.base import PENDING, PooledCache
from mlx_flash.layout.reachable import Opaque

_OWN = "_own_kind"

_NUMBERS = {"__class__", "__dict__", "offset", "size", "trim", "is_trimmable", "nbytes", "empty"}
_NUMBERS |= {"rows", "pool", "num_forgotten", "is_on_disk"}
"""Attributes that do not depend on the contents."""


class Pending(Opaque):
    """The difference between the tokens that a prompt cache holds, and those that it says it holds.

    Args:
        cache: the prompt cache.
        difference: tokens that are owed to it; negative if it has guesses that nobody has asked for.
        settle: computes the owed tokens, or takes the guesses back. Returns the row of an owed token.
        token: the token that is owed, if a call of the model may take it over.

    Attributes:
        difference, token: as given; the difference is 0 once there is none.
        found: what ``settle`` returned.
    """

    def __init__(
        self, cache: Sequence[Any], difference: int, settle: Callable[[], Any], token: int | None = None
    ) -> None:
        self.token = token
        self.found: Any = None
        self.difference = difference
        self._entries = entries_of(cache)
        self._lengths = _lengths(self._entries)
        self._settle = settle
        self._is_trimmed = False

    def __deepcopy__(self, memo: object) -> Pending:
        """Return itself: it is about the entries that it was made for, not about their copies."""
        return self

    @property
    def is_owed(self) -> bool:
        """True if tokens are owed."""
        return self.difference > 0

    @property
    def is_settled(self) -> bool:
        """True if the cache holds what it says."""
        return self.difference == 0

    def check_is_of(self, entry: Any) -> None:
        """Refuse (CacheError) a copy of an entry that was made while interrupts had cut a change in two."""
        if not any(entry is each for each in self._entries):
            raise CacheError(
                "a prompt cache was copied after generate_step was interrupted, and its copy lacks a token. Hint: use "
                "the cache itself, or start again with a fresh one."
            )

    def mark(self) -> None:
        """Have the next call of the model settle this first, unless it was told of it."""
        for entry in self._entries:
            vars(entry)[PENDING] = self

    def put(self) -> None:
        """Make the entries say what mlx-lm's would. Harmless when repeated, and when nothing is owed any more."""
        if self.is_settled:
            for entry in self._entries:  # their mark may be that of guesses that were all asked for meanwhile
                entry.__class__ = getattr(type(entry), _OWN, type(entry))
                vars(entry).pop(PENDING, None)
        elif not self._is_trimmed:
            self.mark()
            for entry in self._entries:
                if not is_broken(entry) and not hasattr(type(entry), _OWN):
                    entry.__class__ = _pending(cast(Hashable, type(entry)))

    def lift(self) -> None:
        """Make the entries what they were, for whoever makes them right; until then they stay marked.

        Harmless when repeated.

        Raises:
            CacheError: the caller has trimmed some entries meanwhile.
        """
        if not self._is_trimmed:
            for entry in self._entries:
                self._lift(entry)
        if self._is_trimmed or (self.is_owed and self._is_shorter):
            raise CacheError(
                "a prompt cache was trimmed before generate_step ended, and is used by it again, or not all of its "
                "layers were trimmed. Hint: trim all layers, and begin a new generate_step."
            )

    @property
    def _is_shorter(self) -> bool:
        """True if an entry was trimmed while it was marked and had its own class, which trims no owed token."""
        return any(now < then for now, then in zip(_lengths(self._entries), self._lengths, strict=True))

    def _lift(self, entry: Any) -> None:
        if vars(entry).get(PENDING) is self:
            entry.__class__ = getattr(type(entry), _OWN, type(entry))
            if self.is_settled or self._is_trimmed:
                vars(entry).pop(PENDING)

    def settle(self) -> None:
        """Make the cache hold what it says. An interrupt or an error leaves it owed, or takes the guesses back.

        Does nothing where the model is called for this: a draft model computes what its cache lacks.
        """
        if self._is_under_way:
            return
        try:
            self._settle_all()
        except BaseException as error:
            if not self.difference < 0:
                self.put()
            elif isinstance(error, KeyboardInterrupt):
                self._settle_all()
            raise

    @property
    def _is_under_way(self) -> bool:
        """True if a caller settles it. An interrupt could leave a flag standing, but not a frame."""
        name = Pending._settle_all.__name__
        return any(frame.f_code.co_name == name and frame.f_locals.get("self") is self for frame in frames())

    def _settle_all(self) -> None:
        self.lift()
        if not self.is_settled:
            self.found = self._settle()
            self.difference = 0
            self.lift()

    @property
    def can_be_taken_over(self) -> bool:
        """True if a call of the model may begin with the owed token."""
        return self.is_owed and self.token is not None and not self._is_trimmed

    def trim(self, entry: Any, n: int) -> int:
        """Trim an entry. An owed token goes first, and need not be computed."""
        if n <= 0:
            return 0
        if self.difference != 1:
            self.settle()
            return int(entry.trim(n))
        self._is_trimmed = True
        self._lift(entry)
        return 1 + int(entry.trim(n - 1))


def _lengths(entries: Sequence[Any]) -> list[int]:
    """Return the lengths of entries; 0 for those that do not know theirs."""
    offsets = [getattr(entry, "offset", 0) for entry in entries]
    return [offset if isinstance(offset, int) else 0 for offset in offsets]


def pending_in(cache: Sequence[Any] | None) -> Pending | None:
    """Return what is pending for a prompt cache; None if nothing is."""
    for entry in entries_of(cache or ()):
        pending: Pending | None = getattr(entry, "__dict__", {}).get(PENDING)
        if pending is None:
            continue
        pending.check_is_of(entry)
        if not pending.is_settled:
            return pending
        pending.lift()  # an interrupt has kept it from doing so
    return None


def owed_token(cache: Sequence[Any]) -> Pending | None:
    """Return what is pending for a prompt cache if it is one token of the model; settle everything else."""
    pending = pending_in(cache)
    if pending is None or pending.can_be_taken_over:
        return pending
    pending.settle()
    return None


def settle(cache: Sequence[Any] | None) -> None:
    """Make a prompt cache hold the tokens that it says it holds.

    Raises:
        CacheError: that cannot be.
    """
    if (pending := pending_in(cache)) is not None:
        pending.settle()


@cached
def _pending(own: Any) -> Any:
    """Return a class like that of an entry whose objects say what they will hold."""

    def plain(entry: Any) -> Any:
        """Return an object with the entry's own class and attributes."""
        other = own.__new__(own)
        object.__setattr__(other, "__dict__", vars(entry))
        return other

    def offset(entry: Any) -> Any:
        return plain(entry).offset + vars(entry)[PENDING].difference

    def size(entry: Any) -> int:
        there = plain(entry)
        if isinstance(entry, RotatingKVCache):
            return min(int(entry.offset), int(entry.max_size))
        counts = isinstance(entry, PooledCache) or there.size() == getattr(there, "offset", None)
        return int(there.size()) + counts * int(vars(entry)[PENDING].difference)

    def get(entry: Any, name: str) -> Any:
        if name in _NUMBERS or isinstance(object.__getattribute__(entry, "__dict__").get(name), int):
            return object.__getattribute__(entry, name)
        vars(entry)[PENDING].settle()
        return getattr(entry, name)

    def set_(entry: Any, name: str, value: Any) -> None:
        if name != "__class__":
            vars(entry)[PENDING].settle()
        object.__setattr__(entry, name, value)

    def through(name: str) -> Callable[..., Any]:
        def call(entry: Any, *args: Any) -> Any:
            vars(entry)[PENDING].settle()
            return getattr(entry, name)(*args)

        return call

    body: dict[str, Any] = {name: through(name) for name in ("__getitem__", "__setitem__") if hasattr(own, name)}
    body |= {"__getattribute__": get, "__setattr__": set_, _OWN: own}
    body |= {"trim": lambda entry, n: vars(entry)[PENDING].trim(entry, n)} if hasattr(own, "trim") else {}
    body |= {"size": size} if hasattr(own, "size") else {}
    body |= {"nbytes": property(lambda entry: plain(entry).nbytes), "empty": lambda entry: plain(entry).empty()}
    return type(own.__name__, (own,), {**body, "offset": property(offset)})
