"""Commands in a pseudo-terminal."""

from __future__ import annotations

import codecs
import os
import pty
import select
import signal
import subprocess
import sys
import time
from functools import partial

from children import ROOT


class Shell:
    """A Python program, by its arguments, in a pseudo-terminal."""

    def __init__(self, *program: object) -> None:
        self.master, slave = pty.openpty()
        words = [sys.executable, *map(str, program)]
        start = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # a background job ignores it
        env = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}  # nobody answers questions for the cursor
        for name in ("LINES", "COLUMNS"):  # the terminal has a size of its own
            env.pop(name, None)
        self.process = subprocess.Popen(
            words, stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, preexec_fn=start, env=env
        )
        os.close(slave)
        self.text = self.last = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def wait_for(self, words: str, seconds: float = 40) -> None:
        """Read until words come that were not seen yet. ``last`` has what came before them, and ``text`` the rest."""
        end = time.monotonic() + seconds
        while words not in self.text:
            assert time.monotonic() < end, self.text
            self._read()
        self.last, _, self.text = self.text.partition(words)

    def _read(self) -> bool:
        """Read what the program writes within half a second. Return False once nothing more can come."""
        if not select.select([self.master], [], [], 0.5)[0]:
            return True
        try:
            text = os.read(self.master, 10_000)
        except OSError:  # Linux: every process has closed its side
            return False
        self.text += self._decoder.decode(text)
        return bool(text)  # macOS: an empty read says the same

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """Close the terminal, as its window does, and tell the program."""
        os.close(self.master)
        self.process.send_signal(signal.SIGHUP)

    def end(self, seconds: float = 60) -> int:
        """Read the rest. Return the exit status."""
        end = time.monotonic() + seconds
        while self.process.poll() is None and self._read():
            if time.monotonic() > end:
                self.process.kill()
        status = self.process.wait()
        while select.select([self.master], [], [], 0)[0] and self._read():  # written between the last read and its end
            pass
        os.close(self.master)
        return status
