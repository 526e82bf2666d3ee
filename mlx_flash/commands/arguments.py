"""The flags of the command line. Those that mlx-lm has keep its names and defaults."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO, get_args

from mlx_lm.generate import (
    DEFAULT_MAX_TOKENS,
    DEFAULT_MIN_P,
    DEFAULT_MIN_TOKENS_TO_KEEP,
    DEFAULT_PROMPT,
    DEFAULT_QUANTIZED_KV_START,
    DEFAULT_SEED,
    DEFAULT_TEMP,
    DEFAULT_TOP_K,
    DEFAULT_TOP_P,
    DEFAULT_XTC_PROBABILITY,
    DEFAULT_XTC_THRESHOLD,
    str2bool,
)

from mlx_flash import __version__
from mlx_flash.config import Budget, IOMode, KVMode, PrefixMode, parse_budget
from mlx_flash.errors import ConfigError

Command = Callable[[argparse.Namespace, TextIO], int]

DIAL = (
    *("ram_budget_gb", "context_length", "prefill_step_size", "num_slots"),
    *("kv_cache", "kv_ram_gb", "kv_max_tokens", "kv_keep", "kv_step", "kv_directory"),
    *("kv_prefixes", "kv_prefix_tenant", "kv_prefix_gb", "ssd_write_gb_per_day"),
    *("expert_pool_gb", "expert_lookahead", "io", "read_size_mb", "queue_depth"),
)
"""The fields of ``FlashConfig`` that are flags of every command."""


@dataclass(frozen=True, slots=True)
class Commands:
    """What runs each command: it is given the flags, and where output goes, and returns the exit status."""

    generate: Command
    plan: Command
    run: Command
    serve: Command
    chat: Command
    execute: Command
    pack: Command
    cache: Command


def make_parser(commands: Commands) -> argparse.ArgumentParser:
    """The parser of all commands. ``args.command`` is one of them, or None; ``args.rest`` what mlx-lm shall parse."""
    parser = argparse.ArgumentParser(prog="mlx-flash", description="Run mlx-lm models larger than memory, bit for bit.")
    parser.add_argument("--version", action="version", version=f"mlx-flash {__version__}")
    parser.set_defaults(command=None, passes_on=False, traceback=False, verbose=True)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    add = partial(_add_command, subparsers)
    generating = add("generate", "generate text", "--model MODEL [flags]", commands.generate)
    _add_model_flags(generating)
    _add_dial_flags(generating)
    _add_prompt_flags(generating)
    _add_sampling_flags(generating)
    _add_cache_flags(generating)
    planning = add(
        "plan", "show what stays in memory, and how fast that will be", "--model MODEL [flags]", commands.plan
    )
    _add_model_flags(planning)
    _add_dial_flags(planning)
    running = add(
        "run", "chat with, prompt, or serve what a Modelfile describes", "-f MODELFILE [PROMPT]", commands.run
    )
    _add_run_flags(running)
    _add_dial_flags(running)
    serving = add("serve", "mlx-lm's OpenAI-compatible server, streaming", "--model MODEL [flags]", commands.serve)
    _add_dial_flags(serving, "all other flags are those of mlx_lm.server")
    chatting = add("chat", "mlx-lm's chat, streaming", "--model MODEL [flags]", commands.chat)
    _add_dial_flags(chatting, "all other flags are those of mlx_lm.chat")
    for passing_on in (serving, chatting):
        passing_on.set_defaults(passes_on=True)
    executing = add(
        "exec", "run any program that uses mlx-lm, streaming", "[flags] -- PROGRAM [its flags]", commands.execute
    )
    _add_dial_flags(executing)
    executing.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="PROGRAM", help="such as: mlx_lm.generate --model MODEL"
    )
    packing = add("pack", "rewrite a checkpoint in the order in which it is read", "SOURCE TARGET", commands.pack)
    packing.add_argument("source", help="model directory, or Hugging Face repository")
    packing.add_argument("target", help="directory to make")
    packing.add_argument("--verify", action="store_true", help="read everything back and compare")
    packing.add_argument("--json", action="store_true", help="write one JSON object to stdout")
    caching = add("cache", "show or remove what is kept to be found again faster", "list|clear", commands.cache)
    caching.add_argument("action", choices=("list", "clear"), help="clear removes all of it that is not in use")
    caching.add_argument("--json", action="store_true", help="write one JSON object to stdout")
    return parser


def _add_command(subparsers: Any, name: str, words: str, usage: str, run: Command) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=words,
        description=f"{words}.",
        usage=f"mlx-flash {name} {usage}",
        allow_abbrev=False,
    )
    parser.set_defaults(command=run)
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    return parser


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="model directory, or Hugging Face repository")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that comes with a tokenizer")
    parser.add_argument("--json", action="store_true", help="write one JSON object to stdout")


def _add_dial_flags(parser: argparse.ArgumentParser, note: str | None = None) -> None:
    add = parser.add_argument_group("streaming", note).add_argument
    add(
        "--ram-budget-gb",
        type=_budget,
        metavar="GB",
        help="memory for the whole process in GB (10**9 bytes), or min, safe, balanced, performance",
    )
    add("--context-length", type=int, metavar="N", help="tokens of KV cache to set memory aside for")
    add("--prefill-step-size", type=int, metavar="N", help="prompt tokens in one forward call; default: what fits")
    add("--kv-cache", choices=get_args(KVMode), help="how the KV cache is kept; default: on disk when it has to be")
    add("--kv-ram-gb", type=float, metavar="GB", help="memory for the KV cache, beyond which it is on disk")
    add("--kv-max-tokens", type=int, metavar="N", help="forget the older half of more tokens; changes the output")
    add("--kv-keep", type=int, metavar="N", help="tokens at the beginning that are not forgotten then")
    add("--kv-step", type=int, metavar="N", help="tokens by which the KV cache grows")
    add("--kv-directory", metavar="DIR", help="where a KV cache on disk is put")
    add("--kv-prefixes", choices=get_args(PrefixMode), help="mode of the prefix cache on disk; default: off")
    add("--kv-prefix-tenant", metavar="NAME", help="name of a private part of the prefix cache")
    add("--kv-prefix-gb", type=float, metavar="GB", help="limit of the prefix cache on disk")
    add(
        "--ssd-write-gb-per-day", type=float, metavar="GB", help="what may be written on a day; 0: nothing; default: 20"
    )
    add("--num-slots", type=int, metavar="N", help="buffers that streamed weights take turns in")
    add("--expert-pool-gb", type=float, metavar="GB", help="memory for experts of a mixture that are kept; 0: none")
    either = argparse.BooleanOptionalAction
    add("--expert-lookahead", action=either, help="whether experts are read early that the next layer may need")
    add("--expert-warm-start", action=either, help="whether experts used most are remembered, and read first next time")
    add("--io", choices=get_args(IOMode), help="read past the page cache (direct) or through it")
    add("--read-size-mb", type=float, metavar="MB", help="size of one read")
    add("--queue-depth", type=int, metavar="N", help="reads in flight at once")


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-f", "--file", default="Modelfile", metavar="MODELFILE", help="default: ./Modelfile")
    parser.add_argument("prompt", nargs="?", help="answer this and end; without it: a conversation")
    parser.add_argument("--serve", action="store_true", help="serve it, as mlx-flash serve does")
    parser.add_argument("--host", default="127.0.0.1", help="for --serve")
    parser.add_argument("--port", type=int, default=8080, help="for --serve")
    parser.add_argument(
        "--max-tokens", "-m", type=_max_tokens, metavar="N", help="instead of the Modelfile's num_predict"
    )


def _add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("prompt and output").add_argument
    add("--prompt", "-p", default=DEFAULT_PROMPT, metavar="TEXT", help="the prompt ('-' reads it from stdin)")
    add(
        "--max-tokens",
        "-m",
        type=_max_tokens,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help="the most to generate; -1: no limit",
    )
    add("--system-prompt", metavar="TEXT", help="system prompt for the chat template")
    add("--prefill-response", metavar="TEXT", help="beginning of the answer, for the chat template")
    add("--ignore-chat-template", action="store_true", help="take the prompt as it is")
    add("--use-default-chat-template", action="store_true", help="accepted, without effect, as mlx-lm does")
    add("--chat-template-config", type=_json_object, default={}, metavar="JSON", help="for the chat template")
    add("--extra-eos-token", nargs="+", default=(), metavar="TOKEN", help="tokens that end generation")
    add("--adapter-path", metavar="DIR", help="LoRA or DoRA adapter to apply")
    add("--resident", action="store_true", help="everything in memory, by mlx-lm alone: to compare with")
    add("--routing-trace", type=Path, metavar="FILE", help="record which experts are routed to, for benchmarks")
    add("--verbose", type=str2bool, default=True, metavar="BOOL", help="False: no progress bars and no summary")


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sampling").add_argument
    add("--temp", type=float, default=DEFAULT_TEMP, metavar="T", help="temperature; 0 takes the likeliest token")
    add("--top-p", type=float, default=DEFAULT_TOP_P, metavar="P", help="keep the likeliest of this share")
    add("--min-p", type=float, default=DEFAULT_MIN_P, metavar="P", help="keep those of this share of the likeliest")
    add("--top-k", type=int, default=DEFAULT_TOP_K, metavar="K", help="keep the K likeliest; 0 keeps all")
    add("--min-tokens-to-keep", type=int, default=DEFAULT_MIN_TOKENS_TO_KEEP, metavar="N", help="for --min-p")
    add("--xtc-probability", type=float, default=DEFAULT_XTC_PROBABILITY, metavar="P", help="how often XTC is used")
    add("--xtc-threshold", type=float, default=DEFAULT_XTC_THRESHOLD, metavar="P", help="what XTC takes for likely")
    add("--seed", type=int, default=DEFAULT_SEED, metavar="N", help="of the random numbers")


def _add_cache_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("KV cache").add_argument
    add("--max-kv-size", type=int, metavar="N", help="tokens to keep")
    add("--kv-bits", type=int, metavar="N", help="quantize to N bits")
    add("--kv-group-size", type=int, default=64, metavar="N", help="values that share a scale")
    add("--quantized-kv-start", type=int, default=DEFAULT_QUANTIZED_KV_START, metavar="N", help="from this token on")


def _budget(text: str) -> Budget:
    try:
        return parse_budget(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _max_tokens(text: str) -> int:
    number = int(text)
    if number == 0 or number < -1:
        raise argparse.ArgumentTypeError(f"{number} is neither a number of tokens nor -1, which sets no limit")
    return number


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
