"""Applies a LoRA or DoRA adapter to a streamed model. The adapter's weights stay in memory; the layers are streamed.

python examples/adapter.py --model DIR_OR_REPO --adapter-path ADAPTER --ram-budget-gb 2
"""

import argparse

import mlx_lm

import mlx_flash

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help="a model directory, or a Hugging Face repository")
parser.add_argument("--adapter-path", required=True, help="folder with the adapters.safetensors of mlx_lm.lora")
parser.add_argument("--ram-budget-gb", type=mlx_flash.parse_budget, default="min", help="GB for the whole process")
parser.add_argument("--prompt", default="Tell me about the sea.")
parser.add_argument("--max-tokens", type=int, default=50)
args = parser.parse_args()

mlx_flash.apply_flash_patch(mlx_flash.FlashConfig(ram_budget_gb=args.ram_budget_gb))
model, tokenizer = mlx_lm.load(args.model, adapter_path=args.adapter_path)
print(mlx_lm.generate(model, tokenizer, args.prompt, max_tokens=args.max_tokens))
