"""The server without its sockets, and the answers of mlx-lm alone."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import mlx_lm
import pytest

from mlx_flash import FlashConfig
from mlx_flash.model import FlashLLM
from mlx_flash.server.batch import BatchOptions
from mlx_flash.server.catalog import Catalog, Source
from mlx_flash.server.events import Answers, End, Event, Failed, Piece
from mlx_flash.server.loaded import PromptCaches
from mlx_flash.server.request import GenerationRequest, Sampling
from mlx_flash.server.room import EngineRoom
from models import make_random_model

Answer = list[tuple[str, float]]
"""Text and log-probability of every token."""

Computed = TypeVar("Computed")


class Served:
    """Our generation thread, and an event loop for its clients."""

    def __init__(self, room: EngineRoom) -> None:
        self.room = room
        room._lock = threading.RLock()  # for `submit`
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="clients")
        self._thread.start()

    def close(self) -> None:
        self.room.stop()
        self.room.join()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def model(self) -> FlashLLM:
        return next(iter(self.room.models)).model

    @property
    def prompt_cache(self) -> PromptCaches:
        return next(iter(self.room.models)).kept

    @property
    def pool(self) -> Any:
        return self.model.kv

    @property
    def kept(self) -> list[list[Any]]:
        """The prompt caches that are kept, from mlx-lm's class."""
        lists, found = [self.prompt_cache._trie._trie], []
        while lists:
            for key, value in lists.pop().items():
                if key == "__value__":
                    found.append(value.prompt_cache)
                else:
                    lists.append(value)
        return found

    def submit(self, *requests: GenerationRequest) -> list[Answers]:
        """Send requests to the thread together, each with a client of its own."""
        with self.room._lock:
            return [self.room.submit(request) for request in requests]

    def events(self, request: GenerationRequest) -> list[Event]:
        """Return all events of an answer."""
        return [event for event, _ in self.timed_events(request)]

    def timed_events(self, request: GenerationRequest) -> list[tuple[Event, float]]:
        """Return all events of an answer, and when each came."""

        async def collect() -> list[tuple[Event, float]]:
            return [(event, time.monotonic()) async for event in events_of(self.room.submit(request))]

        return self.run(collect())

    def events_together(self, *requests: GenerationRequest) -> list[list[Event]]:
        """Return all events of some answers that are asked for at once."""

        async def collect() -> list[list[Event]]:
            return await asyncio.gather(*map(every, self.submit(*requests)))

        return self.run(collect())

    def run(self, work: Coroutine[Any, Any, Computed]) -> Computed:
        """Return the result of some work of clients, which runs in their event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    def ask(self, *messages: dict[str, str], seed: int | None = None, max_tokens: int = 5, **more: Any) -> Answer:
        """Return an answer. Raises: RefusedError: it failed."""
        sampling = Sampling(seed=seed, temperature=0.0, xtc_threshold=0.0)
        fields: dict[str, Any] = {"model": "default_model", "messages": list(messages), "top_logprobs": 0}
        request = GenerationRequest(**{**fields, "sampling": sampling, "max_tokens": max_tokens, **more})
        events = self.events(request)
        if isinstance(events[-1], Failed):
            raise events[-1].error
        assert isinstance(events[-1], End)
        pieces = [event for event in events if isinstance(event, Piece) and event.tokens]
        return [(piece.text, piece.tokens[0][0].logprob) for piece in pieces]


async def events_of(answer: Answers) -> AsyncIterator[Event]:
    """Yield the events of an answer."""
    while answer.open:
        yield (await answer.next())[1]


async def every(answer: Answers) -> list[Event]:
    """Return all events of an answer."""
    return [event async for event in events_of(answer)]


def text_of(events: list[Event]) -> str:
    """Return the text of an answer that has ended well."""
    assert isinstance(events[-1], End)
    return "".join(event.text for event in events if isinstance(event, Piece))


@functools.cache
def stock_model(folder: str) -> tuple[Any, Any]:
    """Load a model with mlx-lm."""
    model, tokenizer, *_ = mlx_lm.load(folder)
    return model, tokenizer


def stock_answer(folder: str, *messages: dict[str, str], max_tokens: int = 5) -> Answer:
    """Return the answer of mlx-lm's own ``stream_generate``, which its server calls."""
    model, tokenizer = stock_model(folder)
    prompt = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
    found = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=max_tokens, prefill_step_size=1024)
    return [(response.text, response.logprobs[response.token].item()) for response in found]


@contextlib.contextmanager
def serving(*models: str, options: BatchOptions | None = None, **settings: Any) -> Iterator[Served]:
    """Our server, with these settings."""
    config = FlashConfig(**({"ram_budget_gb": 1.0, "telemetry": False, "prefill_step_size": 1024} | settings))
    options = options or BatchOptions(prefill_step_size=1024, prompt_cache_bytes=1 << 30)
    room = EngineRoom(
        Catalog([Source(name=model, base=model, config=config) for model in models], Source(config=config)), options
    )
    room.start()
    served = Served(room)
    try:
        yield served
    finally:
        served.close()


SHAPE = "--layers 4 --hidden-size 64 --intermediate-size 128 --heads 4 --kv-heads 2 --vocab-size 1000"

SYSTEM = "You answer in one sentence, and never say why. " * 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "llama"
    make_random_model(folder, *SHAPE.split())
    return str(folder)


def turn(text: str, *before: dict[str, str], system: str = SYSTEM) -> list[dict[str, str]]:
    return [*(before or [{"role": "system", "content": system}]), {"role": "user", "content": text}]


LONG = "Because. " * 40

NUM_TOKENS = 12

TEXTS = ["Hi", LONG, "Tell me of the sea, and of the sky above it", "Who are you? " * 9]


def ask(served: Served, text: str) -> Answer:
    """Ask a question with a system prompt of its own."""
    return served.ask(*turn(text, system=text + "!"), max_tokens=NUM_TOKENS)


def each_alone(folder: str, texts: list[str]) -> list[Answer]:
    """Return mlx-lm's answers to the same questions."""
    return [stock_answer(folder, *turn(text, system=text + "!"), max_tokens=NUM_TOKENS) for text in texts]


def together(served: Served, texts: list[str]) -> list[Answer]:
    with ThreadPoolExecutor(len(texts)) as pool:
        return list(pool.map(lambda text: ask(served, text), texts))
