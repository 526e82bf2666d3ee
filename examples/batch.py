"""Answers several prompts at once: they share each pass over the weights.

python examples/batch.py --model DIR_OR_REPO --ram-budget-gb 2 "Why is the sky blue?" "And the sea?" "And grass green?"
"""

import argparse

import mlx_lm

import mlx_flash

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help="a model directory, or a Hugging Face repository")
parser.add_argument("--ram-budget-gb", type=mlx_flash.parse_budget, default="min", help="GB for the whole process")
parser.add_argument("--context-length", type=int, default=4096, help="tokens of all prompts and answers together")
parser.add_argument("--max-tokens", type=int, default=50)
parser.add_argument("prompts", nargs="+")
args = parser.parse_args()

config = mlx_flash.FlashConfig(ram_budget_gb=args.ram_budget_gb, context_length=args.context_length)
mlx_flash.apply_flash_patch(config)
model, tokenizer = mlx_lm.load(args.model)
prompts = [tokenizer.encode(prompt) for prompt in args.prompts]
for text in mlx_lm.batch_generate(model, tokenizer, prompts, max_tokens=args.max_tokens).texts:
    print(repr(text))
