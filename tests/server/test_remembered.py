"""Prompts that a server remembers on disk, by default."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from live import Live, live
from mlx_flash.errors import BudgetError
from mlx_flash.prefixes import prefixcache
from mlx_flash.prefixes.prefixcache import prefix_directory
from mlx_flash.prefixes.store import list_prefixes
from mlx_flash.server import models

SYSTEM = " ".join(f"Rule {number}: read the file before you change it." for number in range(40))
LATER = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And who wrote it?"}]


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    shutil.rmtree(prefix_directory(), ignore_errors=True)
    yield
    shutil.rmtree(prefix_directory(), ignore_errors=True)


def chat(server: Live, *messages: dict[str, Any], system: str = SYSTEM) -> tuple[str, int, int]:
    """Return an answer, the tokens of its prompt, and those of them that were cached."""
    body = {"messages": [{"role": "system", "content": system}, *messages], "max_tokens": 6, "temperature": 0}
    status, reply = server.post("/v1/chat/completions", body)
    assert status == 200, reply
    usage = reply["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return reply["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


def asks(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("budget", [2.0, "min"])
def test_another_conversation_after_a_restart_computes_its_own_words(plain: str, budget: Any) -> None:
    """The system prompt comes from disk, and the answers are those of a server without a prefix cache."""
    conversation = [asks("Is the sea deep?"), *LATER]
    with live(plain, kv_prefixes="off", ram_budget_gb=budget) as server:
        expected = [chat(server, asks("Why?"))[0]]
    with live(plain, kv_prefixes="off", ram_budget_gb=budget) as server:
        expected.append(chat(server, *conversation)[0])
    with live(plain, ram_budget_gb=budget) as server:
        assert server.model.is_in_memory is (budget == 2.0)
        answer, num_prompt, cached = chat(server, asks("Why?"))
        assert (answer, cached) == (expected[0], 0) and num_prompt > 600
    with live(plain, ram_budget_gb=budget) as server:
        answer, num_prompt, cached = chat(server, *conversation)
        assert answer == expected[1] and 0 < num_prompt - cached < 150
    with live(plain, ram_budget_gb=budget) as server:  # the same prompt: all but the token whose logits are needed
        assert chat(server, asks("Why?"))[0] == expected[0]


def test_a_long_message_after_a_short_system_prompt_is_remembered(plain: str) -> None:
    for budget in (2.0, "min"):
        found = []
        for _ in range(2):
            with live(plain, ram_budget_gb=budget) as server:
                found.append(chat(server, asks(SYSTEM), system="Be kind."))
        (first, num_prompt, none), (again, _, cached) = found
        num_alone = 20 if budget == 2.0 else 1  # mlx-lm's batch computes the system prompt first, which has no page
        assert (first, none) == (again, 0) and num_prompt - num_alone <= cached < num_prompt
        shutil.rmtree(prefix_directory())


def test_prompts_below_a_page_are_not_written(plain: str) -> None:
    with live(plain) as server:
        for number in range(5):
            assert chat(server, asks(f"Say {number}"), system="Be kind.")[1] < 256
        assert server.model.prefixes is not None
        server.model.prefixes.store.flush()
        assert server.model.prefixes.store.telemetry()["stored"] == 0
    assert list_prefixes(prefix_directory()) == []


def test_every_dialect_reports_what_came_from_disk(plain: str) -> None:
    messages = [{"role": "system", "content": SYSTEM}, asks("Why?")]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": messages, "max_tokens": 4},
        "/v1/responses": {"input": messages, "max_output_tokens": 4},
        "/v1/messages": {"system": SYSTEM, "messages": messages[1:], "max_tokens": 4},
        "/api/chat": {"messages": messages, "options": {"num_predict": 4}, "stream": False},
    }
    counts = {
        "/v1/chat/completions": lambda reply: reply["usage"]["prompt_tokens_details"]["cached_tokens"],
        "/v1/responses": lambda reply: reply["usage"]["input_tokens_details"]["cached_tokens"],
        "/v1/messages": lambda reply: reply["usage"]["cache_read_input_tokens"],
        "/api/chat": lambda reply: reply["prompt_eval_cached_count"],
    }
    with live(plain) as server:
        num_prompt = chat(server, asks("Why?"))[1]
    for path, body in bodies.items():
        with live(plain) as server:
            status, reply = server.post(path, {"model": "default_model", **body})
            assert status == 200 and counts[path](reply) == num_prompt - 1, reply


def test_a_budget_without_room_for_pages_serves_without_them(
    plain: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prepare = models.prepare

    def tight(path: Path, config: Any, **given: Any) -> Any:
        if config.kv_prefixes == "exact":
            raise BudgetError("the budget has no room", 0)
        return prepare(path, config, **given)

    monkeypatch.setattr(models, "prepare", tight)
    with live(plain) as server:
        assert server.model.prefixes is None and chat(server, asks("Why?"))[2] == 0
    with pytest.raises(BudgetError), live(plain, kv_prefixes="exact"):
        pass


def test_they_take_a_tenth_of_the_free_disk_at_most(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixcache, "free_bytes", lambda path: 10_000_000)
    with live(plain) as server:
        for number in range(4):
            chat(server, asks("Why?"), system=f"{number}. {SYSTEM}")
    assert 0 < sum(found.nbytes for found in list_prefixes(prefix_directory())) <= 1_000_000
    monkeypatch.undo()
    assert prefixcache.default_limit(Path("/")) <= 20e9
