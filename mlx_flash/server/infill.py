"""Prompts with a gap, which models of code fill: the text before it and after it, between tokens of the model's own."""

from __future__ import annotations

from typing import Any

from mlx_flash.errors import RefusedError
from mlx_flash.server.request import GenerationRequest

_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
"""The tokens before the prefix, before the suffix, and before what fills the gap."""

END_TEXTS = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<file_sep>", " <EOT>")
"""Tokens that end what fills a gap, where the model's settings do not name them."""


def infill_tokens(request: GenerationRequest, tokenizer: Any) -> list[int]:
    """Return the prompt of a request with a suffix.

    Raises:
        RefusedError: the model has no tokens for a gap.
    """
    known = tokenizer.get_vocab()
    for marks in _MARKS:
        if all(mark in known for mark in marks):
            begin, hole, end = (known[mark] for mark in marks)
            first = [token for token in tokenizer.encode("") if token == tokenizer.bos_token_id]
            prefix = request.tokens or tokenizer.encode(request.prompt, add_special_tokens=False)
            suffix = tokenizer.encode(request.suffix, add_special_tokens=False)
            return [*first, begin, *prefix, hole, *suffix, end]
    raise RefusedError(
        "this model has no tokens that mark a gap, such as <|fim_prefix|>. Hint: use a model that fills gaps, such as "
        "Qwen2.5-Coder, or leave suffix out.",
        400,
        "suffix",
    )
