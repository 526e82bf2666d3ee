"""Commands about models: of this machine, those that people run, downloads, names, packed copies, cached data."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import TextIO

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import CacheNotFound, HfApi, constants, scan_cache_dir
from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError
from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars
from rich.console import RenderableType
from rich.table import Table

from mlx_flash.commands.common import Status, emit, labelled, make_config, note, note_lines, tabled
from mlx_flash.commands.vision import prepare_model
from mlx_flash.config import FlashConfig
from mlx_flash.convert import derived
from mlx_flash.convert import pack as packing
from mlx_flash.convert.derived import Copy, derived_directory, list_copies
from mlx_flash.engine.prepare import resolve
from mlx_flash.errors import BudgetError, CheckpointNotFoundError, ConfigError, FlashError
from mlx_flash.files import PARTIAL_SUFFIX, cache_directory, free_bytes, remove_orphans, remove_unheld
from mlx_flash.kv.disk import sessions_directory
from mlx_flash.layout import hub
from mlx_flash.layout.hub import NOT_FOUND_ERRORS, download, is_downloaded, missing_bytes, not_found
from mlx_flash.layout.load import METADATA_SUFFIXES, write_stand_in
from mlx_flash.layout.names import Known, known_models
from mlx_flash.layout.units import RESULTS as HELD
from mlx_flash.memory.footprint import MemoryReading, available_memory, footprint, total_memory
from mlx_flash.modelfile.parse import (
    create_model,
    find_modelfile,
    named_models,
    read_modelfile,
)
from mlx_flash.monitor.words import counted, filled, formatted, printable, size
from mlx_flash.prefixes.prefixcache import prefix_directory
from mlx_flash.prefixes.store import clear_prefixes, list_prefixes
from mlx_flash.residency.machine import kept_products, read_products
from mlx_flash.residency.planner import budget_of
from mlx_flash.residency.sizes import RESULTS as ATTENTION
from mlx_flash.residency.sizes import expected_hits
from mlx_flash.storage.probe import PROFILES, SELF_TESTS, profile_for, sample_in
from mlx_flash.storage.safetensors import MAX_METADATA_BYTES, weight_files
from mlx_flash.telemetry import Json, ratio
from mlx_flash.vision.detect import loads_with_vlm

_SHARDS = "model*.safetensors"
_ERRORS: tuple[type[Exception], ...] = (*NOT_FOUND_ERRORS, NotASafetensorsRepoError, SafetensorsParsingError)


def is_remote(name: str) -> bool:
    """Return whether a model is neither a folder nor, with all its files, in the cache of Hugging Face."""
    if Path(name).exists() or name.count("/") != 1 or name.startswith(("/", ".", "~")):
        return False
    return not is_downloaded(name)


@contextmanager
def preview(repository: str, revision: str | None = None) -> Iterator[Path]:
    """Yield a folder that can be planned for. Only headers of the shards are fetched, by ranged requests."""
    with tempfile.TemporaryDirectory(prefix="mlx-flash-plan-") as folder:
        path = Path(folder) / repository.replace("/", "--")
        path.mkdir()
        try:
            _fetch(repository, revision, path)
        except _ERRORS as error:
            raise not_found(repository, error) from error
        yield path


@contextmanager
def headers_of(name: str) -> Iterator[tuple[Path, Path | None]]:
    """Yield the folder of a model, and a file to probe its disk with; None takes the largest shard.

    A repository that is not downloaded has headers alone, and its file is on the disk of the download folder.
    """
    if not is_remote(name):
        yield resolve(name), None
        return
    with preview(name) as path, sample_in(Path(constants.HF_HUB_CACHE)) as probe:
        yield path, probe


def _fetch(repository: str, revision: str | None, path: Path) -> None:
    api = HfApi()
    files = api.model_info(repository, revision=revision, files_metadata=True).siblings or []
    for file in files:
        name, nbytes = file.rfilename, file.size or 0
        if "/" in name:
            continue
        if fnmatch(name, _SHARDS):
            header = api.parse_safetensors_file_metadata(repository, name, revision=revision)
            tensors = {key: (found.dtype, found.shape, found.data_offsets) for key, found in header.tensors.items()}
            write_stand_in(path / name, tensors, header.metadata, nbytes)  # tensors lie where they lie in the real one
        elif Path(name).suffix in METADATA_SUFFIXES and nbytes <= MAX_METADATA_BYTES:
            api.hf_hub_download(repository, name, revision=revision, local_dir=path)


DAY = 24 * 3600
_UNREADABLE = "(cannot be read)"


def cache(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash cache list`` or ``clear``."""
    clears, copies, prefixes = args.action == "clear", list_copies(), list_prefixes(prefix_directory())
    places = {"derived_directory": derived_directory(), "prefix_directory": prefix_directory()}
    places["disk_profiles"] = PROFILES.file
    found, disks = copies, sorted(PROFILES.load())
    if clears:
        clear_prefixes(prefix_directory())
        found = [copy for copy in copies if derived.remove(copy)]
        _remove_small_files()
    tokens, prefix_bytes = sum(model.tokens for model in prefixes), sum(model.nbytes for model in prefixes)
    nbytes = sum(copy.nbytes for copy in found)
    table = Table.grid(padding=(0, 2))
    for copy in copies:
        when = _days_ago(copy.last_used) if copy.is_complete else "not complete"
        what = f"packed copy, {'removed' if copy in found else 'kept: in use'}"
        row = copy.model or _UNREADABLE, size(copy.nbytes), when
        table.add_row(*row, what if clears else f"packed copy of {copy.source}")
    for model in () if clears else prefixes:
        row = model.title or _UNREADABLE, size(model.nbytes), _days_ago(model.last_used)
        table.add_row(*row, f"{model.tokens} cached tokens")
    words: list[RenderableType] = [table] if table.row_count else []
    words += [
        f"{'removed ' if clears else ''}{counted(len(found), 'packed copy', 'packed copies')} of {size(nbytes)}, "
        f"{tokens} tokens in the prefix cache of {size(prefix_bytes)}, and {len(disks)} remembered disk profiles",
        *(f"{name.replace('_', ' ')}: {path}" for name, path in places.items()),
    ]
    lists = {"copies": _to_json(found), "prefixes": [asdict(model) for model in prefixes]}
    if clears:
        lists = {"removed": _to_json(found), "kept": _to_json(copy for copy in copies if copy not in found)}
    facts = {"bytes": nbytes + prefix_bytes, "prefix_tokens": tokens, "disks": disks, **lists}
    emit(args, {**places, **facts}, words, out)
    return 0


def _remove_small_files() -> None:
    """Remove what was measured, and what killed processes have left."""
    for measurements in (PROFILES, SELF_TESTS, ATTENTION, HELD):
        file = measurements.file
        for path in (file, file.with_name(f"{file.name}{PARTIAL_SUFFIX}")):
            path.unlink(missing_ok=True)
    for folder in (cache_directory(), cache_directory() / "verify", sessions_directory()):
        remove_orphans(folder)
    for path in derived_directory().glob("*.lock"):
        remove_unheld(path)


def _to_json(copies: Iterable[Copy]) -> list[Json]:
    names = {"nbytes": "bytes", "is_complete": "complete"}
    return [{names.get(name, name): value for name, value in asdict(copy).items()} for copy in copies]


def _days_ago(last_used: float) -> str:
    days = int((time.time() - last_used) // DAY)
    return "used today" if days < 1 else f"used {counted(days, 'day')} ago"


_PLACES = ("config.json", "*/config.json", "*/*/config.json")
"""Patterns of models in a folder: itself, its folders, and theirs."""

_NOT_PLANNED = (FlashError, OSError, ValueError, KeyError, TypeError)
"""Errors of models that mlx-lm does not know, or whose settings it does not understand."""

_UNKNOWN = {"way": "", "tokens_per_second": None, "budget_bytes": None, "read_bytes": None, "why": ""}


def expect(folder: Path, config: FlashConfig, probe: Path | None = None) -> Json:
    """Plan for a model. Reads headers, no weights.

    Returns:
        How it would run: ``way``, which is "in memory", "streamed", "too large" or "not supported", and the reason
        ``why`` it does not; ``tokens_per_second`` as the plan expects them; ``budget_bytes``, or the smallest budget
        that works where that is more; ``read_bytes`` for each token.
    """
    try:
        plan = prepare_model(folder, config, probe, with_vlm=loads_with_vlm(folder, None, prefers=False)).plan
    except BudgetError as error:
        least, why = error.minimum_bytes, " ".join(str(error).split())
        return {**_UNKNOWN, "way": "too large", "budget_bytes": least, "why": why}
    except _NOT_PLANNED as error:
        return {**_UNKNOWN, "way": "not supported", "why": " ".join(f"{type(error).__name__}: {error}".split())}
    return {
        "way": "streamed" if plan.read_bytes else "in memory",
        "tokens_per_second": ratio(1, plan.opening_seconds),
        "budget_bytes": plan.budget_bytes,
        "read_bytes": plan.read_bytes,
        "why": "",
    }


def downloaded() -> Iterator[Json]:
    """Yield the models in the cache of Hugging Face: of each, the revision that was downloaded last."""
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repository in repositories:
        if repository.repo_type == "model":
            newest = max(repository.revisions, key=lambda revision: revision.last_modified)
            if nbytes := _weight_bytes(newest.snapshot_path):
                yield _model(repository.repo_id, str(newest.snapshot_path), nbytes)


def _named(downloaded: Mapping[str, Json]) -> Iterator[Json]:
    """Yield the Modelfiles with names. One that cannot be read is left out, and reported."""
    for name, path in named_models().items():
        try:
            base = read_modelfile(path).base
        except ConfigError as error:
            note(f"mlx-flash: {error}")
            continue
        if base in downloaded:
            yield {**downloaded[base], "name": name, "modelfile": str(path)}
        else:
            is_folder = Path(base).is_dir()
            yield _model(name, base if is_folder else "", _weight_bytes(Path(base)) if is_folder else 0, str(path))


def _in_folders(folders: Sequence[Path]) -> Iterator[Json]:
    """Yield the models in folders."""
    for folder in folders:
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is not a folder. Hint: name folders that hold models.")
        for config in (file for pattern in _PLACES for file in folder.glob(pattern)):
            if nbytes := _weight_bytes(config.parent):
                yield _model(str(config.parent), str(config.parent.resolve()), nbytes)


def _model(name: str, folder: str, nbytes: int, modelfile: str | None = None) -> Json:
    """Return a model on this machine: the bytes of its weights in files, and the Modelfile with this name, if any."""
    return {"name": name, "folder": folder, "bytes": nbytes, "modelfile": modelfile, "is_here": True}


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in weight_files(folder))


def create(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash create``: write a Modelfile with a name."""
    verb = "replaced" if args.name in named_models() else "created"
    path = create_model(args.name, args.file)
    note_lines(read_modelfile(path))
    print(f"{verb} {args.name}: {path}", file=out)
    return 0


def _ask(question: str, hint: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} There is no terminal to ask. Hint: {hint}.")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    try:
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        return False


def model_of(args: argparse.Namespace) -> Path:
    """Return the folder of a command's model, which may have a name. A download is asked for."""
    use_name(args)
    ask_to_download(args.model, args)
    return fetched(args.model)


def use_name(args: argparse.Namespace) -> None:
    """Replace the name of a command's model by the model, and take the settings of its Modelfile that apply."""
    found = find_modelfile(args.model)
    if found.path.is_file() and found.base != args.model:
        note(f"mlx-flash: {found.path} gives {args.command} its model and settings; `mlx-flash run` takes all of it")
        args.flash = found.flash
        if "adapter_path" in args and found.adapter is not None:
            args.adapter_path = args.adapter_path or str(found.adapter)
        if "system_prompt" in args:
            args.system_prompt = args.system_prompt or found.system
    args.model = found.base


def ask_to_download(name: str, args: argparse.Namespace, settings: Mapping[str, str] | None = None) -> None:
    """Show the plan of a repository that is not here, the bytes to download and the room for them, and ask.

    Raises: ConfigError: the settings leave the model that a command would run to mlx-lm.
    """
    config = make_config(args, settings)
    if not config.enabled and args.command != "pack":
        raise ConfigError(
            "enabled is False, as FLASH false in a Modelfile sets it; this command runs models with mlx-flash only. "
            "Hint: run mlx_lm.generate or mlx_lm.chat, or remove the setting."
        )
    if is_remote(name):
        _, nbytes = _announced(name, None, args, config)
        if not args.yes and not _ask(f"{name} is not on this machine. Download {size(nbytes)}?", "-y downloads it"):
            raise CheckpointNotFoundError(f"{name} was not downloaded")


def fetched(name: str) -> Path:
    """Return the folder of a model. Hugging Face shows the progress of a download, and nothing of other calls."""
    if not is_remote(name):
        disable_progress_bars()
    folder = resolve(name)
    disable_progress_bars()
    return folder


def _announced(name: str, revision: str | None, args: argparse.Namespace, config: FlashConfig) -> tuple[Json, int]:
    """Show the plan of a repository, the bytes to download, and the room for them; return the first two."""
    disable_progress_bars()
    cache = Path(constants.HF_HUB_CACHE)
    with Status(f"looking at {name}", is_shown=not args.quiet):
        with preview(name, revision) as path, sample_in(cache) as probe:
            outcome = expect(path, config, probe)
        nbytes = missing_bytes(name, revision)
    room = f"{size(nbytes)} to download, {size(free_bytes(cache))} free in {cache}"
    how = f"{outcome['way']}: {outcome['why']}"
    if outcome["tokens_per_second"] is not None:
        read = "{read_bytes:size} read for each token" if outcome["read_bytes"] else "in memory"
        how = formatted(f"within {{budget_bytes:size}}: {read}, about {{tokens_per_second:speed}}", outcome)
    note(f"{name}: {how}; {room}")
    if sys.stderr.isatty() and not args.quiet:
        enable_progress_bars()
    return outcome, nbytes


def pull(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash pull``."""
    name = find_modelfile(args.model).base
    if Path(name).is_dir():
        raise ConfigError(f"pull {name}: it is a folder on this machine, which needs no download")
    hub.check_name(name)
    outcome, nbytes = _announced(name, args.revision, args, make_config(args))
    folder = download(name, args.revision)
    facts = {"model": name, "folder": folder, "downloaded_bytes": nbytes, **outcome}
    emit(args, facts, f"{name} is in {folder}", out)
    return 0


PACKED = """
Packed: {target}, {num_tensors:tensor}, {nbytes:size} in {files}, in {seconds:duration}
Resumed: after {resumed_bytes:size} of an interrupted run
Checked: {is_equal:every tensor was read back and is equal}
Compression: {compressed:percent} of the bytes, `mlx-flash plan` of the copy shows whether that pays here
Compression: {is_stock:none since no tensor that every pass reads shrinks}
"""
"""A packed checkpoint in words."""


def pack(args: argparse.Namespace, out: TextIO) -> int:
    """Write the packed checkpoint, and report its size."""
    with Status("Packing", args.verbose) as status:
        found = packing.pack(model_of(args), Path(args.target), progress=status.show_bytes, compresses=args.compress)
    is_stock = found.ratio == 1
    more = {"is_equal": True, "files": counted(found.num_shards, "safetensors file" if is_stock else "file")}
    more |= {"compressed": None if is_stock else found.ratio, "is_stock": is_stock and args.compress}
    emit(args, asdict(found), labelled(filled(PACKED, {**asdict(found), **more})), out)
    return 0


OVERHEAD_BYTES = 1_200_000_000
"""Memory in the budget for all but weights: the process, buffers, keys and values. A plan adds it up exactly."""

KNOWN = {
    "model": "{mark}{shown}",
    "size": "{bytes:size}",
    "experts": "{kind}",
    "reads": "{reads}",
    "tokens/s": "{tokens_per_second:rate}",
    "licence": "{licence}",
}
"""A table of models."""

CAPTION = (
    "reads: from the disk for each token, with a budget of {budget_bytes:size}; the disk has {disk:GB/s}. Models with "
    "* are on this machine and planned for. The others are estimated from their sizes; `mlx-flash plan NAME` fetches "
    "their headers and plans."
)


def models(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash models``: the models that run best come first."""
    config = make_config(args)
    memory = MemoryReading(total_memory(), available_memory())
    budget = budget_of(config, memory, footprint(), OVERHEAD_BYTES)
    disk = profile_for(Path(constants.HF_HUB_CACHE), config.io).bytes_per_second
    linear = nn.QuantizedLinear(4096, 4096, bits=4)
    linear.set_dtype(mx.bfloat16)  # as the models of the table have it
    products = read_products(linear), kept_products(linear) or read_products(linear)
    found, known = list(_here(args.folders)), known_models()
    of_repository = {each.repository: name for name, each in known.items()}
    with Status("Planning", args.verbose) as status:
        for number, model in enumerate(found):
            status.show(number, len(found))
            model |= _outcome(model, args, config)
            name = of_repository.pop(model["name"], "")
            model |= _about(known[name]) | {"name": name, "bytes": model["bytes"]} if name else {}
    for name in of_repository.values():
        outcome = reckon(known[name], budget, disk, *products)
        found.append({"name": name, **_about(known[name]), "is_here": False, **outcome})
    found.sort(key=lambda model: (-(model["tokens_per_second"] or 0), model["name"]))
    caption = formatted(CAPTION, {"budget_bytes": budget, "disk": disk})
    words = tabled(KNOWN, map(_shown, found), caption=caption, caption_justify="left", pad_edge=False)
    emit(args, {"budget_bytes": budget, "disk_bytes_per_second": disk, "models": found}, words, out)
    return 0


def _here(folders: Sequence[Path]) -> Iterator[Json]:
    """Yield the models of this machine, each once."""
    found = {(model["name"], model["folder"]): model for model in [*downloaded(), *_in_folders(folders)]}
    yield from found.values()
    yield from _named({model["name"]: model for model in found.values()})


def _outcome(model: Json, args: argparse.Namespace, config: FlashConfig) -> Json:
    """Plan for a model, with the settings of its Modelfile."""
    if not model["folder"]:
        return {**_UNKNOWN, "way": "not downloaded"}
    flash = None if model["modelfile"] is None else read_modelfile(model["modelfile"]).flash
    return expect(Path(model["folder"]), config if flash is None else make_config(args, flash))


def _about(known: Known) -> Json:
    kind = f"{known.chosen[0]} of {known.chosen[1]}" if known.experts else "dense"
    return {**asdict(known), "kind": kind}


def _shown(model: Json) -> Json:
    """Return a model for the table."""
    reads = "{read_bytes:bytes}" if model["tokens_per_second"] else "needs {budget_bytes:size}"
    home, name = str(Path.home()), str(model["name"])
    return {
        **dict.fromkeys(("kind", "licence"), ""),
        **model,
        "shown": printable(f"~{name[len(home) :]}" if name.startswith(f"{home}/") else name),
        "mark": "* " if model["is_here"] else "",
        "reads": formatted(reads if model["budget_bytes"] else "{way}", model),
    }


def reckon(known: Known, budget: int, disk: float, read: float, kept: float) -> Json:
    """Return how a model would run that is not on this machine, as :func:`expect` does, from its sizes alone.

    ``disk`` is its bytes a second; ``read`` and ``kept`` are those of products with weights that were just read, and
    with those that stay in memory.
    """
    room, trunk = max(0, budget - OVERHEAD_BYTES), known.token - known.chosen_bytes
    if room < trunk:
        nbytes = known.token - room
    else:
        share = (room - trunk) / known.experts if known.experts else 1.0
        nbytes = round(known.chosen_bytes * (1 - expected_hits(share, known.chosen[1])))
    computing = nbytes / read + (known.token - nbytes) / kept
    return {
        "way": "streamed" if nbytes else "in memory",
        "tokens_per_second": 1 / max(nbytes / disk, computing),
        "budget_bytes": budget,
        "read_bytes": nbytes,
        "why": "",
    }
