"""Whether a call's result is looked at."""

from __future__ import annotations

import sys
from typing import Any

from mlx_flash.engine.dropped import result_is_dropped

answers: list[bool] = []


class Probe:
    """Called as a model is."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[int]:
        answers.append(result_is_dropped(sys._getframe(1)))
        return [1]


probe = Probe()


def test_a_statement_drops_it() -> None:
    probe(1)
    probe(1, cache=2)
    probe(*[1], cache=2)
    for _ in range(2):
        probe()
    assert answers == [True] * 5
    answers.clear()


def test_everything_else_does_not() -> None:
    x = probe(1)
    y = probe(1, cache=x)[0]
    assert probe(y)
    [probe()]
    print(probe())
    z: Any = [probe(), y]
    z.append(probe())
    z = list(map(probe, [1, 2]))
    assert not any(answers)
    answers.clear()


def test_a_function_that_hands_it_on_is_asked_for_its_own_caller() -> None:
    def call(tokens: int) -> list[int]:
        return probe(tokens, cache=None)

    def call_again(tokens: int) -> list[int]:
        return call(tokens)

    call(1)
    call_again(1)
    x = call_again(1)
    assert answers == [True, True, False] and x
    answers.clear()
