"""Requests with pictures: their prompts, their room in the budget, and their tokens by mlx-vlm's loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_flash.compat.vlm import TEMPLATE_ARGUMENTS, make_vlm_cache
from mlx_flash.config import FlashConfig
from mlx_flash.errors import BudgetError, PictureError, RefusedError
from mlx_flash.server.prompts import Prompt, check_tokens, checked_options, state_of
from mlx_flash.server.request import GenerationRequest, decoded
from mlx_flash.vision.flashvlm import FlashVLM, load_processor_of, load_vlm_model
from mlx_flash.vision.pictures import (
    PicturePrompt,
    make_prompt,
    of_tokens,
    open_picture,
    preparing_bytes,
    size_of,
)


def open_sight(path: Path, config: FlashConfig, tokenizer: Any, *, trust_remote_code: bool = False) -> Sight:
    """Load a model that sees, and its processor, which shares the server's tokenizer."""
    model = load_vlm_model(path, config)
    try:
        processor = load_processor_of(path, model, trust_remote_code=trust_remote_code)
    except BaseException:
        model.close()
        raise
    own: Any = getattr(processor, "tokenizer", None)
    shared = tokenizer._tokenizer
    if type(own) is type(shared):  # the vocabulary is in memory once
        shared.chat_template = shared.chat_template or own.chat_template
        processor.tokenizer = shared
    return Sight(model, processor, tokenizer)


class Sight:
    """A model that sees, as the server uses it. Belongs to the generation thread."""

    def __init__(self, model: FlashVLM, processor: Any, tokenizer: Any) -> None:
        self.model = model
        self._processor = processor
        self._tokenizer = tokenizer

    def expect(self, files: Sequence[Path]) -> None:
        """Plan for pictures that the first prompt has. Only before the model is started."""
        pictures = [open_picture(file, str(file)) for file in files]
        keywords = make_prompt(self.model, self._processor, "?", pictures).keywords
        del pictures  # before the plan, which counts the process
        self.model.expect(None, keywords)

    def make_cache(self) -> list[Any]:
        found: list[Any] = make_vlm_cache(self.model.language_model)
        return found

    def prompt(self, vocab_size: int, request: GenerationRequest, options: Mapping[str, Any]) -> Prompt:
        """Return the prompt of a request, and check that the budget has room for its pictures."""
        found = self.inputs(request, options)
        if request.pictures:
            need, room = self.model.picture_bytes(found.keywords), self.model.plan.room_bytes
            if need is not None and need > room:
                raise RefusedError(
                    f"the pictures need {need / 1e6:.1f} MB while they are computed, and the budget leaves "
                    f"{room / 1e6:.1f} MB. Hint: send smaller ones, or raise ram_budget_gb.",
                    400,
                    "messages",
                )
        tokens = found.tokens
        check_tokens(tokens, vocab_size, request)
        return Prompt(tokens, state_of(self._tokenizer, tokens))

    def inputs(self, request: GenerationRequest, options: Mapping[str, Any]) -> PicturePrompt:
        """Return what the model is called with for a request. Its pictures are decoded for it."""
        if request.tokens is not None:
            return of_tokens(list(request.tokens))
        own = checked_options(request.template_options or {}, TEMPLATE_ARGUMENTS)
        options = {"enable_thinking": False, **options, **own}
        if request.tools is not None:
            options["tools"] = list(request.tools)
        messages: Any = request.prompt if request.messages is None else request.messages
        try:
            found = make_prompt(
                self.model,
                self._processor,
                messages,
                self._decode(request.pictures),
                is_chat=request.messages is not None,
                **(options if request.messages is not None else {}),
            )
        except (PictureError, BudgetError) as error:
            raise RefusedError(str(error), 400, "messages") from error
        return found

    def _decode(self, pictures: Sequence[str]) -> list[Any]:
        """Return pictures of a request, once there is room for all of them in the processor."""
        sizes = [size_of(data, f"picture {i}") for i, data in enumerate(decoded(pictures), 1)]
        if sizes:
            self.model.towers.make_room(preparing_bytes(sizes), "preparing the pictures for a call")
        return [open_picture(data, f"picture {i}") for i, data in enumerate(decoded(pictures), 1)]

    def steps(
        self,
        prompt: mx.array,
        inputs: PicturePrompt,
        prompt_progress_callback: Callable[[int, int], None],
        **options: Any,
    ) -> Iterator[Any]:
        """Yield tokens and log probabilities, by mlx-vlm's own loop."""
        prompt_progress_callback(0, prompt.size)
        for number, found in enumerate(inputs.steps(self.model, **options)):
            if not number:
                prompt_progress_callback(prompt.size, prompt.size)
            yield found
