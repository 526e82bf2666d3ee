"""Python programs in child processes that begin with mlx-lm and mlx-flash imported, which saves 1.5 s each.

A server process imports once, and is forked for each program (the start method ``forkserver``). A test of starting or
ending Python itself starts its own Python instead.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

HELPERS = Path(__file__).resolve().parent
ROOT = HELPERS.parents[1]

ENV = {
    "HF_HUB_CACHE": str(Path(tempfile.gettempdir(), f"no-hub-of-{os.getpid()}")),
    "HF_HUB_OFFLINE": "1",
    "COLUMNS": "80",
}
"""Variables of all programs. Those that start with ``HF_`` are read by the server process, before it forks."""

# A child that is killed would leave its own. While it imports what it is to run, it knows no parent yet.
_IS_CHILD = multiprocessing.parent_process() is not None or hasattr(multiprocessing.current_process(), "_inheriting")
if not _IS_CHILD:
    util.get_temp_dir()  # for the server's socket: the temporary folder of a test would go with the test
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["preloaded"])


def run(
    *program: object,
    stdin: str = "",
    env: Mapping[str, str] = {},
    cwd: Path = ROOT,
    timeout: float = 120,
    forks: bool = True,
) -> subprocess.CompletedProcess[bytes]:
    """Run ``python PROGRAM``: ``-m MODULE``, ``-c CODE`` or a file, and its arguments. ``env`` is added to ours.

    The resident set of a fork begins small and grows as it touches libraries that it has already: what depends on a
    plan for the smallest budget does not fork.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdin", "stdout", "stderr")]
        files[0].write_text(stdin)
        process = start(*program, files=files, env=env, cwd=cwd, forks=forks)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(list(map(str, program)), timeout)
        return subprocess.CompletedProcess(program, process.exitcode, *(file.read_bytes() for file in files[1:]))


def ensure_server() -> None:
    """Start the server process, unless it runs. Whatever forks from it calls this first: it imports what it finds."""
    with patch.dict(os.environ, ENV | {"PYTHONPATH": f"{ROOT}{os.pathsep}{HELPERS}"}):
        forkserver.ensure_running()


def start(
    *program: object, files: Sequence[Path], env: Mapping[str, str] = {}, cwd: Path = ROOT, forks: bool = True
) -> BaseProcess:
    """Start ``python PROGRAM`` with these files for standard input, output and error.

    Unless it ``forks``, Python starts anew, and ends as it does for users: a fork skips the end of the interpreter.
    """
    ensure_server()
    context = _CONTEXT if forks else multiprocessing.get_context("spawn")
    process = context.Process(
        target=_child, args=(list(map(str, program)), files, {**os.environ, **ENV, **env}, cwd, forks)
    )
    process.start()
    return process


def _child(program: list[str], files: Sequence[Path], env: dict[str, str], cwd: Path, forked: bool) -> None:
    if forked and "preloaded" not in sys.modules:  # the server process says nothing of it
        raise ImportError("the server process has not imported preloaded.py: it was started without ensure_server")
    gc.freeze()  # a collection would go through all that the server imported, and copy its pages
    for number, path in enumerate(files):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    encodings = [env.get("PYTHONIOENCODING")] * 3
    sys.stdin, sys.stdout, sys.stderr = map(os.fdopen, range(3), ("r", "w", "w"), (-1, -1, 1), encodings)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # the server has looked it up
    os.chdir(cwd)
    kind, *sys.argv = program
    sys.path[0] = str(Path(kind).parent if kind.endswith(".py") else cwd)
    if kind == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        code, sys.argv[0] = sys.argv[0], "-c"
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = program
        runpy.run_path(kind, run_name="__main__")
