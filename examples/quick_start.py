"""Generates text with mlx-lm. With --flash the model may be larger than memory; nothing else changes.

python examples/quick_start.py --model DIR_OR_REPO --prompt "Why is the sky blue?"
python examples/quick_start.py --model DIR_OR_REPO --prompt "Why is the sky blue?" --flash --ram-budget-gb 2
"""

import argparse

import mlx_lm

import mlx_flash

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help="a model directory, or a Hugging Face repository")
parser.add_argument("--prompt", default="Why is the sky blue?")
parser.add_argument("--max-tokens", type=int, default=100)
parser.add_argument("--flash", action="store_true", help="stream the weights that do not fit")
parser.add_argument("--ram-budget-gb", type=mlx_flash.parse_budget, help="GB for the whole process, or min")
args = parser.parse_args()

if args.flash:
    mlx_flash.apply_flash_patch(mlx_flash.FlashConfig(ram_budget_gb=args.ram_budget_gb))

model, tokenizer = mlx_lm.load(args.model)
prompt = args.prompt
if tokenizer.has_chat_template:
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
for response in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=args.max_tokens):
    print(response.text, end="", flush=True)
print()
