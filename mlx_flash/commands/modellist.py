"""``mlx-flash list``: the models on this machine, and how fast the plan expects them to be."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

from huggingface_hub import CacheNotFound, scan_cache_dir
from rich import box
from rich.table import Table

from mlx_flash.commands.common import make_config, note, print_json, print_rich
from mlx_flash.commands.statusline import Status
from mlx_flash.commands.vision import prepare_folder
from mlx_flash.config import FlashConfig
from mlx_flash.errors import BudgetError, ConfigError, FlashError
from mlx_flash.modelfile.namedfiles import named_models
from mlx_flash.modelfile.parse import read_modelfile
from mlx_flash.monitor.state import printable
from mlx_flash.monitor.words import rate, size, speed
from mlx_flash.storage.shards import weight_files
from mlx_flash.vision.detect import loads_with_vlm

_PLACES = ("config.json", "*/config.json", "*/*/config.json")
"""Patterns of models in a folder: itself, its folders, and theirs."""

_NOT_PLANNED = (FlashError, OSError, ValueError, KeyError, TypeError)
"""Errors of models that mlx-lm does not know, or whose settings it does not understand."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model on this machine.

    Attributes:
        name: repository or folder.
        folder: of its files.
        bytes: of its weights in files.
        modelfile: the Modelfile with this name; None for a folder or repository.
    """

    name: str
    folder: str
    bytes: int
    modelfile: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A forecast of how a model would run within the budget.

    Attributes:
        way: "in memory", "streamed", "too large" or "not supported".
        tokens_per_second: as the plan expects them; None where it does not run.
        budget_bytes: the budget, or the smallest that works where that is more; None without a plan.
        read_bytes: read for each token.
        why: the reason why it does not run; empty where it does.
    """

    way: str
    tokens_per_second: float | None = None
    budget_bytes: int | None = None
    read_bytes: int | None = None
    why: str = ""

    def __str__(self) -> str:
        if self.tokens_per_second is None:
            return f"{self.way}: {self.why}"
        read = f"{size(self.read_bytes)} read for each token" if self.read_bytes else "in memory"
        return f"within {size(self.budget_bytes or 0)}: {read}, about {speed(self.tokens_per_second)}"


def list_(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash list``."""
    config = make_config(args)
    models = list(dict.fromkeys([*_downloaded(), *_in_folders(args.folders)]))
    models += _named({model.name: model for model in models})
    outcomes = []
    with Status("Planning", args.verbose) as status:
        for number, model in enumerate(models):
            status.show(number, len(models))
            outcomes.append(_outcome(model, args, config))
    if args.json:
        entries = [{**asdict(model), **asdict(outcome)} for model, outcome in zip(models, outcomes, strict=True)]
        print_json({"models": entries}, out)
    elif models:
        print_rich(_table(models, outcomes), out)
    else:
        print("no models found in the cache of Hugging Face or the folders given", file=out)
    return 0


def _outcome(model: Model, args: argparse.Namespace, config: FlashConfig) -> Outcome:
    """Plan for a model, with the settings of its Modelfile."""
    if model.modelfile is None:
        return expect(Path(model.folder), config)
    if not model.folder:
        return Outcome("not downloaded")
    return expect(Path(model.folder), make_config(args, read_modelfile(model.modelfile).flash))


def expect(folder: Path, config: FlashConfig, probe: Path | None = None) -> Outcome:
    """Plan for a model. Reads headers, no weights.

    Args:
        folder: the model.
        config: how to stream.
        probe: a file to probe the disk with; None takes the largest shard.
    """
    try:
        with_vlm = loads_with_vlm(folder, None, prefers=False)
        plan = prepare_folder(folder, config, probe, with_vlm=with_vlm).plan
    except BudgetError as error:
        return Outcome("too large", budget_bytes=error.minimum_bytes, why=" ".join(str(error).split()))
    except _NOT_PLANNED as error:
        return Outcome("not supported", why=" ".join(f"{type(error).__name__}: {error}".split()))
    reached = 1 / plan.opening_seconds if plan.opening_seconds else None
    return Outcome("streamed" if plan.read_bytes else "in memory", reached, plan.budget_bytes, plan.read_bytes)


def _downloaded() -> Iterator[Model]:
    """Yield the models in the cache of Hugging Face: of each, the revision that was downloaded last."""
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repository in sorted(repositories, key=lambda repository: str(repository.repo_id)):
        newest = max(repository.revisions, key=lambda revision: revision.last_modified)
        if (nbytes := _weight_bytes(newest.snapshot_path)) and repository.repo_type == "model":
            yield Model(repository.repo_id, str(newest.snapshot_path), nbytes)


def _named(downloaded: Mapping[str, Model]) -> Iterator[Model]:
    """Yield the Modelfiles with names. One that cannot be read is left out, and reported."""
    for name, path in named_models().items():
        try:
            base = read_modelfile(path).base
        except ConfigError as error:
            note(f"mlx-flash: {error}")
            continue
        if base in downloaded:
            yield replace(downloaded[base], name=name, modelfile=str(path))
        else:
            is_folder = Path(base).is_dir()
            yield Model(name, base if is_folder else "", _weight_bytes(Path(base)) if is_folder else 0, str(path))


def _in_folders(folders: Sequence[Path]) -> Iterator[Model]:
    """Yield the models in folders.

    Raises:
        NotADirectoryError: one of them is no folder.
    """
    for folder in folders:
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is not a folder. Hint: name folders that hold models.")
        for config in sorted(file for pattern in _PLACES for file in folder.glob(pattern)):
            if nbytes := _weight_bytes(config.parent):
                yield Model(str(config.parent), str(config.parent.resolve()), nbytes)


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in weight_files(folder))


def _table(models: Sequence[Model], outcomes: Sequence[Outcome]) -> Table:
    """Return a table in which the name of a repository has room on 80 columns."""
    budgets = {size(outcome.budget_bytes or 0) for outcome in outcomes if outcome.tokens_per_second is not None}
    caption = f"planned with a budget of {budgets.pop()}" if len(budgets) == 1 else None
    table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
    for heading in ("model", "size", "runs", "tokens/s"):
        table.add_column(heading, justify="left" if heading in ("model", "runs") else "right", overflow="fold")
    for model, outcome in zip(models, outcomes, strict=True):
        runs = f"needs {size(outcome.budget_bytes)}" if outcome.why and outcome.budget_bytes else outcome.way
        table.add_row(printable(_short(model.name)), size(model.bytes), runs, rate(outcome.tokens_per_second))
    return table


def _short(name: str) -> str:
    """Return a folder's name with ``~`` for the home folder."""
    home = str(Path.home())
    return f"~{name[len(home) :]}" if name.startswith(f"{home}/") else name
