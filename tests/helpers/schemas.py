"""Hypothesis strategies of the JSON values that a pydantic model describes with its JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st
from pydantic import BaseModel

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
TEXT = st.text(max_size=8) | st.sampled_from(["\ud800", "\x00", "<tool_call>", "</tool_call>", "é🦊", "\u202e"])
"""Texts with lone surrogates, marks of tool calls, and what else may go wrong."""


def bodies(kind: type[BaseModel], fixed: Mapping[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Return a strategy of requests.

    Args:
        kind: the model.
        fixed: strategies of fields by name, wherever they are.
    """
    schema = kind.model_json_schema(by_alias=True)
    return _Values(schema.get("$defs", {}), fixed).of(schema)


class _Values:
    def __init__(self, definitions: Mapping[str, Any], fixed: Mapping[str, st.SearchStrategy[Any]]) -> None:
        self._definitions, self._fixed = definitions, fixed
        self._found: dict[str, st.SearchStrategy[Any]] = {}

    def of(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            if name not in self._found:  # definitions may refer to themselves
                self._found[name] = st.deferred(lambda: self.of(self._definitions[name]))
            return self._found[name]
        if "const" in schema:
            return st.just(schema["const"])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        for word in ("anyOf", "oneOf"):
            if word in schema:
                return st.one_of(*map(self.of, schema[word]))
        found = getattr(self, f"_{schema['type']}", None) if "type" in schema else None
        return JSON if found is None else found(schema)

    def _null(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        return st.none()

    def _boolean(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        return st.booleans()

    def _integer(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        least, most = schema.get("minimum"), schema.get("maximum")
        most = schema["exclusiveMaximum"] - 1 if "exclusiveMaximum" in schema else most
        return st.integers(least, most)

    def _number(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        return st.floats(schema.get("minimum"), schema.get("maximum"), allow_nan=False, allow_infinity=False)

    def _string(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        if "pattern" in schema:
            return st.from_regex(schema["pattern"], fullmatch=True)
        return TEXT.filter(lambda text: len(text) >= schema.get("minLength", 0))

    def _array(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        most = min(schema.get("maxItems", 2), max(2, schema.get("minItems", 0)))
        return st.lists(self.of(schema.get("items", {})), min_size=schema.get("minItems", 0), max_size=most)

    def _object(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        if "properties" not in schema:
            more = schema.get("additionalProperties")
            keys = self.of(schema["propertyNames"]) if "propertyNames" in schema else st.text(max_size=4)
            return st.dictionaries(keys, self.of(more) if isinstance(more, dict) else JSON, max_size=2)
        fields = {
            name: self._fixed[name] if name in self._fixed else self.of(part)
            for name, part in schema["properties"].items()
        }
        required = {name: fields.pop(name) for name in schema.get("required", ())}
        return st.fixed_dictionaries(required, optional=fields)
