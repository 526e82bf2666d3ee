"""The command ``flash-monitor``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from mlx_flash.monitor import glyphs
from mlx_flash.monitor.enginewatch import Watcher
from mlx_flash.monitor.frames import Canvas, frame, message
from mlx_flash.monitor.terminal import Terminal, print_lines
from mlx_flash.telemetry import INTERVAL_SECONDS

EXIT_NONE, EXIT_ERROR, EXIT_BROKEN_PIPE = 1, 1, 141
SHORTEST_INTERVAL = 0.05
ONCE_SECONDS = 1.0
"""Time between the two looks that give the speeds of a single frame."""

HINT = "Hint: start one with: mlx-flash generate --model DIR_OR_REPO"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the monitor.

    Args:
        argv: the arguments; None takes those of the process.

    Returns:
        The exit status.
    """
    args = make_parser().parse_args(argv)
    console = Console(no_color=True if args.no_color else None, highlight=False, markup=False, emoji=False)
    try:
        if args.once:
            return once(args, console)
        return stream_json(args) if args.json else live(args, console)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush when Python ends
        return EXIT_BROKEN_PIPE
    except OSError as error:
        print(f"flash-monitor: error: {error}", file=sys.stderr)
        return EXIT_ERROR


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the flags."""
    parser = argparse.ArgumentParser(
        prog="flash-monitor",
        description="Show the running mlx-flash engines of this user. Keys: q quits, Tab shows the next engine.",
    )
    add = parser.add_argument
    add("--once", action="store_true", help="print one frame and exit; exit status 1 when no engine runs")
    add("--json", action="store_true", help="print one JSON object for each engine and look, instead of frames")
    add("--pid", type=int, metavar="N", help="show only the engines of this process")
    add(
        "--interval",
        type=_interval,
        default=INTERVAL_SECONDS,
        metavar="SECONDS",
        help="time between two looks (default: 0.25)",
    )
    add("--no-color", action="store_true", help="no colours, as with the variable NO_COLOR")
    add("--ascii", action="store_true", help="only ASCII characters (default where the encoding has no others)")
    return parser


def _interval(text: str) -> float:
    seconds = float(text)
    if not SHORTEST_INTERVAL <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between {SHORTEST_INTERVAL} and 3600 seconds")
    return seconds


def once(args: argparse.Namespace, console: Console) -> int:
    """Print one frame, or one JSON object for each engine."""
    watcher = Watcher(args.pid)
    watcher.look()
    if watcher.histories:
        time.sleep(ONCE_SECONDS)
        watcher.look()
    if not watcher.histories:
        print(f"flash-monitor: {_nothing(watcher, args)}. {HINT}", file=sys.stderr)
        return EXIT_NONE
    if args.json:
        print_json(watcher)
    else:
        print_lines(console, draw(watcher, args, console, None))
    return 0


def live(args: argparse.Namespace, console: Console) -> int:
    """Draw frames until the user quits. Without an engine, wait for one."""
    watcher = Watcher(args.pid)
    with Terminal(console) as terminal:
        while True:
            watcher.look()
            terminal.show(draw(watcher, args, console, terminal.height))
            key = terminal.wait(args.interval)
            if key in ("q", "Q"):
                return 0
            if key == "\t":
                watcher.choose_next()


def stream_json(args: argparse.Namespace) -> int:
    """Print a line of JSON for each engine and look."""
    watcher = Watcher(args.pid)
    is_reported = False
    while True:
        watcher.look()
        if not watcher.histories and not is_reported:
            print(f"flash-monitor: {_nothing(watcher, args)}. {HINT}", file=sys.stderr)
            is_reported = True
        print_json(watcher)
        time.sleep(args.interval)


def draw(watcher: Watcher, args: argparse.Namespace, console: Console, height: int | None) -> list[Text]:
    """Return the frame of the last look."""
    chosen = glyphs.ASCII if args.ascii else glyphs.choose(console.encoding)
    canvas = Canvas(console.width, height, chosen)
    shown = [*watcher.histories, *([watcher.ended] if watcher.ended else [])]
    if not shown:
        return message(f"{_nothing(watcher, args).capitalize()}; waiting.", HINT, canvas)
    return frame(shown, watcher.chosen, watcher.system, canvas)


def print_json(watcher: Watcher) -> None:
    """Print one object on one line for each engine."""
    for state in watcher.to_json():
        try:
            print(json.dumps(state, allow_nan=False))
        except ValueError:  # a file may hold NaN, which JSON lacks
            finite = json.loads(json.dumps(state), parse_constant=lambda name: None)
            print(json.dumps(finite, allow_nan=False))
    sys.stdout.flush()


def _nothing(watcher: Watcher, args: argparse.Namespace) -> str:
    if args.pid is None:
        return "no engine is running"
    others = ", ".join(map(str, watcher.other_pids)) or "none"
    return f"no engine is running in process {args.pid} (running: {others})"
