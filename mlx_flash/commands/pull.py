"""``mlx-flash pull``: show the plan of a model of Hugging Face, and download it. Files that are complete are kept."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from huggingface_hub import constants, snapshot_download
from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from mlx_flash.commands.common import make_config, note, print_json
from mlx_flash.commands.modellist import Outcome, expect
from mlx_flash.commands.preview import preview
from mlx_flash.commands.statusline import Status
from mlx_flash.config import FlashConfig
from mlx_flash.errors import ConfigError, ReadError
from mlx_flash.files import free_bytes
from mlx_flash.layout import hub
from mlx_flash.monitor.words import size, speed
from mlx_flash.storage.probe import sample_in


def pull(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash pull``.

    Raises:
        CheckpointNotFoundError: Hugging Face has no such model.
        ConfigError: the name is a folder, or the disk has no room.
        ReadError: the download broke off.
    """
    name = args.repository
    if Path(name).is_dir():
        raise ConfigError(f"pull {name}: it is a folder on this machine, which needs no download")
    hub.check_name(name)
    cache = Path(constants.HF_HUB_CACHE)
    disable_progress_bars()
    with Status(f"looking at {name}", is_shown=not args.quiet):
        outcome = _foresee(name, args.revision, make_config(args), cache)
        nbytes = _missing_bytes(name, args.revision)
    note(f"{name}: {_in_words(outcome)}; {size(nbytes)} to download")
    if nbytes > (free := free_bytes(cache)):
        raise ConfigError(
            f"pull {name}: {size(nbytes)} do not fit the disk of {cache}, which has {size(free)} free. Hint: set "
            "HF_HUB_CACHE to a folder on another disk, or remove models with `mlx-flash rm`."
        )
    if sys.stderr.isatty() and not args.quiet:
        enable_progress_bars()
    try:
        folder = snapshot_download(name, revision=args.revision, allow_patterns=DEFAULT_ALLOW_PATTERNS)
    except hub.DOWNLOAD_ERRORS as error:
        raise ReadError(
            f"the download of {name} broke off: {' '.join(str(error).split())}. Hint: the same command goes on, "
            "and keeps every file that is complete."
        ) from error
    if args.json:
        print_json({"model": name, "folder": folder, "downloaded_bytes": nbytes, **asdict(outcome)}, out)
    else:
        print(f"{name} is in {folder}", file=out)
    return 0


def _missing_bytes(name: str, revision: str | None) -> int:
    """Return the bytes of the files that are not downloaded yet."""
    try:
        files = snapshot_download(name, revision=revision, allow_patterns=DEFAULT_ALLOW_PATTERNS, dry_run=True)
    except hub.NOT_FOUND_ERRORS as error:
        raise hub.not_found(name, error) from error
    return sum(file.file_size or 0 for file in files if file.will_download)


def _foresee(name: str, revision: str | None, config: FlashConfig, cache: Path) -> Outcome:
    """Plan for a model that is not downloaded. Fetches the headers of its shards."""
    with preview(name, revision) as path, sample_in(cache) as probe:
        return expect(path, config, probe)


def _in_words(outcome: Outcome) -> str:
    if outcome.tokens_per_second is None:
        return f"{outcome.way}: {outcome.why}"
    assert outcome.budget_bytes is not None
    read = f"{size(outcome.read_bytes)} read for each token" if outcome.read_bytes else "in memory"
    return f"within {size(outcome.budget_bytes)}: {read}, about {speed(outcome.tokens_per_second)}"
