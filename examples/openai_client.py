"""Sends a message to a running server, with the openai package (pip install openai).

mlx-flash serve --model DIR_OR_REPO --ram-budget-gb 4
python examples/openai_client.py "Why is the sky blue?"
"""

import argparse

import openai

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("prompt")
parser.add_argument("--port", type=int, default=8080)
parser.add_argument("--max-tokens", type=int, default=100)
args = parser.parse_args()

client = openai.OpenAI(base_url=f"http://127.0.0.1:{args.port}/v1", api_key="not needed", max_retries=0)
stream = client.chat.completions.create(
    model="default_model",  # the first model of the server
    messages=[{"role": "user", "content": args.prompt}],
    max_tokens=args.max_tokens,
    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
