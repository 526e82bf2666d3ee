"""The table: architectures, budgets and cuts, places of keys and values."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from differential.runs import WAYS
from differential.scripts import BEFORE_STEP, VOCAB_SIZE, fill, make_cache
from faulty import open_in_the_end, open_things, unfinished
from mlx_flash import BudgetError, DiskKVCache, FlashConfig, FlashLLM, load_model
from models import GEMMA3, MAMBA2, NARROW_LLAMA, QWEN3_MOE, save, save_initialised, stock
from own_heads import config_of, save_with_head, streamed_with_head
from zoo import configuration

TINY: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": VOCAB_SIZE}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": NARROW_LLAMA | TINY | {"num_hidden_layers": 4},
    "packed": NARROW_LLAMA | TINY,
    "tied": NARROW_LLAMA | TINY | {"tie_word_embeddings": True},
    "gemma3": GEMMA3 | TINY | {"num_hidden_layers": 3},
    "mamba2": MAMBA2 | TINY,
    "mixture": QWEN3_MOE | TINY,
    "hybrid": configuration("qwen3_next") | {"vocab_size": VOCAB_SIZE},
    "own head": config_of("qwen3_5"),
}
"""``packed`` has weights of 4 bits; ``tied`` of bf16, in two shards, at places where they cannot be read directly.
``own head`` guesses its tokens, and is always right."""

BUDGETS: dict[str, tuple[float | None, dict[str, Any]]] = {
    "min": (0.0, {"lend_reserves": False}),
    "small": (0.1, {}),
    "large": (0.6, {"lend_reserves": False, "io": "buffered"}),
    "layers": (0.0, {"expert_pool": False, "lend_reserves": False, "io": "buffered"}),
    "memory": (None, {}),
}
"""Share of the weights for which the budget has room beyond the smallest one, and other settings. Without a share,
everything is in memory. ``small`` lends memory to weights; ``layers`` reads all experts of a layer."""

LARGE_GB = 2.0 if mx.default_device() == mx.cpu else 6.0  # CUDA has a context, too

CONTEXT = 4096
"""Tokens of all caches of a trial: each takes memory for 256 at least."""

PLACES: dict[str, dict[str, Any]] = {
    "disk": {"kv_cache": "disk", "kv_step": 16},
    "own disk": {"context_length": 8192},
    "prefixes": {"kv_prefixes": "exact", "kv_prefix_gb": 1},
}
"""Settings of places. ``rotating``, ``quantized`` and ``own disk`` are the caller's caches; files have buffers too."""

NUM_BEFORE = {"disk": 40, "own disk": 270}
"""Tokens that are in the cache before a trial, so that some are on disk."""


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    architecture: str
    budget: str
    place: str

    def __str__(self) -> str:
        return f"{self.architecture}-{self.budget}-{self.place}".replace(" ", "_")

    @property
    def num_before(self) -> int:
        return NUM_BEFORE.get(self.place, 0)


def _rows() -> Iterator[Row]:
    budgets = ["min", "small", "large", "memory"]
    yield from (Row("llama", budget, place) for place in ("memory", "rotating", "quantized") for budget in budgets)
    yield from (Row(name, budget, "memory") for name in ("packed", "tied", "hybrid") for budget in ("min", "large"))
    yield Row("own head", "min", "memory")
    yield from (Row("llama", budget, "own disk") for budget in ("min", "large", "memory"))
    yield from (Row("llama", budget, "disk") for budget in ("min", "large", "memory"))
    yield from (Row(*each, "disk") for each in (("gemma3", "min"), ("mixture", "large")))
    yield from (Row("llama", budget, "prefixes") for budget in ("large", "memory"))
    yield from (Row(name, "min", "prefixes") for name in ("gemma3", "hybrid"))
    yield from (Row("gemma3", budget, "memory") for budget in budgets)
    yield from (Row("mamba2", budget, "memory") for budget in ("min", "large", "memory"))
    yield from (Row("mixture", budget, "memory") for budget in ("layers", *budgets))
    yield Row("mixture", "min", "quantized")


ROWS = list(_rows())


class Zoo:
    """The models on disk, each written when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_warm = False  # a model has been loaded: what stays after it belongs to the process

    def path(self, architecture: str) -> Path:
        """Return a model's folder."""
        path, config = self.folder / architecture, ARCHITECTURES[architecture]
        if not path.exists():
            if architecture in ("mamba2", "hybrid"):
                save_initialised(path, dict(config))
            elif architecture == "own head":
                save_with_head(path, "qwen3_5", knows=True)
            elif architecture == "tied":
                save(path, dict(config), mx.bfloat16, num_shards=2, header_shift=1)
            else:
                save(path, dict(config), bits=4 if architecture == "packed" else None)
        return path


class Subject:
    """A row's model, which is open until :meth:`close`."""

    def __init__(self, row: Row, zoo: Zoo) -> None:
        self.row, self.folder = row, zoo.path(row.architecture)
        self.kv_folder = zoo.folder / "kv"
        self.kv_folder.mkdir(exist_ok=True)
        self.texts: dict[tuple[int, ...], list[int]] = {}  # what follows prompts, for guesses
        self.seconds: dict[str, float] = {}  # that trials take which nothing disturbs, by their way
        if not zoo.is_warm:
            load_model(self.folder, FlashConfig(ram_budget_gb=LARGE_GB))[0].close()
            zoo.is_warm = True
        # a small model of the same tokens that is right now and then
        self.draft = None if row.budget == "memory" else stock(self.folder)
        gc.collect()
        self._things = open_things()
        self.model = self._open()
        self._filled: list[Any] | None = None
        self._plan = self.model.plan
        self.keeps_budget = True  # no trial has had another one
        forget_peak()

    def _open(self) -> FlashLLM:
        """Load the model. A budget beyond the smallest one is found with a model in that."""
        share, tries = BUDGETS[self.row.budget][0], 3
        if not share:
            return self._load(LARGE_GB if share is None else "min")
        while True:
            with self._load("min") as model:
                nbytes = model.plan.minimum_bytes + share * model.plan.model_bytes
            try:
                return self._load(nbytes / 1e9)
            except BudgetError:  # this process has grown meanwhile
                if not (tries := tries - 1):
                    raise

    def _load(self, budget_gb: float | str) -> FlashLLM:
        settings: dict[str, Any] = {
            "ram_budget_gb": budget_gb,
            "context_length": CONTEXT,
            "telemetry": False,
            "poison_released_slots": True,
            "kv_directory": str(self.kv_folder),
            "derived_cache_gb": 0,
            **BUDGETS[self.row.budget][1],
            **PLACES.get(self.row.place, {}),
        }
        if self.row.architecture == "own head":  # the planner would rather keep weights
            return streamed_with_head(self.folder, **settings | {"ram_budget_gb": LARGE_GB})
        return load_model(self.folder, FlashConfig(**settings))[0]

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways of its runs. In memory, mlx-lm's own loop checks several guesses in one call, with other bits."""
        return WAYS[: None if self.draft is not None and self.row.place != "quantized" else -1]

    @property
    def step(self) -> int:
        """The most tokens of a prompt in a call."""
        return self.model.plan.prefill_step_size

    def cache(self) -> list[Any]:
        """Return a prompt cache for a trial. Where tokens precede the prompt, it is a copy of one that has them."""
        if self.row.place not in NUM_BEFORE:
            return make_cache(self.model, self.row.place)
        if self._filled is None:
            cache = make_cache(self.model, "")
            if self.row.place == "own disk":
                cache = [DiskKVCache(directory=str(self.kv_folder)) for _ in self.model.layers]
            fill(self.model, cache, self.row.num_before, min(BEFORE_STEP, self.step))
            for entry in cache:
                if self.row.place == "disk" and isinstance(entry, DiskKVCache):
                    entry.offload()
            self._filled = cache
        return copy.deepcopy(self._filled)

    def reopen(self) -> None:
        """Load the model again, which a trial has closed."""
        self._filled = None
        self.model = self._open()

    def close_model(self) -> None:
        """Close the model only, before it is loaded again."""
        self._filled = None
        self.model.close()

    def close(self) -> list[str]:
        """Close the model. Return descriptors, threads and files that are left, and a peak beyond the budget."""
        self._filled = None
        peak, allowed = peak_bytes(), self._plan.budget_bytes
        self.model.close()
        del self.model
        gc.collect()
        mx.clear_cache()
        found = open_in_the_end(self._things)
        left = [] if found == self._things else [f"{self._things} before, {found} after: {_descriptors()}"]
        if self.keeps_budget and peak > allowed:
            left.append(f"a peak of {peak} bytes, {peak - allowed} beyond the budget")
        return left + [str(path) for path in [*unfinished(self.kv_folder), *_files(self.kv_folder)]]


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _descriptors() -> list[str]:
    """Return what the descriptors of this process refer to, where the system tells it."""
    links = [path for path in Path("/proc/self/fd").glob("*") if path.is_symlink()]
    return [f"{path.name} -> {path.readlink()}" for path in links]


def forget_peak() -> None:
    """Begin to measure the peak of this process's memory anew, where the system can."""
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return the peak of this process's memory; 0 where the system does not tell it."""
    if sys.platform != "linux":
        return 0
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
