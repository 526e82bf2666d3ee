"""The server without its sockets, and mlx-lm's beside it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from mlx_lm import server

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

FLAGS: dict[str, Any] = {
    "adapter_path": None,
    "draft_model": None,
    "num_draft_tokens": None,
    "trust_remote_code": False,
    "chat_template": None,
    "use_default_chat_template": False,
    "chat_template_args": {},
    "kv_bits": None,
    "kv_group_size": 64,
    "quantized_kv_start": 0,
    "pipeline": False,
    "decode_concurrency": 32,
    "prompt_concurrency": 8,
    "prefill_step_size": 1024,
    "prompt_cache_size": 10,
    "prompt_cache_bytes": 1 << 30,
}


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
        """The prompt caches that are kept."""
        return kept_in(self.prompt_cache)

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


class StockServed:
    """mlx-lm's generation thread."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator
        self._insert = generator.prompt_cache.insert_cache
        self._inserted = threading.Semaphore(0)
        generator.prompt_cache.insert_cache = self._count

    def _count(self, *args: Any, cache_type: str = "assistant") -> None:
        self._insert(*args, cache_type=cache_type)
        if cache_type == "assistant":  # the last one of a request
            self._inserted.release()

    @property
    def prompt_cache(self) -> Any:
        return self.generator.prompt_cache

    @property
    def kept(self) -> list[list[Any]]:
        return kept_in(self.prompt_cache)

    def ask(self, *messages: dict[str, str], seed: int | None = None, max_tokens: int = 5) -> Answer:
        request = server.CompletionRequest("chat", "", list(messages), None, None)
        arguments = server.GenerationArguments(
            model=server.ModelDescription("default_model", None, None),
            sampling=server.SamplingArguments(0.0, 1.0, 0, 0.0, 0.0, 0.0),
            logits=server.LogitsProcessorArguments(None, 0.0, 20, 0.0, 20, 0.0, 20),
            stop_words=[],
            max_tokens=max_tokens,
            num_draft_tokens=3,
            logprobs=False,
            top_logprobs=0,
            seed=seed,
            chat_template_kwargs=None,
        )
        _, responses = self.generator.generate(request, arguments)
        answer = [(response.text, response.logprob) for response in responses]
        assert self._inserted.acquire(timeout=60)
        return answer


def kept_in(prompt_cache: Any) -> list[list[Any]]:
    """Return the prompt caches that mlx-lm's class holds."""
    lists, found = [prompt_cache._trie._trie], []
    while lists:
        for key, value in lists.pop().items():
            if key == "__value__":
                found.append(value.prompt_cache)
            else:
                lists.append(value)
    return found


@contextlib.contextmanager
def stock_serving(model: str) -> Iterator[StockServed]:
    """mlx-lm's own server."""
    provider = server.ModelProvider(SimpleNamespace(model=model, **FLAGS))
    generator = server.ResponseGenerator(provider, server.LRUPromptCache(10))
    try:
        yield StockServed(generator)
    finally:
        generator.stop_and_join()


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
