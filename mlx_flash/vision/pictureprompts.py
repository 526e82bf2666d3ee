"""Prompts with pictures, as mlx-vlm makes them."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_flash.compat.vlm import apply_chat_template, generate_step, prepare_inputs, stream_generate
from mlx_flash.errors import PictureError

_NAMES = {"input_ids": "input_ids", "pixel_values": "pixel_values", "attention_mask": "mask"}
"""Names of a processor's results, and mlx-vlm's loops' names of them."""


@dataclass(frozen=True, slots=True)
class PicturePrompt:
    """A prompt as a model is called with it.

    Attributes:
        inputs: what its processor made of text and pictures.
    """

    inputs: Mapping[str, Any]

    @property
    def tokens(self) -> list[int]:
        """All tokens, those that stand for pictures included."""
        tokens: mx.array = self.inputs["input_ids"]
        return cast("list[int]", tokens.flatten().tolist())

    @property
    def keywords(self) -> dict[str, Any]:
        """The arguments of mlx-vlm's loops."""
        given = {_NAMES.get(name, name): value for name, value in self.inputs.items()}
        return {"pixel_values": None, "mask": None, **given}


def make_prompt(
    model: nn.Module,
    processor: Any,
    messages: str | Sequence[Mapping[str, Any]],
    pictures: Sequence[Any],
    *,
    is_chat: bool = True,
    **options: Any,
) -> PicturePrompt:
    """Return a prompt.

    Args:
        model: the model.
        processor: its processor.
        messages: the user's text, or a conversation.
        pictures: in the order of their places in the conversation; those without one belong to the last message.
        is_chat: put the text into the model's chat template. If not, it has the marks of pictures itself.
        options: variables of the chat template.

    Raises:
        PictureError: the model's processor cannot use them.
    """
    text: Any = messages
    if is_chat:
        given = messages if isinstance(messages, str) else [dict(message) for message in messages]
        text = apply_chat_template(processor, model.config, given, len(pictures), **options)
    try:
        return PicturePrompt(prepare_inputs(model, processor, text, list(pictures)))
    except ValueError as error:  # what a processor raises, in mlx-vlm's words
        raise PictureError(f"the model's processor refuses prompt and pictures: {error}") from error


def of_tokens(tokens: list[int]) -> PicturePrompt:
    """Return a prompt of tokens alone."""
    array = mx.array([tokens])
    return PicturePrompt({"input_ids": array, "attention_mask": mx.ones(array.shape, mx.int32)})


def responses(model: nn.Module, processor: Any, prompt: PicturePrompt, **options: Any) -> Generator[Any, None, None]:
    """Yield ``mlx_vlm.stream_generate``'s results, one for each token and one for the end of the text.

    Args:
        model: streamed, or mlx-vlm's own.
        processor: its processor.
        prompt: the prompt.
        options: of ``mlx_vlm.stream_generate``.
    """
    return stream_generate(model, processor, "", **prompt.keywords, **options)


def steps(model: nn.Module, prompt: PicturePrompt, **options: Any) -> Iterator[tuple[int, mx.array]]:
    """Yield tokens and log probabilities, as ``mlx_vlm``'s ``generate_step`` does."""
    given = prompt.keywords
    return generate_step(
        given.pop("input_ids"), model, given.pop("pixel_values"), given.pop("mask"), **given, **options
    )
