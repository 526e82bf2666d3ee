"""Ranks text files by their mean log-likelihood per token, the likeliest first.

python examples/judge.py --model DIR_OR_REPO --ram-budget-gb 2 one.txt two.txt three.txt
"""

import argparse
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

import mlx_flash

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help="a model directory, or a Hugging Face repository")
parser.add_argument("--ram-budget-gb", type=mlx_flash.parse_budget, default="min", help="GB for the whole process")
parser.add_argument("--tokens", type=int, default=256, help="of each file, from its beginning")
parser.add_argument("files", nargs="+", type=Path)
args = parser.parse_args()

num_tokens = args.tokens * len(args.files)
config = mlx_flash.FlashConfig(
    ram_budget_gb=args.ram_budget_gb, context_length=num_tokens, prefill_step_size=num_tokens
)
model, tokenizer = mlx_flash.load(args.model, config)
texts = [tokenizer.encode(file.read_text())[: args.tokens] for file in args.files]
longest = max(len(tokens) for tokens in texts)
# One call reads the weights once for all files. Padding on the right does not change the logits before it.
logits = model(mx.array([tokens + [0] * (longest - len(tokens)) for tokens in texts])).astype(mx.float32)
found = {}
for file, tokens, own in zip(args.files, texts, logits, strict=True):
    losses = nn.losses.cross_entropy(own[: len(tokens) - 1], mx.array(tokens[1:]))
    found[file] = -losses.mean().item()
for file in sorted(found, key=lambda file: -found[file]):
    print(f"{found[file]:8.4f} {file}")
