"""The log: whoever keeps the locks of Python's own logging, no thread of this package waits for them for long."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_flash import enginethread, load_model, logs
from mlx_flash.logs import log
from models import LLAMA, save
from streamed import config
from waiting import eventually

LOGGER = logging.getLogger("mlx_flash")


@contextmanager
def locks_kept(handler: logging.Handler) -> Iterator[None]:
    """Keep the locks as an interrupt leaves them: with the main thread."""
    logging._acquireLock()  # type: ignore[attr-defined]
    handler.acquire()
    try:
        yield
    finally:
        handler.release()
        logging._releaseLock()  # type: ignore[attr-defined]


@pytest.mark.skipif(not hasattr(logging, "_acquireLock"), reason="later versions of Python take the lock in a block")
def test_a_lock_that_an_interrupt_has_left_behind_stops_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "_SECONDS", 0.02)
    folder = save(tmp_path / "model", LLAMA, mx.float32)
    with caplog.at_level(logging.INFO, "mlx_flash"):
        with locks_kept(caplog.handler):
            LOGGER.manager._clear_cache()  # type: ignore[attr-defined]
            with load_model(folder, config(ram_budget_gb="min"))[0] as model:
                model.start()
            assert not caplog.records
        eventually(lambda: [each for each in caplog.records if "starts in a budget" in each.getMessage()])


def test_records_have_their_errors_their_places_and_the_context(caplog: pytest.LogCaptureFixture) -> None:
    request = ContextVar[str]("request")
    found = list[str]()
    request.set("one")

    def note(record: logging.LogRecord) -> bool:
        found.append(request.get("none"))
        return True

    def fail() -> None:
        try:
            raise ValueError("x")
        except ValueError:
            log.exception("it failed: %d", 1)

    caplog.handler.addFilter(note)
    with caplog.at_level(logging.INFO, "mlx_flash"):
        fail()
        enginethread.run(fail)
        thread = threading.Thread(target=lambda: (request.set("two"), fail()))
        thread.start()
        thread.join()
        log.debug("too much")
        enginethread.run(lambda: log.debug("too much"))
    caplog.handler.removeFilter(note)
    assert [record.getMessage() for record in caplog.records] == ["it failed: 1"] * 3
    for record in caplog.records:
        assert record.exc_info is not None and record.exc_info[0] is ValueError
    assert {record.funcName for record in caplog.records} == {"fail"} and found == ["one", "none", "two"]
