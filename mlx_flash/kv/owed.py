"""Prompt caches between two tokens: they say what mlx-lm's would say, although a pass is still to come.

When mlx-lm hands a token out, it has begun to compute the next one, so the caller's cache holds the token. Here a token
is computed when the next one is asked for, and guesses may be ahead. Until then each entry of the cache has a class
that tells mlx-lm's length. What looks at the contents has them made right. An owed token that is trimmed away costs
nothing.

Entries get that class while nothing is owed, when it changes nothing; then one assignment owes. Passes give them their
own classes back, in the engine thread. So an interrupt finds a cache that is right, or one that says what it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache as cached
from typing import Any, NamedTuple, cast

from mlx_flash.compat.caches import entries_of
from mlx_flash.errors import CacheError
from mlx_flash.layout.reachable import Opaque

OWED = "owed"
"""Attribute of an entry with the :class:`Owed` that it belongs to."""

_OWN = "_own_kind"

_NUMBERS = {"__class__", "__dict__", "offset", "size", "trim", "is_trimmable", "nbytes", "empty"}
_NUMBERS |= {"pool", "group", "is_on_disk", "offload", "copy_to"}
"""Attributes that do not depend on the contents, or take them as they are."""


class Debt(NamedTuple):
    """The difference between the tokens that a prompt cache says it holds, and those that it holds.

    Attributes:
        difference: tokens that it lacks; negative if it has guesses that nobody has asked for.
        settle: has a pass compute them, takes the guesses back, or raises why that cannot be.
        token: the token that it lacks, if a call of the model may begin with it.
    """

    difference: int
    settle: Callable[[], Any]
    token: int | None = None


class Owed(Opaque):
    """The difference between a prompt cache as its caller sees it, and its contents.

    Args:
        cache: the prompt cache.

    Attributes:
        debt: None while it holds what it says.
        found: the row that has computed the token that was owed last.
    """

    def __init__(self, cache: Sequence[Any]) -> None:
        self.debt: Debt | None = None
        self.found: Any = None
        self._entries = entries_of(cache)

    def owe(self, debt: Debt | None) -> None:
        """Have the cache say something else from now on."""
        self.found = None
        if debt is None:
            self.debt = None
            self.lift()
        else:
            self.put()
            self.debt = debt

    def put(self) -> None:
        """Have the entries say what is owed."""
        for entry in self._entries:
            other = _owed_of(entry)
            if other is None or other.debt is None:  # else it refuses every use
                vars(entry)[OWED] = self
                entry.__class__ = owing(own_kind(type(entry)))

    def lift(self) -> None:
        """Give the entries their own classes, for the pass that makes them right.

        Raises:
            CacheError: the caller has trimmed some of them meanwhile.
        """
        if self.debt is not None and not all(_owed_of(entry) is self for entry in self._entries):
            raise CacheError(
                "a prompt cache was trimmed before generate_step ended, and is used by it again, or not all of its "
                "layers were trimmed. Hint: trim all layers, and begin a new generate_step."
            )
        for entry in self._entries:
            if _owed_of(entry) is self:
                _restore(entry)

    def settle(self) -> None:
        """Make the cache hold what it says. An error leaves it owed."""
        if (debt := self.debt) is not None:
            debt.settle()
            self.debt = None

    def trim(self, entry: Any, n: int) -> int:
        """Trim an entry. Owed tokens go first, and need not be computed."""
        if n <= 0:
            return 0
        difference = 0 if self.debt is None else self.debt.difference
        if not 0 < difference <= n:
            self.settle()
            difference = 0
        _restore(entry)
        return difference + int(entry.trim(n - difference))


def own_kind(kind: type) -> Any:
    """Return the class that an entry of some class has while nothing is owed."""
    return getattr(kind, _OWN, kind)


def _owed_of(entry: Any) -> Owed | None:
    owed: Owed | None = vars(entry).get(OWED) if hasattr(type(entry), _OWN) else None
    return owed


def owing(kind: type) -> Any:
    """Return the class that an entry of some class has while something is owed."""
    return _saying(cast(Hashable, kind))


def _restore(entry: Any) -> None:
    entry.__class__ = own_kind(type(entry))
    vars(entry).pop(OWED, None)


def owed_to(cache: Sequence[Any] | None) -> list[Owed]:
    """Return all that is owed to entries of a prompt cache."""
    found: dict[Owed, None] = {}
    for entry in entries_of(cache or ()):  # of each layer for each token: no call for it
        if hasattr(type(entry), _OWN) and (owed := _owed_of(entry)) is not None and owed.debt is not None:
            found[owed] = None
    return [*found]


def owed_token(cache: Sequence[Any]) -> Owed | None:
    """Return what is owed to a prompt cache if that is a token which a call of the model may begin with."""
    found = owed_to(cache)
    return found[0] if len(found) == 1 and found[0].debt is not None and found[0].debt.token is not None else None


@cached
def _saying(own: Any) -> Any:
    """Return a class like that of an entry whose objects say what they will hold."""

    def difference(entry: Any) -> int:
        debt = vars(entry)[OWED].debt
        return 0 if debt is None else int(debt.difference)

    def plain(entry: Any) -> Any:
        """Return an object with the entry's own class and attributes."""
        other = own.__new__(own)
        object.__setattr__(other, "__dict__", vars(entry))
        return other

    def settled(entry: Any) -> Any:
        """Return the entry as it is once it holds what it says."""
        vars(entry)[OWED].settle()
        _restore(entry)
        return entry

    def get(entry: Any, name: str) -> Any:
        if name in _NUMBERS or isinstance(object.__getattribute__(entry, "__dict__").get(name), int):
            return object.__getattribute__(entry, name)
        return getattr(settled(entry), name)

    def set_(entry: Any, name: str, value: Any) -> None:
        object.__setattr__(entry if name == "__class__" else settled(entry), name, value)

    def through(name: str) -> Callable[..., Any]:
        return lambda entry, *args: getattr(settled(entry), name)(*args)

    body: dict[str, Any] = {name: through(name) for name in ("__getitem__", "__setitem__") if hasattr(own, name)}
    body |= {"__getattribute__": get, "__setattr__": set_, _OWN: own}
    body |= {"trim": lambda entry, n: vars(entry)[OWED].trim(entry, n)} if hasattr(own, "trim") else {}
    body |= {"nbytes": property(lambda entry: plain(entry).nbytes), "empty": lambda entry: plain(entry).empty()}
    return type(own.__name__, (own,), body | {"offset": property(lambda e: plain(e).offset + difference(e))})
