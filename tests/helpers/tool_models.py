"""Models of random weights whose chat templates have tool calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llguidance import LLMatcher

from mlx_flash.server.grammar import answer_grammar, grammar_tokenizer
from mlx_flash.server.request import GenerationRequest

TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
END = "{% endfor %}{% if m.tool_calls and not loop.last %}\n{% endif %}{% endfor %}"
QWEN = (
    TOOLS
    + "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
    + '{{ "" if loop.first else "\n" }}<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n'
    + "</tool_call>"
    + END
)
"""The form of Qwen's calls."""


def with_template(path: Path, template: str = QWEN, parser: str | None = "json_tools") -> Path:
    """Give a model a chat template, and mlx-lm's parser of its tool calls; None if it has none."""
    file = path / "tokenizer_config.json"
    settings = {**json.loads(file.read_text()), "chat_template": template, "tool_parser_type": parser}
    file.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
    (path / "chat_template.jinja").unlink(missing_ok=True)
    return path


def takes(tokenizer: Any, request: GenerationRequest, reasoning: Any, *texts: str) -> bool:
    """Return whether a complete answer of some texts is allowed."""
    made = grammar_tokenizer(tokenizer, len(tokenizer) + 10)
    matcher = LLMatcher(made, answer_grammar(request, tokenizer, reasoning), log_level=0)
    tokens = [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]
    return all(matcher.consume_token(token) for token in tokens) and bool(matcher.is_accepting())
