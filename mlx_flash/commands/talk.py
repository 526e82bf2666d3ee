"""The conversation of ``mlx-flash run`` and ``chat``: messages, answers, and what is shown around them."""

from __future__ import annotations

import re
import sys
from contextlib import closing
from typing import TextIO

import mlx.nn as nn
from rich.text import Text

from mlx_flash.commands.common import note, print_rich
from mlx_flash.commands.interrupt import AnswerStoppedError, Interrupts
from mlx_flash.commands.render import render_generation
from mlx_flash.commands.report import Recorder, make_report, ratio
from mlx_flash.commands.slash import Bye, Slash
from mlx_flash.commands.statusline import Status
from mlx_flash.commands.typedlines import Read
from mlx_flash.config import GB
from mlx_flash.errors import FlashError
from mlx_flash.memory.footprint import footprint, peak_footprint
from mlx_flash.modelfile.conversation import Conversation
from mlx_flash.monitor.words import counted, duration, tokens_rate
from mlx_flash.residency.plan import DEFAULT_PREFILL_STEP_SIZE

HINT = "/? shows the commands, Ctrl-C stops an answer, Ctrl-D ends"

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters of an answer that would control the terminal."""


class Talk:
    """A conversation in a terminal, or the answer to one prompt.

    Args:
        conversation: the conversation.
        model: its model.
        load_seconds: duration of loading.
        out: receives the answers.
        verbose: print all measurements after each answer.
    """

    def __init__(
        self, conversation: Conversation, model: nn.Module, load_seconds: float, out: TextIO, verbose: bool
    ) -> None:
        self._conversation = conversation
        self._model = model
        self._load_seconds = load_seconds
        self._out = out
        self._is_terminal = out.isatty()
        self.slash = Slash(conversation, model, verbose)

    def converse(self, read: Read) -> None:
        """Answer messages until the user ends the conversation. An error of an answer does not end it."""
        note(HINT)
        while True:
            try:
                text = read()
            except EOFError:
                return
            try:
                if text.startswith("/"):
                    self.slash.run(text)
                elif text.strip():
                    self.answer(text.strip())
                    self._print_footer()
            except Bye:
                return
            except FlashError as error:
                print_rich(Text(f"mlx-flash: error: {' '.join(str(error).split())}"), sys.stderr)

    def answer(self, text: str) -> None:
        """Print the answer to a message until it ends or the user presses Ctrl-C."""
        recorder = self._recorder = Recorder(self._model, 0, self._load_seconds)
        with Interrupts() as interrupts, Status("computing the prompt", self._is_terminal) as status:
            status.watch(lambda: interrupts.is_pressed)

            def report(done: int, total: int) -> None:
                interrupts.check(done, total)
                status.show_prompt(done, total)

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
        words = [counted(len(run.tokens), "token") + (f", {tokens_rate(per_second)}" if per_second else "")]
        words.append(f"prompt {counted(run.num_prompt_tokens, 'token')} in {duration(to_first)}")
        peak = f"{peak_footprint() / GB:.2f}" + (f" of {run.plan.budget_bytes / GB:.2f}" if run.plan else "")
        words.append(f"memory {footprint() / GB:.2f} GB, peak {peak} GB")
        if not self.slash.is_quiet:
            print_rich(Text("; ".join(words), style="dim"), sys.stderr)
