"""Whether a call's result is looked at."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import textwrap
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import mlx.nn as nn

from mlx_flash.engine.call import result_is_dropped

answers: list[bool] = []


class Probe:
    """Called as a model is."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[int]:
        answers.append(result_is_dropped(sys._getframe()))
        return [1]


class Holder:
    """A class that calls a model which it has as an attribute, as mlx-lm's batches do."""

    def __init__(self) -> None:
        self.model = model

    def prefill(self) -> None:
        self.model(1, cache=[])

    def step(self, tokens: int) -> list[int]:
        return self.model(tokens)

    @staticmethod
    def static(tokens: int) -> list[int]:
        return model(tokens)


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


class Lazy:
    """An object that calls the model where no call is to be seen."""

    @property
    def logits(self) -> Any:
        return model(1)

    def __getitem__(self, key: int) -> Any:
        return model(key)

    def __enter__(self) -> Any:
        return model(2)

    def __exit__(self, *error: object) -> None:
        pass

    def __lt__(self, other: object) -> Any:
        return model(3)


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def kept(*values: Any) -> list[Any]:
    return list(values)


model = Probe()
holder, wrapper = Holder(), Wrapper(ProbeModule())
call = decorated(decorated(model))

DROPPED = r"""
model(1, cache=2)
model(*[1], cache=2)
for _ in range(2): model()
with contextlib.nullcontext() as x: model(x)
try: model(1)\nfinally: model(2)
model(tokens=1, embeddings=(answers[0] if answers else None))
holder.prefill()
holder.step(1)
Holder.static(1)
wrapper(1)
call(1)
function = lambda: model(1)\nfunction()
def f(n):\n    if n > 1: return model(n, cache=None)\n    return model(n)\nf(2)\nf(1)
def generator():\n    model(1)\n    yield 1\nlist(generator())
thread = threading.Thread(target=model, args=(1,))\nthread.start()\nthread.join()
sys.settrace(lambda *_: None)\nmodel(1)\nsys.settrace(None)
exec("model(1)", {"model": model})
exec("for i in [1]: model(i)", {"model": model})
space = {"model": model}\nexec("def f(): model(1)", space)\nspace["f"]()
"""

USED = r"""
x = model(1)
y = model(1, cache=2)[0]
assert model(1)
[model()]
print(model(), end="")
z = [model(), 2]\nz.append(model())
def function(tokens):\n    return model(tokens)\nx = function(1)
def function(x):\n    return model(x), x\nfunction(1)
def function(x):\n    return [model(x)]\nfunction(1)
def function(x):\n    with contextlib.nullcontext():\n        return model(x)\nx = function(1)
x = [model(i) for i in range(2)], {i: model(i) for i in range(2)}, *(model(i) for i in range(2))
x = model(1) if model else None
kept(model(1), *[model(2)])
assert model(1)[0] and model(1) is not None
print(f"{model(1)}", end="")
def generator(): yield model(1)\nlist(generator())
def generator(): yield kept(model(2))\nlist(generator())
def generator(): yield from model(3)\nlist(generator())
exec("x = model(1)", {"model": model})
eval("kept(model(1))", {"kept": kept, "model": model})
outputs = []\noutputs.append(eval("model(1)", {"model": model}))
outputs = []\noutputs.extend(map(eval, ["model(1)"], [{"model": model}]))
outputs = []\noutputs.extend(map(model, [1, 2]))
outputs = []\noutputs.extend(itertools.starmap(model, [(1,)]))
deque(map(model, [1]), maxlen=0)  # which does drop it: nothing but time is lost
outputs = [1, 2]\noutputs.sort(key=model)
outputs = []\noutputs.extend(map(functools.partial(model, 1), [2]))
outputs = []\nfunctools.reduce(lambda _, x: outputs.append(model(x)), [1, 2])
outputs = []\noutputs.extend(map(model, [1] if outputs else [2]))
outputs = [Lazy().logits, Lazy()[1]]
outputs = []\nwith Lazy() as entered: outputs.append(entered)
outputs = []\noutputs.extend(sorted([Lazy(), Lazy()]))
"""


def ways(programs: str) -> list[str]:
    """Return programs, one a line, as they are and as functions, with the model in a global, a local and a closure."""
    found = [line.replace("\\n", "\n") for line in programs.strip().splitlines()]
    functions = ["def run():\n" + textwrap.indent(program, "    ") for program in found]
    closures = ["def outer(model):\n" + textwrap.indent(function, "    ") + "\n    run()" for function in functions]
    local = [function.replace("run()", "run(model)", 1) + "\nrun(model)" for function in functions]
    return [*found, *[f"{each}\nrun()" for each in functions], *local, *[f"{each}\nouter(model)" for each in closures]]


def test_dropped_results_are_seen() -> None:
    for program in ways(DROPPED):
        exec(program, {**globals()})
        assert answers and all(answers), program
        answers.clear()


def test_callers_get_their_results() -> None:
    for program in ways(USED):
        exec(program, {**globals()})
        assert answers and not any(answers), program
        answers.clear()


__all__ = ["contextlib", "deque", "itertools", "threading"]
