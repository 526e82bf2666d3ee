"""The server on two ranks: rank 0 answers, the other one follows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import mlx_lm
import pytest

from live import Port, free_port
from local_ranks import Rank, started
from mlx_flash.errors import RefusedError
from mlx_flash.ranks import Peers
from mlx_flash.residency.plan import Decision
from mlx_flash.server.ranks import Ranks as ServerRanks
from mlx_flash.server.request import GenerationRequest
from models import make_random_model
from waiting import eventually

SHAPE = "--layers 4 --hidden-size 64 --intermediate-size 128 --heads 4 --kv-heads 2 --vocab-size 1000"
PROMPTS = ["Why is the sky blue?", "One two three four five six seven", "Hi"]
SECONDS = 60.0


class Ranks(Port):
    """A server on two ranks."""

    def __init__(self, model: str, port: int, ranks: Sequence[Rank]) -> None:
        super().__init__(port)
        self.model, self.ranks = model, ranks

    def ask(self, prompt: str, **options: Any) -> str:
        status, body = self.post("/v1/completions", {"prompt": prompt, "max_tokens": 8, "temperature": 0.0, **options})
        assert status == 200, body
        return str(body["choices"][0]["text"])

    def is_ready(self) -> bool:
        assert all(rank.process.is_alive() for rank in self.ranks), self.texts
        with contextlib.suppress(OSError):
            return self.get("/health")[0] == 200
        return False

    @property
    def texts(self) -> list[str]:
        return [path.read_text() for rank in self.ranks for path in (rank.out, rank.errors)]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    port, model = free_port(), str(make_random_model(tmp_path / "model", *SHAPE.split()))
    command = ["-m", "mlx_flash", "serve", "--model", model, "--ram-budget-gb", "1", "--port", port]
    with started(2, tmp_path, *command, forks=False) as processes:
        found = Ranks(model, port, processes)
        eventually(found.is_ready, SECONDS)
        yield found


def test_rank_0_answers_and_all_end_together(ranks: Ranks) -> None:
    model, tokenizer = mlx_lm.load(ranks.model)[:2]
    expected = [mlx_lm.generate(model, tokenizer, prompt, max_tokens=8) for prompt in PROMPTS]
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(ranks.ask, PROMPTS)) == expected, ranks.texts
    with ranks.leaving("/v1/completions", prompt="Go on", max_tokens=4000, stream=True) as connection:
        assert connection.recv(100)
    assert ranks.ask(PROMPTS[1]) == expected[1]  # from the kept cache
    assert ranks.ask(PROMPTS[0], seed=3) == expected[0]  # alone
    tool = {"type": "function", "function": {"name": "f", "parameters": nested(300)}}
    assert (
        ranks.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "tools": [tool]})[0] == 400
    )
    assert ranks.ask(PROMPTS[1]) == expected[1]
    processes = [rank.process for rank in ranks.ranks]
    processes[0].terminate()
    for process in processes:
        process.join(SECONDS)
    assert [process.exitcode for process in processes] == [0, 0], ranks.texts


def nested(num_levels: int) -> dict[str, Any]:
    """Return objects inside each other."""
    found: dict[str, Any] = {}
    for _ in range(num_levels):
        found = {"properties": found}
    return found


def test_a_request_with_too_many_levels_is_refused() -> None:
    ranks = ServerRanks(cast(Peers, OtherRank(0)))
    ranks.check([GenerationRequest(model="m", prompt="Hi", tools=[nested(201)])])
    with pytest.raises(RefusedError, match="too many objects or arrays inside each other"):
        ranks.check([GenerationRequest(model="m", prompt="Hi", tools=[nested(10_000)])])


class OtherRank:
    """Peers of rank 0: one that answers with a fixed number."""

    def __init__(self, number: float) -> None:
        self.number = number

    def gather(self, numbers: list[float]) -> list[list[float]]:
        return [list(numbers), [self.number]]


@pytest.mark.parametrize(("here", "there", "both"), [("batch", 2, "wait"), ("wait", 0, "wait"), ("batch", 1, "alone")])
def test_a_request_runs_as_the_rank_with_least_room_decides(here: Decision, there: int, both: Decision) -> None:
    assert ServerRanks(cast(Peers, OtherRank(there))).agree(lambda: here) == both


def test_a_request_that_one_rank_has_no_room_for_is_refused() -> None:
    with pytest.raises(RefusedError, match="rank 1 has no room"):
        ServerRanks(cast(Peers, OtherRank(3))).agree(lambda: "batch")

    def refuse() -> Decision:
        raise RefusedError("no room here", 413)

    with pytest.raises(RefusedError, match="no room here"):
        ServerRanks(cast(Peers, OtherRank(0))).agree(refuse)


def test_ranks_that_keep_other_prompts_use_none() -> None:
    assert ServerRanks(cast(Peers, OtherRank(5))).have_same(5)
    assert not ServerRanks(cast(Peers, OtherRank(5))).have_same(4)
