"""Tokenizers whose tokens are texts, with chat templates in the forms of many models, and answers in these forms."""

from __future__ import annotations

import importlib
import json
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from mlx_flash.server.text import complete

FUNCTIONS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("weather", "find_all")
]
_TURN = "{%- for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}<|assistant|>"
_CALLS = _TURN + "{{ m.content }}{% for c in m.tool_calls or [] %}{% set f = c.function %}"
_END = "{% endfor %}<|eos|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
_BAR = "\uff5c"

TEMPLATES = {
    "harmony": _TOOLS
    + "{%- for m in messages %}<|start|>{{ m.role }}{% if m.role == 'user' %}<|message|>{{ m.content }}<|end|>"
    + "{% else %}{% if m.content %}<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    + "{% for c in m.tool_calls or [] %}<|channel|>analysis<|message|>I call.<|end|><|start|>assistant"
    + " to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>{{ c.function.arguments | tojson }}"
    + _END.replace("<|assistant|>", "<|start|>assistant"),
    "deepseek 3": _TOOLS
    + _CALLS
    + f"{{% if loop.first %}}<{_BAR}tool▁calls▁begin{_BAR}>{{% endif %}}<{_BAR}tool▁call▁begin{_BAR}>"
    + f"function<{_BAR}tool▁sep{_BAR}>"
    + "{{ f.name + '\n```json\n' + f.arguments + '\n```' }}"
    + f"<{_BAR}tool▁call▁end{_BAR}>"
    + f"{{% if loop.last %}}<{_BAR}tool▁calls▁end{_BAR}>{{% endif %}}"
    + _END,
    "deepseek 3.1": _TOOLS
    + _CALLS
    + f"{{% if loop.first %}}<{_BAR}tool▁calls▁begin{_BAR}>{{% endif %}}<{_BAR}tool▁call▁begin{_BAR}>"
    + f"{{{{ f.name }}}}<{_BAR}tool▁sep{_BAR}>{{{{ f.arguments | tojson }}}}<{_BAR}tool▁call▁end{_BAR}>"
    + f"{{% if loop.last %}}<{_BAR}tool▁calls▁end{_BAR}>{{% endif %}}"
    + _END,
    "llama": _TOOLS + _CALLS + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}' + _END,
    "functionary 3.1": _TOOLS + _CALLS + "<function={{ f.name }}>{{ f.arguments | tojson }}</function>" + _END,
    "own marks": _TOOLS
    + _CALLS
    + "{{ '<CALLS>[' if loop.first else ', ' }}"
    + '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}{{ "]</CALLS>" if loop.last }}'
    + _END,
}
"""Templates whose calls mlx-lm does not parse."""

_ONE = "{% if not loop.first %}{{ raise_exception('one call') }}{% endif %}"
LLAMA = TEMPLATES["llama"].replace('{"name"', _ONE + '{"name"')
"""Llama 3's, with one call in an answer, as JSON without a mark."""

STOCK = {
    "json_tools": '<tool_call>\n{"name": "NAME", "arguments": JSON}\n</tool_call>',
    "mistral": "[TOOL_CALLS]NAME[ARGS]JSON",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>JSON"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "glm47": "<tool_call>NAME\nELEMENTS</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=NAME>\nELEMENTS</function>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="NAME">\nELEMENTS</invoke>\n</minimax:tool_call>',
}
"""Calls that mlx-lm's parsers read."""

ELEMENTS = {
    "glm47": "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
    "qwen3_coder": "<parameter=KEY>\nVALUE\n</parameter>\n",
    "minimax_m2": '<parameter name="KEY">VALUE</parameter>\n',
}


class Texts:
    """A detokenizer whose tokens are texts."""

    last_segment = ""

    def reset(self) -> None:
        self.last_segment = ""

    def add_token(self, text: Any) -> None:
        self.last_segment = text

    def finalize(self) -> None:
        self.last_segment = ""


def tokenizer_of(template: str, parser: str | None = None) -> Any:
    """Return a tokenizer as a server has it, with mlx-lm's parser of its calls."""
    inner = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<|eos|>": 0}, "<|eos|>")), eos_token="<|eos|>"
    )
    inner.chat_template = template
    more = {}
    if parser is not None:
        module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
        more = {"tool_parser": module.parse_tool_call}
        more |= {name: getattr(module, name) for name in ("tool_call_start", "tool_call_end")}
    found = TokenizerWrapper(inner, lambda _: Texts(), **more)
    complete(found)
    return found


def rendered(tokenizer: Any, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Return an answer with some calls as the template renders it."""
    user = {"role": "user", "content": "Hi"}
    asked = [
        {"id": f"call0000{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    messages = [user, {"role": "assistant", "content": "", "tool_calls": asked}]
    render: Any = tokenizer.apply_chat_template
    prompt = render([user], tools=FUNCTIONS, tokenize=False, add_generation_prompt=True)
    whole = render(messages, tools=FUNCTIONS, tokenize=False, add_generation_prompt=False)
    assert whole.startswith(prompt)
    return str(whole.removeprefix(prompt).removesuffix("<|eos|>"))


def stock_answer(parser: str, name: str, arguments: dict[str, str]) -> str:
    """Return an answer with a call in a form that a parser of mlx-lm reads."""
    element = ELEMENTS.get(parser, "")
    elements = "".join(element.replace("KEY", key).replace("VALUE", value) for key, value in arguments.items())
    text = STOCK[parser].replace("NAME", name).replace("ELEMENTS", elements)
    return text.replace("JSON", json.dumps(arguments, ensure_ascii=False))
