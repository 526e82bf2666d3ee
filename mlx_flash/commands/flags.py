"""Flags of single commands."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mlx_flash.commands.flagtypes import count, duration, max_tokens, port, prompt_tokens, ranks, seconds
from mlx_flash.modelfile.values import DEFAULT_MAX_TOKENS

KEEP_ALIVE = ("--keepalive", "--keep-alive")
"""A flag under Ollama's name and ours."""

LOG = 2
"""Value of ``args.verbose`` that asks for the log, too."""

Flag = tuple[tuple[str, ...], dict[str, Any]]
"""The arguments of ``add_argument``."""


def flag(*names: str, **options: Any) -> Flag:
    """Return the arguments of a flag."""
    return names, options


JSON = flag("--json", action="store_true", help="write one JSON object to stdout")
VISION = flag(
    "--vision",
    action=argparse.BooleanOptionalAction,
    default=None,
    help="load a model that sees with mlx-vlm, and not as text alone with mlx-lm",
)
ACCESS = (
    flag("--api-key-file", type=Path, metavar="FILE", help="a key that clients must send (also MLX_FLASH_API_KEY)"),
    flag("--no-auth", action="store_true", help="let other machines connect without a key"),
)
CHAT = (
    flag("--image", type=Path, action="extend", nargs="+", metavar="FILE", help="pictures for the first message"),
    VISION,
    flag("--format", metavar="json|FILE", help="answer in JSON, or by the JSON schema in a file"),
    flag("--resume", action="store_true", help="go on with the last conversation"),
    flag(
        *KEEP_ALIVE,
        type=duration,
        metavar="TIME",
        help="time that the model stays in memory without a message, such as 5m (default: until the end)",
    ),
    flag(
        "--max-tokens",
        "-m",
        type=max_tokens,
        metavar="N",
        help=f"most tokens of an answer; -1: no limit (default: the Modelfile's num_predict, or {DEFAULT_MAX_TOKENS})",
    ),
    flag(
        "--verbose",
        action="store_const",
        const=LOG,
        default=False,
        help="print the log, and all measurements",
    ),
)
RUN = (
    flag("--model", help="the same, at any place"),
    flag("words", nargs="*", metavar="MODEL | PROMPT", help="a model; a prompt to answer, '-' reads it"),
    flag("--prompt", "-p", metavar="TEXT", help="the prompt, at any place"),
    flag("-f", "--file", metavar="MODELFILE", help="default: ./Modelfile"),
    flag("--serve", action="store_true", help="serve it, as mlx-flash serve does"),
    flag("--host", default="127.0.0.1", help="for --serve"),
    flag("--port", type=port, default=8080, help="for --serve"),
    *ACCESS,
)
PLAN = (
    VISION,
    JSON,
    flag("--budgets", action="store_true", help="compare budgets: peak, speed, first token, longest context"),
    flag("--ranks", type=ranks, default=1, metavar="N", help="show the layers of each of N machines like this one"),
    flag("--trust-remote-code", action="store_true", help="run the code that comes with a tokenizer"),
)
BENCH = (
    flag("--prompt-tokens", type=prompt_tokens, default=64, metavar="N", help="length of the prompt"),
    flag("--max-tokens", "-m", type=count, default=16, metavar="N", help="tokens to generate"),
    VISION,
    JSON,
)
VERIFY = (
    flag("--prompt-tokens", type=prompt_tokens, default=16, metavar="N", help="length of the prompt"),
    flag("--max-tokens", "-m", type=count, default=4, metavar="N", help="tokens after it"),
    flag(
        "--reference",
        choices=("resident", "layers"),
        help="mlx-lm's model whole in memory, or one layer at a time; unset: whole where memory allows",
    ),
    flag("--output", "-o", type=Path, metavar="FILE", help="save the receipt"),
    flag("--against", type=Path, metavar="FILE", help="compare with another receipt"),
    VISION,
    JSON,
)
DOCTOR = (
    flag(
        "--prompt-tokens",
        type=prompt_tokens,
        default=16,
        metavar="N",
        help="prompt of the measured run",
    ),
    flag(
        "--max-tokens",
        "-m",
        type=count,
        default=12,
        metavar="N",
        help="tokens of the measured run",
    ),
    VISION,
    JSON,
)
EXEC = (flag("program", nargs=argparse.REMAINDER, metavar="PROGRAM", help="such as: mlx_lm.generate --model MODEL"),)
PACK = (
    flag("target", help="directory to make"),
    flag("--compress", action="store_true", help="compress what shrinks, if that is expected to pay on this machine"),
    flag("--compress-always", action="store_true", help="compress what shrinks"),
    JSON,
)
LIST = (
    flag("folders", nargs="*", type=Path, metavar="FOLDER", help="folders to look in, beside Hugging Face's cache"),
    JSON,
)
PULL = (
    flag("--revision", metavar="NAME", help="branch, tag or commit (default: main)"),
    JSON,
)
SHOW = (
    flag("--modelfile", action="store_true", help="print the Modelfile"),
    JSON,
)
CREATE = (
    flag("name", metavar="NAME", help="for run, show, list, rm and the server"),
    flag("-f", "--file", default="Modelfile", metavar="MODELFILE", help="the Modelfile"),
)
RM = (flag("-y", "--yes", action="store_true", help="do not ask"),)
STOP = (flag("--timeout", type=seconds, default=30.0, metavar="S", help="seconds to wait for its end"),)
COMPLETION = (flag("shell", choices=("bash", "zsh", "fish"), help="the shell that runs the printed code"),)
CACHE = (flag("action", choices=("list", "clear"), help="clear removes everything that is not in use"), JSON)
