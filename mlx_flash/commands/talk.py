"""The conversation of ``mlx-flash run`` and ``chat``: messages, answers, and what is shown around them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any, TextIO

from rich.text import Text

from mlx_flash.commands.common import note, print_rich
from mlx_flash.commands.interrupt import AnswerStoppedError, Interrupts
from mlx_flash.commands.kept import LAST, keep
from mlx_flash.commands.render import render_generation
from mlx_flash.commands.report import Recorder, make_report, ratio
from mlx_flash.commands.slash import Bye, Slash
from mlx_flash.commands.statusline import Status
from mlx_flash.commands.typedlines import Read
from mlx_flash.config import GB
from mlx_flash.errors import FlashError, WriteError
from mlx_flash.memory.footprint import footprint, peak_footprint
from mlx_flash.modelfile.conversation import Conversation
from mlx_flash.monitor.words import counted, duration, speed
from mlx_flash.residency.plan import DEFAULT_PREFILL_STEP_SIZE

HINT = "/? shows the commands, Ctrl-C stops an answer, Ctrl-D ends"
AGAIN = "(Ctrl-C again, Ctrl-D or /bye ends)"

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters of an answer that would control the terminal."""


class Talk:
    """A conversation in a terminal, or the answer to one prompt.

    Args:
        conversation: the conversation.
        load_seconds: duration of loading.
        out: receives the answers.
        verbose: print all measurements after each answer.
        keeps: write the conversation to its file after each answer.
        reopen: loads the model again that left memory. Returns it and its tokenizer.
    """

    def __init__(
        self,
        conversation: Conversation,
        load_seconds: float,
        out: TextIO,
        verbose: bool,
        keeps: bool = False,
        reopen: Callable[[], tuple[Any, Any]] | None = None,
    ) -> None:
        self._conversation = conversation
        self._load_seconds = load_seconds
        self._out = out
        self._is_terminal = out.isatty()
        self._keeps = keeps
        self._reopen = reopen
        self.slash = Slash(conversation, verbose)

    def converse(self, read: Read, is_typed: bool = False) -> int:
        """Answer messages until the user ends the conversation. An error of an answer does not end it.

        Args:
            read: reads a message.
            is_typed: a person types: Ctrl-C without a message asks for another one, and errors are no failure.

        Returns:
            The exit status.
        """
        note(HINT)
        is_interrupted, status = False, 0
        while True:
            try:
                text = read()
            except EOFError:
                return status
            except KeyboardInterrupt as error:
                if is_interrupted or not is_typed or type(error) is not KeyboardInterrupt:  # SIGTERM and SIGHUP
                    raise
                is_interrupted = True
                note(AGAIN)
                continue
            is_interrupted = False
            try:
                if text.startswith("/"):
                    self.slash.run(text)
                elif text.strip():
                    self.answer(text.strip())
                    self._print_footer()
            except Bye:
                return status
            except FlashError as error:
                status = int(not is_typed)
                print_rich(Text(f"mlx-flash: error: {' '.join(str(error).split())}"), sys.stderr)

    def answer(self, text: str) -> None:
        """Print the answer to a message until it ends or the user presses Ctrl-C."""
        if self._conversation.model is None and self._reopen is not None:
            self._conversation.bind(*self._reopen())
        recorder = self._recorder = Recorder(self._conversation.model, 0, self._load_seconds)
        with Interrupts() as interrupts, Status("computing the prompt", self._is_terminal) as status:
            status.watch(lambda: interrupts.is_pressed)

            def report(done: int, total: int) -> None:
                interrupts.check(done, total)
                status.show(done, total)

            pieces = self._conversation.answer(text, report, recorder.add, lambda: interrupts.stopped)
            try:
                with closing(pieces):
                    for piece in pieces:
                        status.stop()
                        shown = _CONTROLS.sub("", piece) if self._is_terminal else piece
                        print(shown, end="", file=self._out, flush=True)
            except AnswerStoppedError:
                pass  # stopped before the first token
        print(file=self._out, flush=True)
        if self._keeps:
            try:
                keep(LAST, self._conversation)
            except WriteError as error:
                self._keeps = False
                note(f"mlx-flash: {error}")
        recorder.num_prompt_tokens = self._conversation.num_new_tokens
        if self.slash.is_verbose and recorder.tokens:
            step = recorder.plan.prefill_step_size if recorder.plan else DEFAULT_PREFILL_STEP_SIZE
            print_rich(render_generation(make_report(recorder, "", step)), sys.stderr)

    def _print_footer(self) -> None:
        """Print speed and memory of the last answer."""
        run = self._recorder
        if self.slash.is_verbose or not run.tokens:
            return
        to_first, to_last = run.first.clock - run.start.clock, run.last.clock - run.first.clock
        per_second = ratio(len(run.tokens) - 1, to_last)
        words = [counted(len(run.tokens), "token") + (f", {speed(per_second)}" if per_second else "")]
        words.append(f"prompt {counted(run.num_prompt_tokens, 'token')} in {duration(to_first)}")
        peak = f"{peak_footprint() / GB:.2f}" + (f" of {run.plan.budget_bytes / GB:.2f}" if run.plan else "")
        words.append(f"memory {footprint() / GB:.2f} GB, peak {peak} GB")
        if not self.slash.is_quiet:
            print_rich(Text("; ".join(words), style="dim"), sys.stderr)
