"""One command: its arguments, its import, its signals, its errors and its exit status.

Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import logging
import os
import signal
import sys
import termios
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO, cast

from mlx_flash.commands.arguments import COMMANDS, EXIT_USAGE, LOG, make_parser, parse_arguments
from mlx_flash.config import BUDGET_WORDS, own_names
from mlx_flash.errors import ConfigError, FlashError, mlx_explained
from mlx_flash.layout.names import known_models
from mlx_flash.modelfile.parse import named_models

REQUEST_VARIABLE = "_ARGCOMPLETE"
"""Set by the shell when it asks for completions."""


def completion(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash completion``: print the code that a shell has to run."""
    try:
        from argcomplete.shell_integration import shellcode
    except ModuleNotFoundError as error:
        raise ConfigError("completion needs argcomplete. Hint: pip install argcomplete.") from error
    print(shellcode(["mlx-flash"], shell=args.shell), file=out)
    return 0


def complete() -> None:
    """Answer the shell's request for completions, and end the process."""
    import argcomplete

    words = os.environ.get("COMP_LINE", "").split()
    parser, _ = make_parser(next((word for word in words[1:] if word in COMMANDS), None))
    argcomplete.autocomplete(parser, default_completer=cast(Any, _values))


def _values(prefix: str, action: argparse.Action, **_: object) -> list[str]:
    """Return files and folders that begin like a word; for models, folders, names and what was downloaded."""
    from argcomplete.completers import DirectoriesCompleter, FilesCompleter

    if action.dest == "ram_budget_gb":
        return list(BUDGET_WORDS)
    if action.dest not in ("model", "first", "words", "draft_model"):
        return list(FilesCompleter()(prefix))
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    names = [*known_models(), *named_models(), *DirectoriesCompleter()(prefix)]
    with contextlib.suppress(ConfigError):  # a settings file that is wrong
        names += own_names()
    return [*names, *sorted(path.name[8:].replace("--", "/") for path in cache.glob("models--*"))]


EXIT_ERROR, EXIT_HUNG_UP, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE, EXIT_TERMINATED = 1, 129, 130, 141, 143
"""The last four are what a shell reports for programs that the signals end."""

TRACEBACK_VARIABLE = "MLX_FLASH_TRACEBACK"

Run = Callable[[argparse.Namespace, TextIO], int]


def run_command(argv: Sequence[str]) -> int:
    """Run the command of the arguments. Return the exit status."""
    if REQUEST_VARIABLE in os.environ:
        complete()
    out, with_traceback = sys.stdout, bool(os.environ.get(TRACEBACK_VARIABLE))
    try:
        with _written(out):
            args = parse_arguments(list(argv))
            with_traceback |= args.traceback
            if args.command is None:
                make_parser()[0].print_help(sys.stderr)
                return EXIT_USAGE
            if args.command != "exec":
                _set_encodings()
            # The first SIGTERM, or a terminal that closes, ends it as Ctrl-C does: files are closed and removed.
            ending = handling((signal.SIGTERM, signal.SIGHUP), _interrupt)
            with ending, _loudness(args), contextlib.redirect_stdout(sys.stderr):  # libraries print
                # During imports C code may turn an exception into another one or drop it.
                is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else a program handles it
                with handling((signal.SIGINT,) * is_ours, _end_at_once), mlx_explained():
                    run = _load_command(args.command)
                return run(args, out)
    except _TerminatedError as error:
        print("mlx-flash: terminated", file=sys.stderr)
        return EXIT_HUNG_UP if error.number == signal.SIGHUP else EXIT_TERMINATED
    except KeyboardInterrupt:
        print("mlx-flash: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_BROKEN_PIPE
    except Exception as error:  # noqa: BLE001 the last line of defence: every error is printed
        return _report(error, with_traceback)
    finally:
        _drop_unwritable(out)


@contextlib.contextmanager
def _written(out: TextIO) -> Iterator[None]:
    """Write what is left in the buffer, also after the help, which ends the program. Later, nobody reports errors."""
    try:
        yield
    except SystemExit:
        out.flush()
        raise
    out.flush()


def _drop_unwritable(out: TextIO) -> None:
    """Keep what could not be written from the flush when Python ends, which would change the exit status to 120."""
    try:
        out.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


def end_silently() -> None:
    """Let a later Ctrl-C end the process without a traceback, while Python ends it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _load_command(name: str) -> Run:
    """Import a command. Most of them import MLX, which takes seconds; ``monitor`` and ``completion`` do not."""
    module, _, function = (COMMANDS[name].place or f"{name}.{name}").partition(".")
    found: Run = getattr(import_module(f"mlx_flash.commands.{module}"), function)
    return found


@contextlib.contextmanager
def _loudness(args: argparse.Namespace) -> Iterator[None]:
    """Choose what the logger of mlx-flash prints in a block. Programs of mlx-lm set up logging themselves."""
    log, handler = logging.getLogger("mlx_flash"), logging.StreamHandler()
    level = log.level
    if args.quiet:
        args.verbose = False
        log.setLevel(logging.ERROR)
    elif args.verbose == LOG:
        log.addHandler(handler)
        log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _set_encodings() -> None:
    """Keep characters from ending a command: bytes that are no text are refused where they are used, with their source.

    A character of an answer that the terminal's encoding lacks becomes a question mark.
    """
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors=errors)


class _TerminatedError(KeyboardInterrupt):
    """SIGTERM or SIGHUP came: ``number``."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    _leave_lost_terminal()
    raise _TerminatedError(number)


def _leave_lost_terminal() -> None:
    """Replace standard streams whose terminal was closed. A write to it would fail, and interrupt the clean-up."""
    with open(os.devnull, "r+b", buffering=0) as nothing:
        for fd in range(3):
            try:
                termios.tcgetattr(fd)
            except termios.error as error:
                if error.args[0] in (errno.EIO, errno.ENXIO):  # others are no terminals
                    os.dup2(nothing.fileno(), fd)


@contextlib.contextmanager
def handling(numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle signals in a block of the main thread, except those that the process ignores, as background jobs do."""
    is_main = threading.current_thread() is threading.main_thread()
    handled = [number for number in numbers if is_main and signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)


def _end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    os.write(2, b"\nmlx-flash: interrupted\n" if sys.stderr.isatty() else b"mlx-flash: interrupted\n")
    os._exit(EXIT_INTERRUPTED)


def _report(error: Exception, with_traceback: bool) -> int:
    if with_traceback:
        traceback.print_exception(error)
    print(f"mlx-flash: error: {_one_line(error)}", file=sys.stderr)
    return EXIT_ERROR


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.strerror}: {error.filename}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):  # other writers name their file
        return f"{error.strerror}. Hint: make room on the disk that standard output goes to."
    text = " ".join(str(error).split())
    if isinstance(error, FlashError | ValueError | OSError):
        return text
    return f"{type(error).__name__}: {text}. Hint: --traceback or {TRACEBACK_VARIABLE}=1 shows its origin."
