"""``mlx-flash pull``: show the plan of a model of Hugging Face, and download it. Files that are complete are kept."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from huggingface_hub import constants
from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

from mlx_flash.commands.common import make_config, note, print_json
from mlx_flash.commands.modellist import Outcome, expect
from mlx_flash.commands.preview import preview
from mlx_flash.commands.statusline import Status
from mlx_flash.config import FlashConfig
from mlx_flash.errors import ConfigError
from mlx_flash.layout import hub
from mlx_flash.layout.download import download, missing_bytes
from mlx_flash.monitor.words import size
from mlx_flash.storage.probe import sample_in


def pull(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash pull``.

    Raises:
        CheckpointNotFoundError: Hugging Face has no such model.
        ConfigError: the name is a folder, or the disk has no room.
        ReadError: the download broke off.
    """
    name = args.model
    if Path(name).is_dir():
        raise ConfigError(f"pull {name}: it is a folder on this machine, which needs no download")
    hub.check_name(name)
    cache = Path(constants.HF_HUB_CACHE)
    disable_progress_bars()
    with Status(f"looking at {name}", is_shown=not args.quiet):
        outcome = _foresee(name, args.revision, make_config(args), cache)
        nbytes = missing_bytes(name, args.revision)
    note(f"{name}: {outcome}; {size(nbytes)} to download")
    if sys.stderr.isatty() and not args.quiet:
        enable_progress_bars()
    folder = str(download(name, args.revision))
    if args.json:
        print_json({"model": name, "folder": folder, "downloaded_bytes": nbytes, **asdict(outcome)}, out)
    else:
        print(f"{name} is in {folder}", file=out)
    return 0


def _foresee(name: str, revision: str | None, config: FlashConfig, cache: Path) -> Outcome:
    """Plan for a model that is not downloaded. Fetches the headers of its shards."""
    with preview(name, revision) as path, sample_in(cache) as probe:
        return expect(path, config, probe)
