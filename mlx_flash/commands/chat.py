"""``mlx-flash chat``: a conversation, with the flags of mlx-lm's chat."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import mlx.core as mx

from mlx_flash.commands.common import make_config
from mlx_flash.commands.programs import chat_on_ranks
from mlx_flash.commands.run import described_model, talk_about
from mlx_flash.ranks.peers import launched_group


def chat(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash chat``. Where several ranks share a model, mlx-lm's own chat runs."""
    if launched_group() is not None or args.pipeline:
        return chat_on_ranks(args, make_config(args), out)
    modelfile = described_model(args.model)
    given = {"temperature": args.temp, "top_p": args.top_p}
    parameters = replace(modelfile.parameters, **{name: value for name, value in given.items() if value is not None})
    modelfile = replace(
        modelfile,
        adapter=Path(args.adapter_path) if args.adapter_path else modelfile.adapter,
        system=args.system_prompt or modelfile.system,
        parameters=parameters,
    )
    config = make_config(args, modelfile.flash)
    mx.random.seed(args.seed)
    xtc = {"xtc_probability": args.xtc_probability, "xtc_threshold": args.xtc_threshold}
    settings = {"trust_remote_code": True} if args.trust_remote_code else {}
    talk_about(args, modelfile, config, None, out, settings, max_kv_size=args.max_kv_size, xtc=xtc)
    return 0
