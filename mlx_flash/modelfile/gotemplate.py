"""Prompt templates of Modelfiles as Jinja chat templates.

Ollama's templates are Go's. Text, ``{{ .System }}``, ``{{ .Prompt }}``, ``{{ .Response }}``, and ``{{ if }}`` of these
are translated. A template describes one turn of a conversation. The model answers the part before ``.Response``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_ACTION = re.compile(r"\{\{(?P<trim_left>-\s)?(?P<action>.*?)(?P<trim_right>\s-)?\}\}", re.DOTALL)
_GO_SPACE = " \t\r\n"
_VALUES = {f".{name}": name.lower() for name in ("System", "Prompt", "Response")}

_JINJA_MARK = re.compile(r"\{%|\{\{[^{}]*(?<![.\w])messages\b")

_MACRO = "{{%- macro {name}(system, prompt, response) -%}}{body}{{%- endmacro -%}}\n"
_CONVERSATION = r"""
{%- set now = namespace(role='', system='', prompt='', response='') -%}
{%- set text -%}
{%- for message in messages -%}
  {%- set role, content = message['role'], message['content'] -%}
  {%- if role not in ['system', 'user', 'assistant'] or content is not string -%}
    {{- raise_exception('the Modelfile\'s template knows texts of system, user and assistant only') -}}
  {%- endif -%}
  {%- if role != now.role and (now.role == 'assistant' or (now.role == 'user' and role == 'system')) -%}
    {{- turn(now.system, now.prompt, now.response) -}}
    {%- set now.system = '' -%}{%- set now.prompt = '' -%}{%- set now.response = '' -%}
  {%- endif -%}
  {%- if role == 'system' -%}
    {%- set now.system = now.system ~ '\n\n' ~ content if now.role == role else content -%}
  {%- elif role == 'user' -%}
    {%- set now.prompt = now.prompt ~ '\n\n' ~ content if now.role == role else content -%}
  {%- else -%}
    {%- set now.response = now.response ~ '\n\n' ~ content if now.role == role else content -%}
  {%- endif -%}
  {%- set now.role = role -%}
{%- endfor -%}
{%- if now.role == 'assistant' -%}
  {{- turn(now.system, now.prompt, now.response) -}}
  {%- if add_generation_prompt -%}{{- to_answer('', '') -}}{%- endif -%}
{%- elif add_generation_prompt -%}
  {{- to_answer(now.system, now.prompt) -}}
{%- elif now.role -%}
  {{- asked(now.system, now.prompt) -}}
{%- endif -%}
{%- endset -%}
{{- bos_token if bos_token is defined and bos_token and not text.startswith(bos_token) else '' -}}
{{- text -}}"""
"""As in Ollama, messages of one role in a row are one message, and a turn ends with its answer."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A part of a template that cannot be translated: its offset in the template, and the reason."""

    offset: int
    reason: str


def to_jinja(text: str) -> str | Obstacle:
    """Return the Jinja chat template of a Modelfile's template. Jinja is returned as it is.

    The translation takes ``messages`` and ``add_generation_prompt``. Without the latter, an unanswered question ends
    after its part of the template. The tokenizer's ``bos_token`` comes first.
    """
    if _JINJA_MARK.search(text):
        return text
    translation = _Translation()
    for piece in _pieces(text):
        if reason := translation.add(piece):
            return Obstacle(piece.offset, reason)
    return translation.finish()


@dataclass(frozen=True, slots=True)
class _Piece:
    """Text, or the inside of an action with single blanks."""

    offset: int
    is_action: bool
    content: str


def _pieces(text: str) -> Iterator[_Piece]:
    """Yield the texts and actions of a template, trimmed at dashes, without comments."""
    start, trim = 0, False
    for found in _ACTION.finditer(text):
        literal = text[start : found.start()]
        literal = literal.lstrip(_GO_SPACE) if trim else literal
        literal = literal.rstrip(_GO_SPACE) if found["trim_left"] else literal
        yield _Piece(start, False, literal)
        action = " ".join(found["action"].split())
        if not (action.startswith("/*") and action.endswith("*/")):
            yield _Piece(found.start(), True, action)
        start, trim = found.end(), bool(found["trim_right"])
    rest = text[start:].lstrip(_GO_SPACE) if trim else text[start:]
    at = rest.find("{{")
    yield _Piece(start, False, rest if at < 0 else rest[:at])
    if at >= 0:
        yield _Piece(text.index("{{", start), True, rest[at:])


class _Translation:
    """Jinja code for one turn, made piece by piece."""

    def __init__(self) -> None:
        self._code: list[str] = []
        self._open: list[tuple[int, bool]] = []  # of each `if`: its offset, and whether its `else` was seen
        self._has_prompt = False
        self._asked_end = 0
        self._answer: int | None = None

    def add(self, piece: _Piece) -> str | None:
        """Add a piece. Return the reason when it cannot be translated."""
        action = piece.content
        if not piece.is_action:
            self._code += ["{{ " + ascii(action) + " }}"] if action else []
            return None
        reason = self._add_value(action) if action in _VALUES else self._add_branch(action, piece.offset)
        if self._has_prompt and not self._open and self._answer is None:
            self._asked_end, self._has_prompt = len(self._code), False
        return reason

    def _add_value(self, action: str) -> str | None:
        if action == ".Response":
            if self._open or self._answer is not None:
                return "{{ .Response }} stands in an if" if self._open else "{{ .Response }} stands there twice"
            self._answer = len(self._code)
        self._has_prompt = self._has_prompt or action == ".Prompt"
        self._code.append("{{ " + _VALUES[action] + " }}")
        return None

    def _add_branch(self, action: str, offset: int) -> str | None:
        words = action.split()
        is_known = words in (["else"], ["end"]) or (words[:-1] in (["if"], ["else", "if"]) and words[-1] in _VALUES)
        if not is_known:
            return f"{{{{ {action[:40]} }}}} is not translated"
        if words[0] == "if":
            self._open.append((offset, False))
            self._code.append(f"{{% if {_VALUES[words[1]]} %}}")
            return None
        if not self._open or (words[0] == "else" and self._open[-1][1]):
            return f"{{{{ {action} }}}} has no if"
        start, _ = self._open.pop()
        if words == ["end"]:
            self._code.append("{% endif %}")
            return None
        self._open.append((start, words == ["else"]))
        self._code.append("{% else %}" if words == ["else"] else f"{{% elif {_VALUES[words[2]]} %}}")
        return None

    def finish(self) -> str | Obstacle:
        """Return the chat template."""
        if self._open:
            return Obstacle(self._open[-1][0], "an if has no {{ end }}")
        if not self._asked_end:
            return Obstacle(0, "there is no {{ .Prompt }} before the {{ .Response }}")
        if self._answer is None:
            self._answer = len(self._code)
            self._code.append("{{ response }}")
        bodies = {"turn": None, "to_answer": self._answer, "asked": self._asked_end}
        macros = [_MACRO.format(name=name, body="".join(self._code[:end])) for name, end in bodies.items()]
        return "".join(macros) + _CONVERSATION.lstrip("\n")
