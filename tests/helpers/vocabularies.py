"""Tokenizers of any size, made in a second, to see how much memory they take."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

BYTES = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
"""The letters of a byte-level tokenizer."""

_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def write_tokenizer(directory: Path, num_entries: int, special: tuple[str, ...] = ("<|end|>",)) -> Path:
    """Write a byte-level BPE tokenizer, as transformers saves it: each merge is a list of two entries.

    Special tokens come after the entries of the vocabulary.
    """
    words, merges = list(BYTES), []
    for at in count(len(BYTES)):
        if len(words) >= num_entries:
            break
        first, second = words[at // len(BYTES) - 1], BYTES[at % len(BYTES)]
        words.append(first + second)
        merges.append([first, second])
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False) | {"special": True}
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": num_entries + i, "content": word} | flags for i, word in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": _LEVEL,
        "post_processor": None,
        "decoder": _LEVEL,
        "model": {"type": "BPE", "vocab": {word: i for i, word in enumerate(words)}, "merges": merges},
    }
    (directory / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special[0]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
