"""Answers questions about a long document. Keys and values that the budget does not hold are in files.

python examples/long_document.py --model DIR_OR_REPO --ram-budget-gb 2 BOOK.txt "Who tells the story?" "Where?"
"""

import argparse
from pathlib import Path

from mlx_lm.models.cache import make_prompt_cache

import mlx_flash

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help="a model directory, or a Hugging Face repository")
parser.add_argument("--ram-budget-gb", type=mlx_flash.parse_budget, default="min", help="GB for the whole process")
parser.add_argument("--context-length", type=int, default=32768, help="tokens of the document, questions and answers")
parser.add_argument("--max-tokens", type=int, default=100, help="of each answer")
parser.add_argument("document", type=Path)
parser.add_argument("questions", nargs="+")
args = parser.parse_args()

sizes = {"ram_budget_gb": args.ram_budget_gb, "context_length": args.context_length}
config = mlx_flash.FlashConfig(**sizes, kv_cache="disk")
model, tokenizer = mlx_flash.load(args.model, config)
prompt_cache = make_prompt_cache(model)
text = args.document.read_text()
for question in args.questions:
    prompt = f"{text}\n\nQuestion: {question}\nAnswer:"
    steps = mlx_flash.stream_generate(model, tokenizer, prompt, max_tokens=args.max_tokens, prompt_cache=prompt_cache)
    for response in steps:
        print(response.text, end="", flush=True)
    print()
    text = ""  # the document and what followed it are in the prompt cache
