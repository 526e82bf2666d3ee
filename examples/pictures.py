"""Answers a question about pictures, with a model of mlx-vlm that may be larger than memory.

python examples/pictures.py --model DIR_OR_REPO --ram-budget-gb 4 --prompt "What is in the picture?" picture.png
"""

import argparse

from mlx_vlm import generate
from mlx_vlm.prompt_utils import apply_chat_template

import mlx_flash

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help="a model directory, or a Hugging Face repository")
parser.add_argument("--ram-budget-gb", type=mlx_flash.parse_budget, default="min", help="GB for the whole process")
parser.add_argument("--prompt", default="What is in the picture?")
parser.add_argument("--max-tokens", type=int, default=100)
parser.add_argument("pictures", nargs="+")
args = parser.parse_args()

model, processor = mlx_flash.load_vlm(args.model, mlx_flash.FlashConfig(ram_budget_gb=args.ram_budget_gb))
prompt = apply_chat_template(processor, model.config, args.prompt, num_images=len(args.pictures))
print(generate(model, processor, prompt, image=args.pictures, max_tokens=args.max_tokens).text)
model.close()
