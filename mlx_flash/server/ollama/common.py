"""Parts of Ollama's dialect that several of its requests share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from mlx_flash.errors import RefusedError
from mlx_flash.server.body import error_text
from mlx_flash.server.catalog import LATEST
from mlx_flash.server.events import End, TokenChance, TokenDetail


def error_body(error: RefusedError) -> dict[str, Any]:
    """Return an error as Ollama's clients read it."""
    return {"error": error_text(error)}


def line(value: Mapping[str, Any]) -> bytes:
    """Return a part of a stream."""
    return f"{json.dumps(value, ensure_ascii=False)}\n".encode("utf-8", "replace")


def now() -> str:
    """Return the time as replies have it."""
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")


def tagged(name: str) -> str:
    """Return a name as Ollama lists it: with a tag."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def counts_of(end: End, total_ns: int) -> dict[str, Any]:
    """Return numbers of tokens, and durations in nanoseconds.

    Args:
        end: the end of the answer.
        total_ns: time since the request came.
    """
    load, prompt, answer = (
        round(seconds * 1e9) for seconds in (end.load_seconds, end.prompt_seconds, end.answer_seconds)
    )
    return {
        "total_duration": total_ns,
        "load_duration": load,
        "prompt_eval_count": end.num_prompt,
        "prompt_eval_cached_count": end.num_cached,
        "prompt_eval_duration": prompt,
        "eval_count": end.num_tokens,
        "eval_duration": answer,
    }


def logprob_of(token: TokenDetail) -> dict[str, Any]:
    """Return the probabilities of a token as a client reads them."""

    def shown(chance: TokenChance) -> dict[str, Any]:
        return {
            "token": chance.text,
            "logprob": chance.logprob,
            "bytes": list(chance.text.encode("utf-8", "replace")),
        }

    return {**shown(token.chosen), "top_logprobs": [shown(chance) for chance in token.likeliest]}
