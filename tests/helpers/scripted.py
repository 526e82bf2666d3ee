"""A model whose chat template has tools and reasoning, and answers that a test writes."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from llguidance import LLMatcher

from mlx_flash.server import loaded
from mlx_flash.server.grammar import answer_grammar, grammar_tokenizer
from mlx_flash.server.request import GenerationRequest
from models import make_random_model

SHAPE = "--layers 2 --hidden-size 64 --intermediate-size 128 --heads 4 --kv-heads 2 --vocab-size 1000"

TEMPLATE = """
{%- if tools %}Tools: {{ tools | tojson }}
{% endif %}
{%- for message in messages %}
{{- '<|' + message.role + '|>' }}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{%- set tool_call = call.function %}
<tool_call>{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}</tool_call>
{%- endfor %}
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{%- if enable_thinking is defined and not enable_thinking %}-{% endif %}
{%- endif %}
"""


def make_scripted_model(folder: Path) -> Path:
    """Save a random model whose template knows tools and reasoning."""
    make_random_model(folder, *SHAPE.split())
    path = folder / "tokenizer.json"
    fields = json.loads(path.read_text())
    for mark, merge in (("</think>", fields["model"]["merges"].pop()), ("<think>", fields["model"]["merges"].pop())):
        number = fields["model"]["vocab"].pop("".join(merge))
        fields["added_tokens"].append({**fields["added_tokens"][0], "id": number, "content": mark, "special": False})
    path.write_text(json.dumps(fields))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    return folder


@contextlib.contextmanager
def saying(text: str, prompts: list[str] | None = None) -> Iterator[None]:
    """Let every answer have this text, and its end. ``prompts`` takes the texts of the prompts."""

    def sampler_of(sampling: Any, tokenizer: Any, vocab_size: int) -> Any:
        tokens = iter([*tokenizer.encode(text, add_special_tokens=False), *sorted(tokenizer.eos_token_ids)])
        return lambda logprobs: mx.array([next(tokens)])

    make_prompt = loaded.make_prompt

    def noted(request: Any, tokenizer: Any, *rest: Any) -> Any:
        found = make_prompt(request, tokenizer, *rest)
        if prompts is not None:
            prompts.append(tokenizer.decode(found.tokens))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaded, "sampler_of", sampler_of)
        patch.setattr(loaded, "make_prompt", noted)
        yield


@contextlib.contextmanager
def wishing(tokenizer: Any, text: str) -> Iterator[None]:
    """Let every answer have this text, and its end, as long as it may, and go on as the model likes best."""
    tokens = [*tokenizer.encode(text, add_special_tokens=False), *sorted(tokenizer.eos_token_ids)]

    def sampler_of(*_: Any) -> Any:
        left = list(tokens)

        def choose(logprobs: mx.array) -> mx.array:
            if left and logprobs[0, left[0]].item() > -math.inf:
                return mx.array([left.pop(0)])
            left.clear()
            return mx.argmax(logprobs, axis=-1)

        return choose

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaded, "sampler_of", sampler_of)
        yield


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
