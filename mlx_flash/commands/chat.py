"""``mlx-flash chat``: mlx-lm's chat on a streamed model, with Ctrl-C and slash commands."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from mlx_lm import chat
from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

from mlx_flash.commands.interrupt import AnswerStoppedError, Interrupts
from mlx_flash.config import GB
from mlx_flash.generation import stream_generate
from mlx_flash.memory.footprint import peak_footprint
from mlx_flash.monitor.words import speed

BYE = ("/bye", "/exit", "/quit")
LETTERS = {**dict.fromkeys(BYE, "q"), "/clear": "r", "/?": "h", "/help": "h"}
"""Slash commands, each with the letter that mlx-lm's chat takes for it."""

HELP = "/? help, /clear forget the conversation, /bye (or Ctrl-D) exit; Ctrl-C stops an answer, twice exits"


class FlashChatUI(chat.ChatUI):  # type: ignore[misc]
    """mlx-lm's chat with slash commands, and a footer that shows the peak memory of the process."""

    def prompt(self) -> str:
        try:
            text: str = super().prompt()
        except EOFError:
            return "q"
        return LETTERS.get(text.strip(), text)

    def say_help(self) -> None:
        super().say_help()
        print(HELP, file=sys.stderr)

    def end_turn(self, response: Any) -> None:
        self.stream_token("\n")
        if response is not None:
            made = f"{response.generation_tokens} tokens, {speed(response.generation_tps)}"
            print(f"  {made}; prompt {speed(response.prompt_tps)}; peak memory {peak_footprint() / GB:.2f} GB")


def stoppable(model: Any, tokenizer: Any, prompt: Any, **options: Any) -> Iterator[Any]:
    """Yield what ``mlx_lm.stream_generate`` yields, until Ctrl-C."""
    cache = options["prompt_cache"]
    before = _length(cache)
    with Interrupts() as interrupts:
        responses = stream_generate(model, tokenizer, prompt, prompt_progress_callback=interrupts.check, **options)
        try:
            for response in responses:
                yield response
                if interrupts.stopped:
                    return
        except AnswerStoppedError:
            if can_trim_prompt_cache(cache):
                trim_prompt_cache(cache, _length(cache) - before)
            else:
                print("A part of the prompt stays in the conversation; /clear forgets it.", file=sys.stderr)
        finally:
            responses.close()


def _length(cache: list[Any]) -> int:
    return max((entry.offset for entry in cache if isinstance(getattr(entry, "offset", None), int)), default=0)


@contextlib.contextmanager
def chat_habits() -> Iterator[None]:
    """Give mlx-lm's chat Ctrl-C, slash commands and our footer while the context lasts."""
    stock = chat.ChatUI, chat.stream_generate
    chat.ChatUI, chat.stream_generate = FlashChatUI, stoppable
    try:
        yield
    finally:
        chat.ChatUI, chat.stream_generate = stock
