"""``--format``: answers that are JSON, or follow a JSON schema. Reasoning comes before them, as in the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlx_flash.errors import ConfigError


class Format:
    """The form of the answers of one model.

    Args:
        text: ``json``, or a file with a JSON schema.
        tokenizer: mlx-lm's wrapper. Made before the plan, which then counts the memory of this.

    Raises:
        ConfigError: the file is no schema, or llguidance is not installed.
        RefusedError: the schema is not supported, or the model's answers have no form that it could have.
    """

    def __init__(self, text: str, tokenizer: Any) -> None:
        from mlx_flash.server.grammars import Grammars, schema_grammar

        try:
            schema = None if text == "json" else json.loads(Path(text).read_bytes())
            self._rule = schema_grammar(schema, "--format")
        except ModuleNotFoundError as error:
            raise ConfigError("--format needs llguidance. Hint: pip install llguidance") from error
        except (FileNotFoundError, TypeError, json.JSONDecodeError) as error:
            raise ConfigError(f"--format {text}: {error}. Hint: json, or a file with a JSON schema.") from error
        self._tokenizer, self._grammars = tokenizer, Grammars(tokenizer, len(tokenizer))
        self.processors([])  # makes the table of the vocabulary

    def processors(self, prompt: list[int]) -> list[Any]:
        """Return the logits processors of the answer to a prompt."""
        from mlx_flash.server.prompts import state_of, whole
        from mlx_flash.server.request import GenerationRequest

        request = GenerationRequest(model="", messages=(), grammar=self._rule)
        grammar = self._grammars.of(request, whole(prompt, state_of(self._tokenizer, prompt)))
        return [self._grammars.processor(str(grammar))]
