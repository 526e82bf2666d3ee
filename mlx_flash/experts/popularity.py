"""Which experts a model used most in earlier runs, so that they are read first next time.

One small file a model, ``experts/<fingerprint>.json`` in the cache folder. It decides only what is read first, so
whatever is wrong with it costs a warning, never a run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlx_flash.errors import WriteError
from mlx_flash.files import cache_directory

if TYPE_CHECKING:  # it needs MLX, which this module does without
    from mlx_flash.layout.fingerprint import State

FORMAT = 1
"""Of the files; another one is not used."""

HALF_LIFE_USES = 1024
"""What was counted weighs half after each expert was used so often on the average: with 8 of 128 experts a token, after
16384 tokens. So many uses tell an expert's share to about 3 %, whatever the number of experts; and a few long
conversations are enough to follow when a user turns to something else."""

PRIOR_USES = 8
"""Every expert counts as used so much more often than it was when shares are predicted: after a few tokens the most
popular experts are mostly those that chance chose."""

_MOST_USES = 1e15
"""More than any count grows to, and few enough to be added up."""

Counts = np.ndarray[Any, np.dtype[np.float64]]

_log = logging.getLogger("mlx_flash")


class Popularity:
    """How often each expert was used; uses long ago weigh less.

    Args:
        sizes: number of experts of each layer that has some, in calling order; all above 0.

    Attributes:
        counts: for each layer the uses of its experts, ``(num_experts,)``.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.counts: list[Counts] = [np.zeros(size) for size in sizes]
        # one for all layers: they see the same tokens, and their counts have to stay comparable
        self._half_life = HALF_LIFE_USES * sum(sizes) / max(len(sizes), 1)
        self._covered: Counts | None = None

    def add(self, layer: int, counts: np.ndarray[Any, np.dtype[np.integer[Any]]]) -> None:
        """Counts a call of a layer.

        Args:
            layer: number of the layer.
            counts: how many of the call's tokens each expert was chosen for, ``(num_experts,)``.

        Raises:
            ValueError: the layer has another number of experts.
        """
        kept = self.counts[layer]
        if counts.shape != kept.shape:
            raise ValueError(f"layer {layer} has counts of shape {kept.shape}, not {counts.shape}")
        kept *= 0.5 ** (int(counts.sum()) / self._half_life)
        kept += counts
        self._covered = None

    @property
    def is_empty(self) -> bool:
        """Whether no expert was used."""
        return not any(counts.any() for counts in self.counts)

    def most_popular(self, limit: int) -> list[tuple[int, int]]:
        """The experts used most.

        Args:
            limit: how many at most; 0 or more.

        Returns:
            (layer, expert), the most popular first; of equals the one of the lower numbers. None that was not used.

        Raises:
            ValueError: the limit is below 0.
        """
        _check_not_negative("limit", limit)
        uses = np.concatenate([np.empty(0), *self.counts])
        places = [(layer, expert) for layer, counts in enumerate(self.counts) for expert in range(len(counts))]
        return [places[i] for i in np.argsort(-uses, kind="stable")[:limit] if uses[i] > 0]

    def hit_rate(self, num_kept: int) -> float:
        """Predicts how many uses the most popular experts cover, as a share of 1; the fewer were counted, the nearer it
        is to what any experts would cover.

        Args:
            num_kept: number of experts, over all layers; 0 or more.

        Raises:
            ValueError: it is below 0.
        """
        _check_not_negative("num_kept", num_kept)
        if self._covered is None:
            uses = np.concatenate([np.zeros(1), *self.counts])
            uses[1:] = np.sort(uses[1:] + PRIOR_USES)[::-1]
            self._covered = np.cumsum(uses)
        total = self._covered[-1]
        return float(self._covered[min(num_kept, len(self._covered) - 1)] / total) if total else 0.0


def _check_not_negative(name: str, value: int) -> None:
    if value < 0:
        raise ValueError(f"{name} is {value}: it must be 0 or more")


@dataclass(frozen=True, slots=True)
class PopularityFile:
    """A file that remembers popular experts.

    Attributes:
        path: where it is.
        model: the model's name; empty when that cannot be read.
        nbytes: its size in bytes.
        last_used: when a run wrote it last, in seconds since 1970.
    """

    path: Path
    model: str
    nbytes: int
    last_used: float


def popularity_directory() -> Path:
    """The folder of all files; it need not exist."""
    return cache_directory() / "experts"


def popularity_file(fingerprint: str) -> Path:
    """Where the popular experts of a model are remembered."""
    return popularity_directory() / f"{fingerprint}.json"


def popularity_fingerprint(config: Mapping[str, Any], state: State) -> str:
    """A digest of a model; a name for files. It stays when MLX or mlx-lm change: the experts are the same.

    Args:
        config: of the model, with what the caller replaced in it.
        state: of its checkpoint.
    """
    return hashlib.sha256(json.dumps([state, config], sort_keys=True, default=str).encode()).hexdigest()[:32]


def load_popularity(path: Path, sizes: Sequence[int]) -> Popularity:
    """What earlier runs saved; nothing, with a warning, when that cannot be used.

    Args:
        path: the file; it need not exist.
        sizes: number of experts of each layer that has some, in calling order.
    """
    popularity = Popularity(sizes)
    try:
        _, counts = _parse(path.read_bytes())
        _check_sizes([len(row) for row in counts], list(sizes))
        popularity.counts = counts
    except FileNotFoundError:
        pass  # the first run
    except OSError as error:
        _tell_not_used(path, error.strerror or str(error))
    except ValueError as error:
        _tell_not_used(path, str(error))
    return popularity


def _tell_not_used(path: Path, reason: str) -> None:
    _log.warning(
        "%s is not used: %s. Which experts are popular is learned anew, and written there at the end of the run.",
        path,
        reason,
    )


def _parse(data: bytes) -> tuple[str, list[Counts]]:
    """Name of the model, and uses of the experts of each layer.

    Raises:
        ValueError: it is none of our files.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is damaged: {error}") from error
    match found:
        case {"format": int(version)} if version != FORMAT:
            raise ValueError(f"it is of format {version}, not {FORMAT}")
        case {"format": int(), "model": str(model), "counts": [*rows]}:
            return model, [_counts(row) for row in rows]
    raise ValueError("it is damaged: there is no format, model and counts in it")


def _counts(row: object) -> Counts:
    """The uses of the experts of a layer, all of them possible."""
    if not isinstance(row, list) or not all(type(uses) in (int, float) and 0 <= uses <= _MOST_USES for uses in row):
        raise ValueError("it is damaged: something in it is no count")
    return np.array(row, dtype=np.float64)


def _check_sizes(found: list[int], wanted: list[int]) -> None:
    if found != wanted:
        raise ValueError(
            f"it is of {sum(found)} experts in {len(found)} layers, the model has {sum(wanted)} in {len(wanted)}"
            + (", divided otherwise" if (sum(found), len(found)) == (sum(wanted), len(wanted)) else "")
        )


def save_popularity(path: Path, popularity: Popularity, model: str) -> None:
    """Remembers popular experts in place of what was remembered; warns when that cannot be written. Of processes that
    save at the same time the last one counts. Nothing is written when no expert was used.

    Args:
        path: the file; its folder is made.
        popularity: what to remember.
        model: the model's name, for people.
    """
    if popularity.is_empty:
        return
    # six digits are more than are known, and a third of the file
    counts = [[float(f"{uses:.6g}") for uses in row] for row in popularity.counts]
    text = json.dumps({"format": FORMAT, "model": model, "counts": counts}, separators=(",", ":"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, text)
    except OSError as error:
        _log.warning(
            "cannot write %s: %s. Which experts of %s this run used most is not remembered. Hint: make room, or check "
            "who may write there; expert_warm_start=False does without.",
            path,
            error.strerror or error,
            model,
        )


def _replace(path: Path, text: str) -> None:
    """Writes a file in one step: others see the old text or the new one."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.stem, suffix=".partial", delete=False) as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def list_popularity() -> list[PopularityFile]:
    """Every file there is, what a crash left half written too, the one used last first."""
    found = []
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in popularity_directory().iterdir():
            with suppress(FileNotFoundError):  # it is being removed
                found += [_look_at(path)] if path.is_file() else []
    return sorted(found, key=lambda file: (-file.last_used, file.path))


def _look_at(path: Path) -> PopularityFile:
    status = path.stat()
    try:
        model, _ = _parse(path.read_bytes())
    except (OSError, ValueError):
        model = ""  # damaged, or of another version: it can still be removed
    return PopularityFile(path, model, status.st_size, status.st_mtime)


def remove_popularity(file: PopularityFile) -> None:
    """Removes a file.

    Raises:
        WriteError: it cannot be removed.
    """
    try:
        file.path.unlink(missing_ok=True)
    except OSError as error:
        raise WriteError(
            f"cannot remove {file.path}: {error.strerror or error}. Hint: check who may write there."
        ) from error
