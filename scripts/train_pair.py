#!/usr/bin/env python3
"""Train two small Llama models, a target and its draft, on the text that comes with CPython.

    python scripts/train_pair.py --out DIR --minutes 8

The text is what the running Python's standard library holds under the PSF licence: the topics of ``help()``, docstrings
and sources. Files that name another licence or a copyright are left out. One file in sixteen is held out: its prose
measures the loss, and a part of it is written to ``DIR/heldout.txt``.

Both models share a byte-level BPE tokenizer and are saved in bf16, as mlx-lm loads them: ``DIR/target``, ``DIR/draft``.
Some training windows repeat a passage after the line "The same text again:", which teaches copying; larger models know
how to copy without that.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import random
import re
import sys
import sysconfig
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.llama import Model, ModelArgs

Tokens = np.ndarray[Any, Any]

END = "<|end|>"
AGAIN = "\n\nThe same text again:\n\n"
LEFT_OUT = {"site-packages", "dist-packages", "ensurepip", "lib2to3", "turtledemo", "encodings"}
OTHER_LICENCE = re.compile(r"copyright|licen[sc]e|SPDX", re.IGNORECASE)
HELD_OUT = 16
SHAPES = {
    "target": {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 704, "num_attention_heads": 4},
    "draft": {"hidden_size": 128, "num_hidden_layers": 3, "intermediate_size": 352, "num_attention_heads": 2},
}
HEAD_DIM = 64


# --- text


def read_text(library: Path) -> tuple[list[str], list[str], list[str]]:
    """Return prose and sources to train on, and the prose that is held out, from a standard library's folder."""
    prose: list[str] = []
    sources: list[str] = []
    held_out: list[str] = []
    for number, path in enumerate(sorted(library.rglob("*.py"))):
        if LEFT_OUT & set(path.relative_to(library).parts):
            continue
        text = path.read_bytes().decode(errors="replace")
        is_topics = path.name == "topics.py"
        if OTHER_LICENCE.search(text) and not is_topics:
            continue
        for place, document in enumerate(prose_of(text, is_topics)):
            is_held = (place if is_topics else number) % HELD_OUT == 7
            (held_out if is_held else prose).append(document)
        if number % HELD_OUT != 7 and not is_topics:
            sources.append(text)
    return prose, sources, held_out


def prose_of(source: str, is_topics: bool) -> Iterator[str]:
    """Yield the topics of ``help()`` in ``pydoc_data/topics.py``, or the docstrings of another file as one document."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # the library's tests hold files that are no Python
        return
    if is_topics:
        table = next(node for node in ast.walk(tree) if isinstance(node, ast.Dict))
        yield from ast.literal_eval(table).values()
        return
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    document = "\n\n".join(text for text in found if text and len(text) > 80)
    if document:
        yield document


def train_tokenizer(documents: list[str], size: int) -> Any:
    """Train a byte-level BPE tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END], initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def encode(tokenizer: Any, documents: list[str], seed: int) -> Tokens:
    """Return the tokens of documents in random order, with an end token after each."""
    shuffled = random.Random(seed).sample(documents, len(documents))
    encoded = tokenizer.encode_batch([text + END for text in shuffled])
    return np.concatenate([np.array(one.ids, np.int32) for one in encoded])


class Windows:
    """Random windows of the training text; a fifth of them repeat a passage."""

    def __init__(self, prose: Tokens, sources: Tokens, again: Tokens, args: argparse.Namespace) -> None:
        self._tokens, self._num_prose = np.concatenate([prose, sources]), len(prose)
        self._again, self._args = again, args
        self._random = np.random.default_rng(args.seed)

    def draw(self) -> mx.array:
        """Return a batch, ``(batch, context + 1)``: three tenths prose, the rest sources."""
        size, length = self._args.batch_size, self._args.context + 1
        prose = self._random.integers(0, max(1, self._num_prose - length), size)
        sources = self._random.integers(0, len(self._tokens) - length, size)
        starts = np.where(self._random.random(size) < 0.3, prose, sources)
        batch = self._tokens[starts[:, None] + np.arange(length)]
        for row in batch[: size // 5]:
            self._repeat(row)
        return mx.array(batch)

    def _repeat(self, row: Tokens) -> None:
        longest = (len(row) - len(self._again)) // 2
        passage = row[: self._random.integers(longest // 4, longest)].copy()
        repeated = np.concatenate([passage, self._again, passage])
        row[: len(repeated)] = repeated


# --- models


def config_of(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the config.json of one of the models."""
    heads = SHAPES[name]["num_attention_heads"]
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **SHAPES[name],
        "num_key_value_heads": heads // 2,
        "head_dim": HEAD_DIM,
        "vocab_size": args.vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": args.context,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": 0,
    }


def loss_of(model: Model, parameters: Any, batch: mx.array, dtype: mx.Dtype) -> mx.array:
    """Return the mean loss per token of a model that computes in a dtype."""
    model.update(tree_map(lambda parameter: parameter.astype(dtype), parameters))
    logits = model(batch[:, :-1]).astype(mx.float32)
    return nn.losses.cross_entropy(logits, batch[:, 1:], reduction="mean")


def train(name: str, windows: Windows, held_out: mx.array, minutes: float, args: argparse.Namespace) -> dict[str, Any]:
    """Train a model for some minutes; return its best parameters in bf16, by name."""
    config = config_of(name, args)
    model = Model(ModelArgs.from_dict(config))
    dtype = getattr(mx, args.dtype)
    optimizer = optim.AdamW(learning_rate=0.0, betas=[0.9, 0.95], weight_decay=0.1, bias_correction=True)
    state = {"parameters": model.trainable_parameters()}
    optimizer.init(state["parameters"])
    parts = [state, optimizer.state]

    def advance(batch: mx.array) -> mx.array:
        loss, gradients = mx.value_and_grad(lambda p: loss_of(model, p, batch, dtype))(state["parameters"])
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        state["parameters"] = optimizer.apply_gradients(gradients, state["parameters"])
        return loss

    step: Any = mx.compile(advance, inputs=parts, outputs=parts)
    test: Any = mx.compile(lambda p, batch: loss_of(model, p, batch, dtype))

    def measure() -> float:
        rows = [held_out[i : i + args.batch_size] for i in range(0, len(held_out), args.batch_size)]
        return sum(float(test(state["parameters"], row)) * len(row) for row in rows) / len(held_out)

    best, kept, number, shown, share = math.inf, state["parameters"], 0, 0.1, 0.0
    batch = windows.draw()
    began = time.monotonic()
    while share < 1:
        share = (time.monotonic() - began) / (60 * minutes)
        warm = min(1.0, (number + 1) / args.warmup)
        optimizer.learning_rate = (
            args.learning_rate * warm * (0.02 + 0.98 * (1 + math.cos(math.pi * min(1, share))) / 2)
        )
        loss = step(batch)
        mx.async_eval(loss, parts)
        batch = windows.draw()
        mx.eval(loss)
        number += 1
        if share >= shown or share >= 1:
            shown += 0.1
            found = measure()
            speed = number * args.batch_size * args.context / (time.monotonic() - began)
            print(
                f"{name} {share:4.0%} step {number} loss {loss.item():.3f} held out {found:.3f} ({speed:.0f} tokens/s)"
            )
            sys.stdout.flush()
            if found < best:
                best, kept = found, tree_map(mx.array, state["parameters"])
    print(f"{name}: {number} steps, held-out loss {best:.3f} a token", flush=True)
    return {key: value.astype(mx.bfloat16) for key, value in tree_flatten(kept)}


# --- files


def save(folder: Path, config: dict[str, Any], weights: dict[str, Any], tokenizer: Any) -> None:
    """Write a checkpoint that ``mlx_lm.load`` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8, help="of training; three quarters are the target's")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=200, help="steps in which the learning rate rises")
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        default="bfloat16",
        help="of the computation; on the CPU back end float32 is faster",
    )
    parser.add_argument("--library", type=Path, default=sysconfig.get_path("stdlib"), help="folder of the text")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Read the text, train both models, save them."""
    args = parse(arguments)
    mx.random.seed(args.seed)
    *documents, held_documents = read_text(args.library)
    tokenizer = train_tokenizer(list(chain(*documents)), args.vocab_size)
    prose, sources, held = (encode(tokenizer, part, args.seed) for part in (*documents, held_documents))
    rows = min(256, len(held) // (args.context + 1))
    held_out = mx.array(held[: rows * (args.context + 1)].reshape(rows, -1))
    print(f"{len(prose)} tokens of prose, {len(sources)} of sources, {len(held)} of prose held out", flush=True)
    windows = Windows(prose, sources, np.array(tokenizer.encode(AGAIN).ids, np.int32), args)
    for name, share in (("target", 0.75), ("draft", 0.25)):
        weights = train(name, windows, held_out, args.minutes * share, args)
        save(args.out / name, config_of(name, args), weights, tokenizer)
    (args.out / "heldout.txt").write_text("\n\n".join(text[:3000] for text in held_documents)[:60_000])
    return 0


if __name__ == "__main__":
    sys.exit(main())
