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

from mlx_flash.server import loaded
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
    """Let every answer have this text.

    Args:
        text: the text, without the token that ends it.
        prompts: takes the texts of the prompts.
    """

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
    """Let every answer have this text as long as it may, and go on as the model likes best.

    Args:
        tokenizer: of the model.
        text: the text. With the answer's end, the model ends it if it may.
    """
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
