"""Streams the models that are loaded inside a block. Models that are loaded after it are mlx-lm's own, in memory.

python examples/context_manager.py --model DIR_OR_REPO
"""

import argparse

import mlx_lm

from mlx_flash import FlashConfig, apply_flash_patch

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help="a model directory, or a Hugging Face repository; it must fit")
parser.add_argument("--prompt", default="The sea is")
parser.add_argument("--max-tokens", type=int, default=20)
args = parser.parse_args()

with apply_flash_patch(FlashConfig(ram_budget_gb="min")):
    model, tokenizer = mlx_lm.load(args.model)
print("streamed:", mlx_lm.generate(model, tokenizer, args.prompt, max_tokens=args.max_tokens))
model.close()  # frees files and slots now, not when Python's collector runs

model, tokenizer = mlx_lm.load(args.model)
print("resident:", mlx_lm.generate(model, tokenizer, args.prompt, max_tokens=args.max_tokens))
