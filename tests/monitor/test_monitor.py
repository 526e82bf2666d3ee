"""The monitor shows what engines publish, in any terminal, and trusts nothing in it."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import rich.console
from rich.console import Console
from rich.text import Text

from children import ROOT
from interrupt_points import interrupted_in, total_points
from mlx_flash import telemetry as facts
from mlx_flash.commands.engines import draw, print_lines, screen, show
from mlx_flash.monitor.frames import STATES, bar, chart, frame, pass_words, strip
from mlx_flash.monitor.rates import IDLE_SECONDS, MINUTE, History, Watcher
from mlx_flash.monitor.words import duration, printable, rate, size, speed
from mlx_flash.telemetry import SCHEMA, Json, Publisher
from models import LLAMA
from monitored import MACHINE, SLOT, canvas, pool, published, run, state, text_of
from monitored import runtime as runtime  # a fixture
from saved_models import model_fixture
from terminals import Shell

# Speeds


def test_tokens_per_second_are_exact_however_seldom_they_come() -> None:
    history = History(published(state(passes={"num_tokens_out": 0, "last_ended": 10.0}), 10.1))
    for i in range(1, 200):
        clock = 10.1 + i * 0.25
        done = int((clock - 10.0) // 7.3)
        passes = {"num_tokens_out": done, "last_ended": 10.0 + 7.3 * done, "began": 10.0 + 7.3 * done}
        history.add(published(state(passes=passes), clock))
        if done:
            assert history.rates.tokens_per_second == pytest.approx(1 / 7.3)
    assert history.rates.mean_tokens_per_second is not None


def test_an_engine_between_calls_for_long_is_idle() -> None:
    idle = {"began": None, "num_passes": 10, "pass_seconds": 1.0}
    history = History(published(state(passes=idle), 99.4 + 0.9 * IDLE_SECONDS))
    assert not history.is_idle()
    history.add(published(state(passes=idle), 99.4 + 1.1 * IDLE_SECONDS))
    assert history.is_idle() and history.rates.tokens_per_second == 0
    assert "idle" in text_of(history)[1]


@pytest.mark.parametrize(
    ("waiting", "expected", "reading"),
    [(None, (0.2, 0.5, 0.2, 0.1), 0.2), ("kv", (0.5, 0.2, 0.2, 0.1), 0.5), ("experts", (0.5, 0.2, 0.2, 0.1), 0.5)],
)
def test_rates_are_differences(waiting: str | None, expected: tuple[float, ...], reading: float) -> None:
    """Waits for keys and values, and for experts, are waits for the disk."""
    history: Any = None
    looks = [(100.0, 0.0, 1.0, 2.0, 5_000_000_000, 1.0), (102.0, 1.8, 1.4, 3.0, 7_000_000_000, 1.4)]
    for clock, pass_seconds, waited, held, nbytes, busy in looks:
        more: Json = {"kv": {"wait_seconds": 0.0}} | ({"experts": pool()} if waiting == "experts" else {})
        if waiting is not None:
            more[waiting]["wait_seconds"] = (clock - 100) * 0.3
        told = state(
            passes={"began": None, "pass_seconds": pass_seconds},
            stream={"wait_seconds": waited, "held_seconds": held},
            read={"nbytes": nbytes, "busy_seconds": busy},
            **more,
        )
        if history is None:
            history = History(published(told, clock))
            assert history.rates.read_bytes_per_second is None and history.rates.shares is None
        else:
            history.add(published(told, clock))
    rates = history.rates
    assert (rates.read_bytes_per_second, rates.reading_bytes_per_second) == pytest.approx((1e9, 5e9))
    shares = rates.shares
    assert (shares.disk, shares.compute, shares.calls, shares.between) == pytest.approx(expected)
    assert rates.reading_share == pytest.approx(reading)
    assert waiting != "experts" or rates.experts.wait_share == pytest.approx(0.3)
    history.add(published(state(), 102.0))
    assert history.rates.shares is shares, "the same moment again tells nothing new"


def test_only_the_last_minute_is_remembered() -> None:
    history = History(published(state(), 0.0))
    for i in range(2000):
        history.add(published(state(read={"nbytes": 1e9 * i}), 0.25 * (i + 1)))
    assert len(history._samples) <= MINUTE / 0.25 + 2
    assert history.series("read", 10) == pytest.approx([4e9] * 10)
    early = History(published(state(), 0.0))
    early.add(published(state(), 3.0))
    assert early.series("memory.footprint", 20) == [None] * 18 + [8e8] * 2


# Drawing


def test_cached_part_of_the_files_is_shown() -> None:
    history = History(published(state(read={"nbytes": 1e9, "cached_bytes": 5e8}), 100.0))
    history.add(published(state(read={"nbytes": 5e9, "cached_bytes": 15e8, "cached_file_bytes": 12e8}), 102.0))
    assert "1.20 GB of the files in free memory; 25% of reads now" in "\n".join(text_of(history))


def test_words_for_numbers() -> None:
    assert [size(n) for n in (0, 9.4e6, 1.25e8, 2.5e9, 6.4e10)] == ["0 kB", "9.4 MB", "125 MB", "2.50 GB", "64.0 GB"]
    assert [duration(s) for s in (0.02, 3.21, 100, 3700)] == ["20 ms", "3.2 s", "0:01:40", "1:01:40"]
    assert speed(2.5) == "2.50 tokens/s" and speed(0.1) == "0.10 tokens/s" and speed(None) == "- tokens/s"
    assert speed(0.0004) == "2500.0 s per token" and speed(0) == "0.00 tokens/s"
    assert rate(0.0004) == "0.0004" and rate(0.0219) == "0.022" and rate(0.25) == "0.25" and rate(0) == "0.00"


def test_guesses_are_told_once_there_are_some() -> None:
    for guesses, words in (((0, 0), "7 done"), ((24, 15), "7 done, 15 of 24 guesses right")):
        passes = {"num_passes": 7, "began": None, **dict(zip(("num_guessed", "num_right"), guesses, strict=True))}
        assert pass_words(facts.read({"passes": passes}), 0.0, None, []) == words


SHOWN = [
    "model      llama-big", "pid 4321, 2.43 GB, ", "tokens: 20 in, 10 out; running",
    "pass       12: decode, 1 token, 500 ms; ", "computing", "2.08 now, mean 2.00, prompt 10.0", "of 2.20 probed",
    "disk wait", "between calls", "800 MB of 1.00 GB (80%), peak 850 MB", "base 200 MB", "pinned 321 MB (20 MB lent)",
    "slots 200 MB", "KV + activations 49 MB of 100 MB", "MLX cache 50 MB", "free 200 MB",
    "active 550 MB, cache 50 MB, peak 600 MB", "20.0 of 25.0 GB used (80%), swap 500 MB, pressure 3%", "q quits",
]  # fmt: skip


@pytest.mark.parametrize("num_layers", [24, 80])
def test_everything_is_on_a_screen_of_80_by_24(num_layers: int) -> None:
    history = History(published(state(num_layers, passes={"num_tokens_out": 5, "last_ended": 97.0}), 98.0))
    history.add(published(state(num_layers)))
    lines = text_of(history)
    text = "\n".join(lines)
    assert len(lines) <= 24 and all(len(line) <= 80 for line in lines)
    assert not [words for words in (*SHOWN, f"{num_layers} layers") if words not in text]
    cells = "".join(re.findall(r"[█·░▒▶─]+", "".join(lines[lines.index("") + 2 :][:3])))
    assert all(glyph in cells for glyph, _, _ in STATES.values())


@pytest.mark.parametrize("num_layers", [1, 24, 130, 1000])
def test_a_frame_fits_every_terminal(num_layers: int) -> None:
    histories = [History(published(state(num_layers, experts=pool()), pid=pid)) for pid in range(7)]
    for history in histories:
        history.add(published(state(num_layers, experts=pool(num_routed=128, num_hits=96)), 101.0))
    for width in (1, 2, 11, 12, 13, 30, 79, 80, 200, 500):
        for height in (1, 5, 24, 60, None):
            for chosen in (0, 6):
                lines = text_of(*histories, chosen=chosen, on=canvas(width, height))
                assert all(len(line) <= width for line in lines) and (height is None or len(lines) <= height)


def test_an_engine_that_ended_keeps_its_last_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    watcher, engines = Watcher(), [published(state())]
    monkeypatch.setattr("mlx_flash.monitor.rates.find", lambda: engines)
    watcher.look()
    engines = []
    watcher.look()
    assert watcher.histories == [] and watcher.to_json() == []
    lines = [line.plain for line in draw(watcher, Console(width=80), 24)]
    assert "llama-big" in lines[0] and "tokens: 20 in, 10 out; ended " in lines[1]
    engines = [published(state(), path=Path("next"))]
    watcher.look()
    assert watcher.ended is None


def test_the_engine_that_computes_is_shown_until_the_user_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three engines of a server: the first is idle; the last computes, then the second."""
    idle, busy = {"num_passes": 0, "began": None, "last_ended": 0.0}, {"num_passes": 9}
    passes, watcher = [idle, idle, busy], Watcher()

    def shown() -> int:
        engines = [published(state(passes=each), path=Path(f"{i}")) for i, each in enumerate(passes)]
        monkeypatch.setattr("mlx_flash.monitor.rates.find", lambda: engines)
        watcher.look()
        return watcher.chosen

    assert shown() == 2
    passes[1] = busy
    assert shown() == 2, "both compute: it stays"
    passes[2] = idle
    assert shown() == 1
    watcher.choose_next()
    watcher.choose_next()
    assert [shown(), shown()] == [0, 0], "the user chose it"


def test_each_rank_has_a_line() -> None:
    each = [{"layers": [[i, i + 1] for i in range(0, 24, 2)]}, {"layers": [[1, 3], [23, 24]]}]
    lines = text_of(History(published(state(ranks={"rank": 0, "each": each}))))
    at = next(i for i, line in enumerate(lines) if line.startswith("ranks"))
    assert lines[at : at + 2] == ["ranks      0: layers 0, 2, ... (12)", "           1: layers 1-2, 23"]


def test_bars_and_strips() -> None:
    assert chart([0, 0.5, 1, None], 1, 2) == ["  █ ", "▁██ "] and chart([-1e9, -0.3, 2], 1, 1) == ["▁▁█"]
    assert (bar([1, 1, 2], 4, 8), bar([3, 3], 4, 8), bar([1], 0, 8)) == ([2, 2, 4], [6, 2], [0])
    unit = ["done", "done", "computing", "waiting", "waiting"]
    assert strip(unit, 3, 3) == [["done", "done", "computing"], ["waiting", "waiting"]]
    assert strip(unit, 3, 1) == [["done", "computing", "waiting"]] and strip([], 3, 1) == []


def test_what_is_wrong_is_told() -> None:
    for shown, words in (
        (published({}, schema=SCHEMA + 1), f"schema {SCHEMA + 1}, known here: {SCHEMA}"),
        (published(state(), written=time.time() - 30), "silent for 30"),
        (published(state(memory={"footprint": 1_200_000_000})), "1.20 GB of 1.00 GB (120%)"),
    ):
        assert words in "\n".join(text_of(History(shown)))


def test_names_cannot_move_the_cursor_or_carry_markup() -> None:
    name = "a\x1b[2Jb\n\r\x07\u202ec\x9b1m[bold]d[/]\u200b"
    assert printable(name) == "a?[2Jb????c?1m[bold]d[/]?"
    history = History(published(state(model={"name": name})))
    console = Console(file=io.StringIO(), force_terminal=True, width=80, markup=False)
    print_lines(console, frame([history], 0, MACHINE, canvas()))
    shown = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())  # type: ignore[attr-defined]
    assert "\x1b" not in shown and "\r" not in shown and "\u202e" not in shown
    assert "[bold]d[/]" in shown


# The command


@pytest.fixture
def engine() -> Iterator[Publisher]:
    """An engine that tells a state of which the clock and a counter move."""
    began = time.perf_counter()

    def collect() -> Json:
        done = int((time.perf_counter() - began) / 0.05)
        passes = {"num_tokens_out": done, "last_ended": began + done * 0.05, "began": began + done * 0.05}
        return state(passes=passes, read={"nbytes": done * 50_000_000})

    publisher = Publisher(collect, 0.05)
    publisher.start()
    yield publisher
    publisher.close()


def test_without_an_engine_it_says_so() -> None:
    done = run("--once")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no engine is running. Hint: " in done.stderr
    assert run("--once", "--json").returncode == 1


def test_one_frame(engine: Publisher) -> None:
    done = run("--once")
    assert done.returncode == 0, done.stderr
    assert "llama-big" in done.stdout and "\x1b" not in done.stdout
    assert 10 < float(re.findall(r"([0-9.]+) now", done.stdout)[0]) < 30
    assert 0.3 < float(re.findall(r"([0-9.]+) of 2.20 probed", done.stdout)[0]) < 2
    done = run("--once", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stdout.isascii() and "> computing" in done.stdout and "?" not in done.stdout


def test_json(engine: Publisher) -> None:
    done = run("--once", "--json")
    (line,) = done.stdout.splitlines()
    told = json.loads(line)
    assert (told["schema"], told["pid"], told["model"]["name"]) == (SCHEMA, os.getpid(), "llama-big")
    assert 10 < told["rates"]["tokens_per_second"] < 30
    assert sum(told["rates"]["shares"].values()) == pytest.approx(1)
    assert told["system"]["total"] > 0 and len(told["units"]) == 24


def test_a_folder_that_is_not_private_is_one_line_of_error(runtime: Path) -> None:
    (runtime / "mlx-flash").mkdir()
    (runtime / "mlx-flash").chmod(0o755)
    done = run("--once")
    assert done.returncode == 1
    assert re.fullmatch(r"mlx-flash: error: .* can be used by others .*\n", done.stderr)


def test_it_needs_no_mlx() -> None:
    program = "import sys, mlx_flash.commands.engines; print({'mlx', 'mlx.core', 'numpy', 'mlx_lm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "set()\n"


def test_a_dumb_terminal_gets_frames_one_after_the_other(engine: Publisher) -> None:
    command = [sys.executable, "-m", "mlx_flash", "monitor", "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(40)]
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(timeout=30) == 0
    assert sum(line.startswith("model ") for line in lines) >= 2
    assert "\x1b" not in "".join(lines)


# In a real terminal, with a real engine

ENGINE = """
import sys, time
import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_flash import BudgetError, FlashConfig, load_model
from mlx_flash.streaming.stream import WeightStream
acquire = WeightStream.acquire
WeightStream.acquire = lambda *args: (time.sleep(0.02), acquire(*args))[1]  # a slow disk: the processor is free
model, least = None, 0
while model is None:  # planning grows the process, and so what it needs at least
    try:
        model, _ = load_model(sys.argv[1], FlashConfig(ram_budget_gb=least / 1e9 + 0.003, context_length=256))
    except BudgetError as error:
        least = error.minimum_bytes
print("ready", flush=True)
while True:
    cache = make_prompt_cache(model)
    for tokens in [list(range(20)), *[[7]] * 100]:
        mx.eval(model(mx.array([tokens]), cache=cache))
"""

model = model_fixture({**LLAMA, "num_hidden_layers": 24}, mx.bfloat16, name="tiny-model")


@pytest.fixture(scope="module")
def long_running(model: Path) -> Iterator[subprocess.Popen[str]]:
    """One engine for several tests, which generates all the time."""
    env = {**os.environ, "XDG_RUNTIME_DIR": str(model.parent), "TMPDIR": str(model.parent)}
    command = [sys.executable, "-c", ENGINE, str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@pytest.fixture
def generating(
    long_running: subprocess.Popen[str], model: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> subprocess.Popen[str]:
    """That engine, where monitors look."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(model.parent))
    return long_running


FRAME = "\x1b[H"
"""Begins each frame."""


def monitor_of(engine: subprocess.Popen[str], width: int = 80, height: int = 24) -> Shell:
    shell = Shell("-m", "mlx_flash", "monitor")
    resize(shell, width, height)
    shell.wait_for("\x1b[?1049h")
    shell.wait_for("tiny-model")
    return shell


def resize(shell: Shell, width: int, height: int) -> None:
    fcntl.ioctl(shell.master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))


@pytest.mark.parametrize(("ending", "status"), [("q", 0), (signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_the_terminal_is_as_before(ending: Any, status: int, generating: subprocess.Popen[str]) -> None:
    shell = monitor_of(generating)
    for words in (f"pid {generating.pid}", "running", "24 layers", " probed ("):
        shell.wait_for(words)
    assert not termios.tcgetattr(shell.master)[3] & termios.ICANON
    if isinstance(ending, str):
        shell.type(ending)
    else:
        shell.process.send_signal(ending)
    shell.wait_for("\x1b[?25h\x1b[?1049l")
    assert shell.process.wait(30) == status
    assert termios.tcgetattr(shell.master)[3] & termios.ICANON
    assert shell.end() == status


def test_progress_moves_in_a_terminal_of_any_size(generating: subprocess.Popen[str]) -> None:
    shell = monitor_of(generating)
    strips, end = set[str](), time.monotonic() + 60
    while len(strips) <= 3:
        assert time.monotonic() < end, f"progress does not move: {strips}"
        shell.wait_for("24 layers")
        shell.wait_for("\r\n", seconds=5)
        strips.update(re.findall("[█·░▒▶─]{50,}", re.sub(r"\x1b\[[0-9;]*m", "", shell.last)))
    for width, height in [(30, 8), (1, 1), (200, 50)]:
        resize(shell, width, height)
        frames = [0] * 3
        while not all(0 < lines <= height for lines in frames):  # frames of the size before may wait in the terminal
            assert time.monotonic() < end, frames
            shell.wait_for(FRAME)
            frames = [*frames[1:], shell.last.count("\n") + 1]
    shell.type("q")
    assert shell.end() == 0


def test_the_terminal_is_restored_after_a_signal_while_a_frame_is_drawn() -> None:
    """One in hundreds came while rich collected the frame, and then it collected what restores the terminal as well."""
    folders = ["commands/engines.py", str(Path(str(rich.console.__file__)))]

    def program(run: Callable[[Callable[[], object]], bool]) -> None:
        console = Console(file=io.StringIO(), force_terminal=True, width=40, height=5)
        with screen(console):
            run(lambda: show(console, [Text("model"), Text("engine")]))
        assert console.file.getvalue().endswith("\x1b[?25h\x1b[?1049l")  # type: ignore[attr-defined]

    total = total_points(program, folders)
    for number in range(0, total, max(1, total // 150)):
        assert interrupted_in(program, number, folders)


# --- experts ----------------------------------------------------------------------------------------------------------

GB = 1_000_000_000
LAYERS, TOP_K = 8, 4


def told(clock: float, tokens: float, ended: float, experts: Any) -> Any:
    passes = {"num_tokens_in": tokens, "num_tokens_out": tokens, "last_ended": ended, "began": ended}
    return published(state(experts=experts, passes=passes), clock)


@pytest.mark.parametrize(
    ("began", "nbytes"), [((30, 99.9), 285_000_000 / 4), ((33, 93.5), 285_000_000 * 7)], ids=["four tokens", "one slow"]
)
def test_two_looks_a_second_apart(began: tuple[int, float], nbytes: float) -> None:
    """128 experts needed, 96 in the pool, of which 20 of 25 predicted. Of a call of 7 s only the last one is seen."""
    before = pool(num_routed=1000, num_hits=100, num_predicted=50, num_predicted_right=5, read_bytes=7 * GB)
    after = pool(num_routed=1128, num_hits=196, num_predicted=75, num_predicted_right=25, read_bytes=7_285_000_000)
    history = History(told(100.0, *began, before))
    history.add(told(101.0, 34, 100.5 if began[0] == 33 else 100.9, after))
    rates = history.rates.experts
    assert rates is not None and rates.read_bytes_per_token == pytest.approx(nbytes)
    assert (rates.hit_rate, rates.predicted_right) == pytest.approx((96 / 128, 20 / 25))
    if began[0] == 30:
        assert (rates.read_per_token, rates.reused_per_token) == pytest.approx(((32 + 25) / 4, (96 - 20) / 4))


def looks(seconds_per_token: float, until: float) -> Iterator[Any]:
    """An engine at work, looked at four times a second: every layer needs four experts, and reads the odd ones."""
    for i in range(int(until / 0.25)):
        clock = 10.1 + i * 0.25
        done, under_way = divmod((clock - 10.0) / seconds_per_token, 1)
        calls = int(done) * LAYERS + int(under_way * LAYERS)
        layers = [call % LAYERS for call in range(calls)]
        hits = sum(TOP_K if layer < LAYERS // 2 else 1 for layer in layers)
        numbers = pool(num_routed=TOP_K * calls, num_hits=hits, read_bytes=(TOP_K * calls - hits) * SLOT)
        yield told(clock, int(done), 10.0 + done * seconds_per_token if done else 0.0, numbers)


@pytest.mark.parametrize("seconds_per_token", [0.04, 1.3, 7.3])
def test_rates_are_those_of_whole_tokens_however_seldom_they_come(seconds_per_token: float) -> None:
    """The second half of the layers hits seldom: rates over parts of a token would go up and down."""
    first, *others = looks(seconds_per_token, 50)
    history, seen = History(first), 0
    for other in others:
        history.add(other)
        rates = history.rates.experts
        assert rates is not None
        if other.state["passes"]["num_tokens_in"] >= 2 and other.clock > 20:
            seen += 1
            close = 0.06 if seconds_per_token < 1.3 else 0.3 / seconds_per_token
            assert rates.hit_rate == pytest.approx(20 / 32, rel=close)
            assert rates.read_per_token is None or rates.read_per_token == pytest.approx(12, rel=close)
            assert rates.read_bytes_per_token == pytest.approx(12 * SLOT, rel=close)
    assert seen > 50
