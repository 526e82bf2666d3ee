"""Tiny models of every architecture of mlx-vlm, from its own configurations, compared stock and streamed."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import math
import pkgutil
import tempfile
import typing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_vlm import models, utils
from mlx_vlm.models.cache import make_prompt_cache

from mlx_flash import BudgetError, FlashConfig, FlashError
from mlx_flash.compat.vlm import language_part
from mlx_flash.vision.flashvlm import load_vlm_model
from vlm_configs import (
    ENTRIES,
    FORMS,
    IMAGE,
    KINDS,
    MODELS,
    OTHERS,
    PARTS,
    SMALL,
    TOKENS,
    VISION,
    Picture,
    picture_of,
)
from zoo.compare import Outcome, one_line
from zoo.pool import Case

MAX_BYTES = 2e9
"""The largest model that is tried. The towers of some have sizes that no configuration changes."""

SPARE_GB = 0.04
"""Added to the smallest budget where a picture has no room in it."""


def architectures() -> list[str]:
    """Return mlx-vlm's architectures with a picture's configuration."""
    found = []
    for module in pkgutil.iter_modules(models.__path__):
        if module.ispkg and (Path(models.__path__[0]) / module.name / "vision.py").exists():
            found.append(module.name)
    return sorted(found)


def candidates(name: str) -> Iterator[dict[str, Any]]:
    """Yield configurations that differ in the ``model_type`` of their parts."""
    config = configuration(name)
    yield config
    for text in KINDS["text_config"]:
        for vision in KINDS["vision_config"]:
            kinds = {"text_config": text.format(name=name), "vision_config": vision.format(name=name)}
            parts = {part: {**config[part], "model_type": kind} for part, kind in kinds.items() if part in config}
            yield {**config, **parts}


def configuration(name: str) -> dict[str, Any]:
    """Return a tiny configuration, with the defaults of mlx-vlm's classes where they do not matter."""
    if name in MODELS:
        return copy.deepcopy({"model_type": name, "vocab_size": 300, **MODELS[name]})
    package = importlib.import_module(f"mlx_vlm.models.{name}")
    config: dict[str, Any] = {}
    for part in PARTS:
        kind = getattr(package, f"{part.title()}Config", None)
        if kind is not None and dataclasses.is_dataclass(kind):
            config[f"{part}_config"] = _small(kind, SMALL | (VISION if part == "vision" else {}))
    text = config.get("text_config", {})
    found = {**text, **_small(package.ModelConfig, SMALL), **config, "model_type": name}
    return merged(found, ENTRIES.get(name, {}))


def merged(config: dict[str, Any], entries: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with some entries replaced, those inside of others included."""
    found = dict(config)
    for key, value in entries.items():
        inner = found.get(key)
        found[key] = merged(inner, value) if isinstance(value, dict) and isinstance(inner, dict) else value
    return found


def _small(kind: Any, small: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.name.endswith("_config"):
            continue
        if field.name in TOKENS:
            found[field.name] = IMAGE
        elif field.name in OTHERS:
            found[field.name] = OTHERS[field.name]
        elif field.name in small:
            found[field.name] = small[field.name]
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            hint = str(hints.get(field.name))
            found[field.name] = "" if "str" in hint and "Dict" not in hint else 1e-6 if "float" in hint else 4
    return found


def save(folder: Path, name: str) -> None:
    """Write a model with random weights."""
    first: Exception | None = None
    for config in candidates(name):
        try:
            write_model(folder, config)
        except (ValueError, KeyError, AttributeError, TypeError, AssertionError) as error:
            first = first or error
        else:
            return
    raise first or ValueError("no configuration")


def write_model(folder: Path, config: dict[str, Any], spread: float | None = None) -> Path:
    """Write a model with random weights of a spread, by default of one that suits their width. Return its folder."""
    text, package = json.dumps(config), importlib.import_module(f"mlx_vlm.models.{config['model_type']}")
    config = json.loads(text)
    config.setdefault("text_config", {})
    config.setdefault("vision_config", {})
    config.setdefault("audio_config", {})
    args = package.ModelConfig.from_dict(config)
    args = utils.update_module_configs(args, package, config, list(PARTS))
    mx.random.seed(5)
    flat = tree_flatten(package.Model(args).parameters())
    if sum(array.nbytes for _, array in flat) > MAX_BYTES:
        raise ValueError(f"its smallest configuration has {sum(array.nbytes for _, array in flat) / 1e9:.1f} GB")
    widths = {key: array.shape[-1] if array.ndim else 1 for key, array in flat}
    weights = {
        key: mx.random.normal(array.shape) * (spread or 0.5 / math.sqrt(widths[key] or 1)) for key, array in flat
    }
    weights |= {key: mx.abs(array) for key, array in weights.items() if key.endswith("running_var")}
    # Such as experts of tokens.
    integers = {key: array for key, array in flat if mx.issubdtype(array.dtype, mx.integer)}
    weights |= {key: mx.random.randint(0, 4, array.shape, array.dtype) for key, array in integers.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(text)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def pictures() -> Iterator[Picture]:
    """Yield pictures in the forms that processors make."""
    mx.random.seed(6)
    grid = {"image_grid_thw": mx.array([[1, 4, 4]])}
    forms: list[tuple[mx.array, dict[str, Any]]] = [
        (mx.random.normal((1, 3, 56, 56)), {}),
        (mx.random.normal((1, 3, 56, 56)), {"image_sizes": [(56, 56)]}),
        (mx.random.normal((1, 3, 56, 56)), {"image_sizes": mx.array([[56, 56]])}),
        (mx.random.normal((1, 1, 3, 56, 56)), {}),
        (mx.random.normal((16, 3 * 2 * 14 * 14)), grid),
        (mx.random.normal((16, 3 * 14 * 14)), grid),
    ]
    for pixels, extra in forms:
        for count in (4, 16, 1, 2, 8, 9, 64):
            yield mx.array([[1, 288, *[IMAGE] * count, 2, 3]]), pixels, extra


def outputs(model: Any, tokens: mx.array, pixels: Any, extra: dict[str, Any]) -> list[mx.array]:
    """Logits of a prompt and of two more tokens."""
    language = model.language_model
    for name in ("_position_ids", "_rope_deltas"):
        if hasattr(language, name):
            setattr(language, name, None)
    given = model.get_input_embeddings(tokens, pixels, mask=mx.ones(tokens.shape, mx.int32), **extra)
    rest = {key: value for key, value in given.to_dict().items() if value is not None}
    cache = make_prompt_cache(language)
    found = [language(tokens, cache=cache, **rest).logits]
    found += [language(mx.array([[token]]), cache=cache).logits for token in (3, 4)]
    mx.eval(found)
    return found


def picture_for(model: Any, name: str) -> Picture | None:
    """Return a picture that stock mlx-vlm computes with, and that changes its output; None if none is known."""
    if name in FORMS:
        picture = picture_of(name)
        if not _changes(model, *picture):
            raise ValueError("the output does not depend on the picture")
        return picture
    for picture in pictures():
        try:
            if _changes(model, *picture):
                return picture
        except Exception:
            continue
    return None


def _changes(model: Any, tokens: mx.array, pixels: Any, extra: dict[str, Any]) -> bool:
    """Return whether a picture changes a model's output. Some marks of pictures are no tokens of the vocabulary."""
    words = mx.where((tokens < 0) | (tokens >= SMALL["vocab_size"]), 5, tokens)
    found, plain = outputs(model, tokens, pixels, extra), outputs(model, words, None, {})
    return not mx.array_equal(found[-1], plain[-1]) and not mx.any(mx.isnan(found[-1]))


def stock_outputs(folder: Path, text: mx.array, picture: Picture | None) -> list[list[mx.array]]:
    """Return what a new stock model computes: some keep a part of earlier calls."""
    model = utils.load_model(folder)
    return [outputs(model, text, None, {}), *([] if picture is None else [outputs(model, *picture)])]


def _streamed(folder: Path, text: mx.array, picture: Any, least_bytes: int = 0) -> tuple[list[Any], tuple[int, int]]:
    """Return streamed outputs at the smallest budget, and the numbers of units streamed and in towers.

    Where a picture finds no room, the budget is what the error asks for, and a little more.
    """
    budget: Any = least_bytes / 1e9 + SPARE_GB if least_bytes else "min"
    try:
        with load_vlm_model(folder, FlashConfig(ram_budget_gb=budget, telemetry=False)) as model:
            if picture is not None:
                tokens, pixels, extra = picture
                mask = mx.ones(tokens.shape, mx.int32)
                model.expect(tokens.size + 2, {"input_ids": tokens, "pixel_values": pixels, "mask": mask, **extra})
            found = [outputs(model, text, None, {})]
            if picture is not None:
                found.append(outputs(model, *picture))
            return found, (model.plan.streaming.num_units, len(model.layout.towers))
    except BudgetError as error:
        if picture is None or least_bytes:
            raise
        needed = error.minimum_bytes
    return _streamed(folder, text, picture, needed)


def compare(case: Case, connection: Connection) -> None:
    """Compare one architecture, in a process of its own: some configurations end it."""
    connection.send("stock")
    with tempfile.TemporaryDirectory(prefix="zoo-vlm-") as folder:
        connection.send(outcome_of_model(case.name, Path(folder), connection.send))


def outcome_of_model(name: str, folder: Path, enter: Callable[[str], None] = lambda phase: None) -> Outcome:
    """Return the outcome of one architecture. ``enter`` is called with the phase in which streaming is to blame."""
    outcome = Outcome(name, "fp32", "cannot")
    text = mx.array([[1, 2, 3, 4, 5, 6, 7]])
    try:
        save(folder, name)
        stock = utils.load_model(folder)
        picture = picture_for(stock, name) if language_part(stock) is not None else None
        expected = stock_outputs(folder, text, picture) if language_part(stock) is not None else []
    except Exception as error:
        outcome.reason = one_line(error)
        return outcome
    outcome.sees, outcome.status = picture is not None, "failed"
    del stock
    enter("streamed")
    try:
        found, (outcome.num_streamed, outcome.num_towers) = _streamed(folder, text, picture)
    except FlashError as error:
        outcome.status, outcome.reason = "refused", one_line(error)
    except Exception as error:
        outcome.reason = one_line(error)
    else:
        if not expected:
            outcome.reason = "a model without a language model was not refused"
        elif _same(expected, found):
            outcome.status = "ok"
        elif not _same(expected, stock_outputs(folder, text, picture)):
            outcome.status, outcome.reason = "cannot", "stock mlx-vlm gives other outputs when it is repeated"
    return outcome


def _same(some: list[list[mx.array]], others: list[list[mx.array]]) -> bool:
    pairs = [(a, b) for one, other in zip(some, others, strict=True) for a, b in zip(one, other, strict=True)]
    return all(bool(mx.array_equal(a, b, equal_nan=True)) for a, b in pairs)
