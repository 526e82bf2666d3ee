"""``--format``: answers that are JSON, or follow a JSON schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlx_flash.errors import ConfigError


class Format:
    """The form of the answers of one model.

    Args:
        text: ``json``, or a file with a JSON schema.

    Raises:
        ConfigError: the file is no schema, or llguidance is not installed.
        RefusedError: the schema is not supported.
    """

    def __init__(self, text: str) -> None:
        try:
            from mlx_flash.server.grammar import json_grammar

            schema = None if text == "json" else json.loads(Path(text).read_bytes())
            self._grammar = json_grammar(schema, "--format")
        except ModuleNotFoundError as error:
            raise ConfigError("--format needs llguidance. Hint: pip install llguidance") from error
        except (FileNotFoundError, TypeError, json.JSONDecodeError) as error:
            raise ConfigError(f"--format {text}: {error}. Hint: json, or a file with a JSON schema.") from error

    def prepare(self, tokenizer: Any) -> None:
        """Take the memory for the vocabulary, before the plan counts that of the process."""
        from mlx_flash.server.grammar import grammar_tokenizer

        self._tokens = grammar_tokenizer(tokenizer, len(tokenizer))

    def processors(self) -> list[Any]:
        """Return the logits processors of one answer."""
        from mlx_flash.server.grammar import GrammarProcessor

        return [GrammarProcessor(self._tokens, self._grammar)]
