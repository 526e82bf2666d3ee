"""Train a head for multi-token prediction beside the model of ``examples/pair``, to see how often it is right.

    python benchmarks/train_head.py OUT --minutes 3
    python scripts/grow_model.py examples/pair/target LLAMA --layers 160
    python benchmarks/train_head.py LARGE --model LLAMA --head OUT

OUT is the same model as a MiMo checkpoint, which may have a head. mlx-lm's MiMo is a Llama whose attention has biases;
they are zero here. The model stays as it is; only the head learns, on sources of the running Python's standard library
that name no licence of their own. Files that the model did not see are held out (every sixteenth). Printed is how many
of the head's guesses are the model's own next tokens there: of the first guess, and of the second and third, which go
on from the head's own states. With ``--head`` nothing is trained: a model that ``grow_model.py`` has made larger gets
the head of the small one, whose hidden states it computes bit for bit.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sysconfig
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import mimo

PAIR = Path(__file__).parents[1] / "examples" / "pair" / "target"
OTHER_LICENCE = re.compile(r"copyright|licen[sc]e|SPDX", re.IGNORECASE)
HELD_OUT, NUM_GUESSES = 16, 3
WEIGHTS = (1.0, 0.5, 0.25)
"""Of the losses of the first, second and third guess."""
PREFIX = "model.mtp_layers.0."
"""Begins the names of a head's weights."""


class Head(nn.Module):
    """A layer between a projection and a norm, as MiMo has it: the hidden state, then the embedding."""

    def __init__(self, args: mimo.ModelArgs) -> None:
        super().__init__()
        dims = args.hidden_size
        self.hidden_layernorm, self.token_layernorm, self.final_layernorm = (nn.RMSNorm(dims, 1e-5) for _ in range(3))
        self.input_proj = nn.Linear(2 * dims, dims, bias=False)
        block = mimo.TransformerBlock(args)
        self.self_attn, self.mlp = block.self_attn, block.mlp
        self.input_layernorm, self.post_attention_layernorm = block.input_layernorm, block.post_attention_layernorm

    def __call__(self, states: mx.array, embedded: mx.array) -> mx.array:
        """Return hidden states of the next tokens, ``(batch, length, dimensions)``, as are both arguments."""
        x = self.input_proj(mx.concatenate([self.hidden_layernorm(states), self.token_layernorm(embedded)], axis=-1))
        x = x + self.self_attn(self.input_layernorm(x), "causal", None)
        return self.final_layernorm(x + self.mlp(self.post_attention_layernorm(x)))


def read_text(is_held: bool) -> list[str]:
    """Return sources of the standard library: those that the model was trained on, or those that it was not."""
    paths = enumerate(sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")))
    chosen = [path for number, path in paths if (number % HELD_OUT == 7) == is_held and "-packages" not in str(path)]
    texts = [path.read_text(errors="replace") for path in chosen]
    return [text for text in texts if not OTHER_LICENCE.search(text)]


def encode(tokenizer: Any, texts: list[str]) -> Any:
    """Return the tokens of all texts in a row."""
    return np.concatenate([np.array(tokenizer.encode(text), np.int32) for text in texts])


def guesses(head: Head, model: Any, tokens: mx.array) -> list[mx.array]:
    """Return the logits of the first guess for each place of texts ``(batch, length)``, of the second, and so on.

    What is made for place ``i`` of guess ``k`` stands for token ``i + 2 + k``.
    """
    states, found = mx.stop_gradient(model.model(tokens)), []
    for k in range(NUM_GUESSES):
        states = head(states[:, : tokens.shape[1] - 1 - k], model.model.embed_tokens(tokens[:, 1 + k :]))
        found.append(model.model.embed_tokens.as_linear(states))
    return found


def loss_of(head: Head, model: Any, tokens: mx.array) -> mx.array:
    """Return the weighted loss of all guesses a token."""
    losses = [
        nn.losses.cross_entropy(logits[:, :-1].astype(mx.float32), tokens[:, 2 + k :], reduction="mean")
        for k, logits in enumerate(guesses(head, model, tokens))
    ]
    return sum((weight * loss for weight, loss in zip(WEIGHTS, losses, strict=True)), mx.array(0.0))


def shares(head: Head, model: Any, tokens: mx.array) -> list[float]:
    """Return the share of each guess that is the model's most probable next token."""
    own = mx.argmax(model(tokens), axis=-1)
    found = enumerate(guesses(head, model, tokens))
    return [(mx.argmax(logits, axis=-1) == own[:, 1 + k :]).mean().item() for k, logits in found]


def convert(llama: Path, out: Path, head: dict[str, Any]) -> None:
    """Write a Llama as a MiMo checkpoint, with the weights of a head."""
    config = json.loads((llama / "config.json").read_text())
    weights: dict[str, Any] = {}
    for file in llama.glob("*.safetensors"):
        weights |= dict(mx.load(str(file)))
    for name in [name for name in weights if re.search(r"[qkv]_proj\.weight", name)]:
        weights[name.replace("weight", "bias")] = mx.zeros(weights[name].shape[0], weights[name].dtype)
    out.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(out / "model.safetensors"), weights | head, {"format": "mlx"})
    config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(llama / name, out)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Return the weights of a head, trained beside the model in ``args.out``."""
    model, tokenizer = mlx_lm.load(str(args.out))
    model.freeze()
    seen, held = (encode(tokenizer, read_text(is_held)) for is_held in (False, True))
    held = mx.array(held[: len(held) // args.context * args.context].reshape(-1, args.context)[: args.batch_size])
    head, random = Head(model.args), np.random.default_rng(0)
    head.update({**model.layers[-1].parameters(), "final_layernorm": model.model.norm.parameters()})
    head.set_dtype(mx.float32)
    optimizer = optim.AdamW(learning_rate=0.0, betas=[0.9, 0.95], weight_decay=0.1)
    state = [head.state, optimizer.state]
    value_and_grad = nn.value_and_grad(head, lambda tokens: loss_of(head, model, tokens))

    def advance(tokens: mx.array) -> mx.array:
        loss, gradients = value_and_grad(tokens)
        optimizer.update(head, optim.clip_grad_norm(gradients, 1.0)[0])
        return loss

    step = mx.compile(advance, inputs=state, outputs=state)
    began, number, shown, share = time.monotonic(), 0, 0.0, 0.0
    while share < 1:
        share = (time.monotonic() - began) / (60 * args.minutes)
        warm = min(1.0, (number + 1) / 100)
        optimizer.learning_rate = mx.array(args.learning_rate * warm * (0.02 + 0.98 * (1 + np.cos(np.pi * share)) / 2))
        starts = random.integers(0, len(seen) - args.context, args.batch_size)
        loss = step(mx.array(seen[starts[:, None] + np.arange(args.context)]))
        mx.eval(loss, state)
        number += 1
        if share >= shown:
            shown += 0.1
            right = ", ".join(f"{each:.3f}" for each in shares(head, model, held))
            print(f"{share:4.0%} step {number} loss {loss.item():.3f}, right {right}", flush=True)
    return {f"{PREFIX}{name}": value.astype(mx.bfloat16) for name, value in tree_flatten(head.parameters())}


def main() -> None:
    """Read the arguments, train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, default=PAIR, help="a Llama (default: that of examples/pair)")
    parser.add_argument("--head", type=Path, help="take the head of this checkpoint instead of training one")
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    args = parser.parse_args()
    if args.head is None:
        convert(args.model, args.out, {})
        head = train(args)
    else:
        found: Any = mx.load(str(args.head / "model.safetensors"))
        head = {name: array for name, array in found.items() if name.startswith(PREFIX)}
    convert(args.model, args.out, head)


if __name__ == "__main__":
    main()
