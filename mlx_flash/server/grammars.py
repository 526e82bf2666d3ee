"""The grammars of a model: what they take of the memory, and the processors that follow them."""

from __future__ import annotations

from typing import Any

from mlx_flash.errors import RefusedError
from mlx_flash.server.calltemplates import CallForm, form_of
from mlx_flash.server.prompts import Prompt, reasoning_of
from mlx_flash.server.request import GenerationRequest


def schema_grammar(schema: dict[str, Any] | None, field: str) -> str:
    """Return a rule of JSON texts, as :func:`~mlx_flash.server.grammar.json_grammar` does."""
    from mlx_flash.server.grammar import json_grammar  # 8 MB that few servers need

    return json_grammar(schema, field)


_TOKEN_BYTES = 200
"""Memory that the first grammar takes for each token of the vocabulary. Measured: 158 (Qwen2.5, 152 000 tokens)."""

_LEAST_BYTES = 4_000_000
"""Memory that it takes at least: the library."""


class Grammars:
    """The tokenizer as llguidance needs it, made for the first request with a grammar.

    Args:
        tokenizer: mlx-lm's wrapper.
        vocab_size: tokens that the model knows.

    Attributes:
        nbytes: memory that is in use beside the plan's.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.nbytes = 0
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._made: Any = None
        self._call_form: CallForm | None = None

    @property
    def needed_bytes(self) -> int:
        """Memory that a grammar takes, if it is in use or not."""
        return _LEAST_BYTES + _TOKEN_BYTES * self._vocab_size

    def of(self, request: GenerationRequest, prompt: Prompt) -> str | None:
        """Return the grammar of the answer to a request; None if it may be any text.

        Raises:
            RefusedError: the model's answers have no form that a grammar can follow, or a schema is not supported.
        """
        if not request.has_form:
            return None
        from mlx_flash.server.grammar import answer_grammar  # 8 MB that few servers need

        return answer_grammar(
            request, self._form(request), self._tokenizer, reasoning_of(request, prompt, self._tokenizer)
        )

    def _form(self, request: GenerationRequest) -> CallForm | None:
        """Return the form of the calls of an answer; None if it has none, or they may have any form.

        Raises:
            RefusedError: they have to follow a form, and the model's calls have none that a grammar can follow.
        """
        if not request.tools:
            return None
        if self._call_form is None:
            try:
                self._call_form = form_of(self._tokenizer, "tool_choice" if request.must_call else "tools")
            except RefusedError:
                if request.must_call or request.strict_tools or not self._tokenizer.tool_call_start:
                    raise
        return self._call_form

    def processor(self, grammar: str) -> Any:
        """Return a logits processor that follows a grammar.

        Raises:
            RefusedError: the tokenizer is of no known kind, or the grammar is too large.
        """
        from mlx_flash.server.grammar import GrammarProcessor, grammar_tokenizer  # 8 MB that few servers need

        if self._made is None:
            self._made = grammar_tokenizer(self._tokenizer, self._vocab_size)
            self.nbytes = self.needed_bytes
        return GrammarProcessor(self._made, grammar)
