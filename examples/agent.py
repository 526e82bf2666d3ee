"""Lets a model of a running server work with files of a folder: it lists and reads them until it has an answer.

mlx-flash serve --model DIR_OR_REPO --ram-budget-gb 4
python examples/agent.py --folder docs "Which page explains budgets?"
"""

import argparse
import json
from pathlib import Path

import openai

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("task")
parser.add_argument("--folder", type=Path, default=Path())
parser.add_argument("--port", type=int, default=8080)
parser.add_argument("--max-turns", type=int, default=10)
args = parser.parse_args()


def use(name: str, arguments: str) -> str:
    """Return the result of a tool. A mistake of the model is a result, too: it can try again."""
    files = {path.name: path for path in args.folder.iterdir() if path.is_file()}
    if name == "list_files":
        return "\n".join(sorted(files))
    file = json.loads(arguments).get("name")
    return files[file].read_text(errors="replace")[:4000] if file in files else f"there is no file {file}"


file_name = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
functions = {"list_files": {"type": "object", "properties": {}}, "read_file": file_name}
tools = [{"type": "function", "function": {"name": name, "parameters": form}} for name, form in functions.items()]
client = openai.OpenAI(base_url=f"http://127.0.0.1:{args.port}/v1", api_key="not needed", max_retries=0, timeout=3600)
messages = [{"role": "user", "content": args.task}]
for _ in range(args.max_turns):
    reply = client.chat.completions.create(model="default_model", messages=messages, tools=tools).choices[0].message
    messages.append(reply.model_dump(exclude_none=True))
    if not reply.tool_calls:
        print(reply.content)
        break
    for call in reply.tool_calls:
        print(f"[{call.function.name} {call.function.arguments}]", flush=True)
        result = use(call.function.name, call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
