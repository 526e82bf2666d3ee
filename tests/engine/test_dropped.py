"""Whether a call's result is looked at."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import mlx.nn as nn

from mlx_flash.engine.call import result_is_dropped

answers: list[bool] = []


class Probe:
    """Called as a model is."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[int]:
        answers.append(result_is_dropped(sys._getframe()))
        return [1]


probe = Probe()


class Holder:
    """A class that calls a model which it has as an attribute, as mlx-lm's batches do."""

    def __init__(self) -> None:
        self.model = probe

    def prefill(self) -> None:
        self.model(1, cache=[])

    def step(self, tokens: int) -> list[int]:
        return self.model(tokens)

    @staticmethod
    def static(tokens: int) -> list[int]:
        return probe(tokens)


class Wrapper(nn.Module):
    """A module that holds a model, and calls it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def __call__(self, tokens: int) -> Any:
        return self.model(tokens)


class ProbeModule(nn.Module):
    """A probe that modules keep as their own, not in ``__dict__``."""

    def __call__(self, tokens: int) -> list[int]:
        answers.append(result_is_dropped(sys._getframe()))
        return [tokens]


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def in_a_generator(embeddings: Any) -> Iterator[int]:
    model = probe
    while not answers:
        model(tokens=1, embeddings=(embeddings[0] if embeddings is not None else None))
        yield 1


def in_a_closure() -> None:
    model = probe

    def call(tokens: int) -> list[int]:
        if tokens > 1:
            return model(tokens, cache=None)
        else:  # noqa: RET505
            return model(tokens)

    call(1 if answers else 2)
    call(tokens=1)


def in_statements() -> None:
    probe(1, cache=2)
    probe(*[1], cache=2)
    for _ in range(2):
        probe()


def with_a_context() -> None:
    with contextlib.nullcontext() as x:
        probe(x)
    try:
        probe(1)
    finally:
        probe(2)


def in_a_thread() -> None:
    thread = threading.Thread(target=probe, args=(1,))
    thread.start()
    thread.join()


def while_traced() -> None:
    sys.settrace(lambda *_: None)
    try:
        probe(1)
    finally:
        sys.settrace(None)


def returned_by_others() -> None:
    holder, wrapper, call = Holder(), Wrapper(ProbeModule()), decorated(decorated(probe))
    holder.step(1)
    Holder.static(1)
    wrapper(1)
    call(1)
    (lambda: probe(1))
    function = lambda: probe(1)  # noqa: E731
    function()


CERTAIN: dict[str, Callable[[], object]] = {
    "statements": in_statements,
    "functions that return it": returned_by_others,
    "attribute": lambda: Holder().prefill(),
    "generator": lambda: list(in_a_generator(None)),
    "closure, conditional argument": in_a_closure,
    "with, try": with_a_context,
    "thread": in_a_thread,
    "trace": while_traced,
    "module code": lambda: exec("probe(1)\nfor i in [1]: probe(i)", {"probe": probe}),
    "function made by exec": lambda: exec("def f():\n    model(1)\nf()", {"model": probe}),
}


def test_dropped_results_are_seen() -> None:
    for name, caller in CERTAIN.items():
        caller()
        assert answers and all(answers), name
        answers.clear()


def kept(*values: Any) -> list[Any]:
    return list(values)


def exec_and_keep() -> None:
    space: dict[str, Any] = {"model": probe}
    exec("x = model(1)", space)
    eval("kept(model(1))", {"kept": kept, "model": probe})
    outputs: list[Any] = []
    outputs.append(eval("model(1)", space))
    outputs.extend(map(eval, ["probe(1)"], [{"probe": probe}]))


def c_callers() -> None:
    outputs: list[Any] = []
    outputs.extend(map(probe, [1, 2]))
    outputs.extend(itertools.starmap(probe, [(1,)]))
    deque(map(probe, [1]), maxlen=0)  # which does drop it: nothing but time is lost
    outputs.sort(key=probe)
    outputs.extend(map(functools.partial(probe, 1), [2]))
    functools.reduce(lambda _, x: outputs.append(probe(x)), [1, 2])
    model = probe
    outputs.extend(map(model, [1] if outputs else [2]))


def in_expressions() -> None:
    x = probe(1)
    y = probe(1, cache=x)[0]
    assert probe(y)
    [probe()]
    print(probe())
    z: Any = [probe(), y]
    z.append(probe())

    def call(tokens: int) -> list[int]:
        return probe(tokens)

    x = call(1)


def in_collections() -> None:
    def pair(x: int) -> Any:
        return probe(x), x

    def in_a_list(x: int) -> Any:
        return [probe(x)]

    def with_a_context_around(x: int) -> Any:
        with contextlib.nullcontext():
            return probe(x)

    pair(1)
    in_a_list(1)
    x = with_a_context_around(1)
    x = [probe(i) for i in range(2)], {i: probe(i) for i in range(2)}, *(probe(i) for i in range(2))
    x = probe(1) if x else None
    kept(probe(1), *[probe(2)])
    assert probe(1)[0] and probe(1) is not None
    print(f"{probe(1)}", end="")


def yielded() -> None:
    def generator() -> Iterator[Any]:
        received = yield probe(1)
        yield kept(received, probe(2))
        yield from probe(3)

    list(generator())


def called_by_a_property() -> None:
    class Lazy:
        @property
        def logits(self) -> Any:
            return probe(1)

        def __getitem__(self, key: int) -> Any:
            return probe(key)

        def __enter__(self) -> Any:
            return probe(2)

        def __exit__(self, *error: object) -> None:
            pass

        def __lt__(self, other: object) -> Any:
            return probe(3)

    outputs = [Lazy().logits, Lazy()[1]]
    with Lazy() as entered:
        outputs.append(entered)
    outputs.extend(sorted([Lazy(), Lazy()]))


UNCERTAIN = [in_expressions, exec_and_keep, c_callers, in_collections, yielded, called_by_a_property]


def test_callers_get_their_results() -> None:
    for caller in UNCERTAIN:
        caller()
        assert answers and not any(answers), caller
        answers.clear()
