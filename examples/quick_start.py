"""Generates text with a model larger than memory: mlx-lm's own functions, on a model that is streamed.

python examples/quick_start.py --model DIR_OR_REPO --ram-budget-gb 2 --prompt "Why is the sky blue?"
"""

from __future__ import annotations

import argparse

import mlx_lm

import mlx_flash


def main() -> None:
    """Parses the arguments, loads, streams the text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a model directory, or a Hugging Face repository")
    parser.add_argument("--ram-budget-gb", default="min", help="a number of GB for the whole process, or 'min'")
    parser.add_argument("--prompt", default="Why is the sky blue?")
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()

    config = mlx_flash.FlashConfig(ram_budget_gb=mlx_flash.parse_budget(args.ram_budget_gb))
    model, tokenizer = mlx_flash.load(args.model, config)
    with model:
        messages = [{"role": "user", "content": args.prompt}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        options = {"max_tokens": args.max_tokens, "prefill_step_size": model.plan.prefill_step_size}
        for response in mlx_lm.stream_generate(model, tokenizer, prompt, **options):
            print(response.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
