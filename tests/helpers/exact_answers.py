from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from conversations import LONG, turn
from served import Answer, Served, StockServed

NUM_TOKENS = 12


TEXTS = ["Hi", LONG, "Tell me of the sea, and of the sky above it", "Who are you? " * 9]


def ask(served: Served | StockServed, text: str) -> Answer:
    """Ask a question with a system prompt of its own."""
    return served.ask(*turn(text, system=text + "!"), max_tokens=NUM_TOKENS)


def each_alone(served: Served | StockServed, texts: list[str]) -> list[Answer]:
    """Ask one after another, as if each were the first: where texts begin alike, a kept cache would be gone on with.

    On a GPU, last bits depend on the number of tokens in a call.
    """
    answers = []
    for text in texts:
        served.prompt_cache.trim_to(n_sequences=0)
        answers.append(ask(served, text))
    return answers


def together(served: Served, texts: list[str]) -> list[Answer]:
    with ThreadPoolExecutor(len(texts)) as pool:
        return list(pool.map(lambda text: ask(served, text), texts))
