"""The models in memory, which share one budget: a request loads its model, and idle ones leave for it."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_flash.config import FlashConfig
from mlx_flash.engine.prepare import load_tokenizer, prepare, resolve
from mlx_flash.enginethread import Progress
from mlx_flash.errors import BudgetError, ConfigError
from mlx_flash.layout.load import model_name
from mlx_flash.loading import apply_adapter, load_model
from mlx_flash.logs import log
from mlx_flash.memory.footprint import free_unused
from mlx_flash.model import FlashLLM
from mlx_flash.ranks import launched_group
from mlx_flash.server.batch import BatchOptions
from mlx_flash.server.catalog import Source
from mlx_flash.server.loaded import LoadedModel
from mlx_flash.server.ranks import Ranks
from mlx_flash.vision.detect import loads_with_vlm

if TYPE_CHECKING:  # an extra
    from mlx_flash.server.seeing import Sight


class Models:
    """The models in memory. Belongs to the generation thread.

    A model is loaded beside others if the budget holds it whole. Otherwise idle models are unloaded first, the least
    recently used one before the others; if requests run on all of them, the new model waits for these.
    """

    def __init__(self, options: BatchOptions, ranks: Ranks | None = None, keep_alive: float | None = None) -> None:
        self._options = options
        self._ranks = ranks
        self._keep_alive = keep_alive
        self._loaded: dict[str, LoadedModel] = {}  # the least recently used one first
        self._alone: set[str] = set()

    def __iter__(self) -> Iterator[LoadedModel]:
        return iter(list(self._loaded.values()))

    def get(self, source: Source) -> LoadedModel | None:
        """Return a model if it is in memory, with these settings: its Modelfile may have been replaced."""
        found = self._loaded.get(source.name)
        return found if found is not None and found.source == source else None

    def load(self, source: Source, progress: Progress, pictures: Sequence[Path] = ()) -> LoadedModel | None:
        """Load a model, planned for some pictures. Return None if others have to answer their requests before."""
        if source.name in self._alone and any(model.jobs for model in self._loaded.values()):
            return None
        self._alone.discard(source.name)
        if (replaced := self._loaded.get(source.name)) is not None:
            if replaced.jobs:
                return None
            self.unload(replaced)
        began = time.perf_counter()
        path = resolve(source.base)
        while True:
            found = self._try(source, path)
            if found is not None:
                break
            idle = next((other for other in self._loaded.values() if not other.jobs), None)
            if idle is None:
                self._alone.add(source.name)
                return None
            self.unload(idle)
            del idle
        (model, tokenizer, sight), draft = found, None
        try:
            if sight is not None and pictures:
                sight.expect(pictures)
            if source.adapter is not None:
                apply_adapter(model, source.adapter)
            if source.draft is not None:
                draft = load_model(resolve(source.draft), source.config)[0]
            model.start(progress)
        except BaseException:
            (model if sight is None else sight.model).close()
            if draft is not None:
                draft.close()
            raise
        loaded = LoadedModel(source, model, tokenizer, draft, self._options, self._ranks, sight)
        self._loaded[source.name] = loaded
        log.info("loaded %s in %.1f s", source.name, time.perf_counter() - began)
        return loaded

    def note_use(self, model: LoadedModel, keep_alive: float | None) -> None:
        self._loaded[model.source.name] = self._loaded.pop(model.source.name)
        model.keep_alive = self._keep_alive if keep_alive is None else keep_alive
        self.note_end(model)

    def note_end(self, model: LoadedModel) -> None:
        """Note that a model becomes idle now, or was used: its time in memory begins."""
        seconds = -1.0 if model.keep_alive is None else model.keep_alive
        # a model stays if a client asks for longer than a thread can wait
        model.expires = time.monotonic() + seconds if 0 <= seconds <= threading.TIMEOUT_MAX else None

    def expired(self) -> list[str]:
        """Return the names of idle models whose time is over."""
        now = time.monotonic()
        return [
            m.source.name for m in self._loaded.values() if not m.jobs and m.expires is not None and m.expires <= now
        ]

    @property
    def next_expiry(self) -> float | None:
        """Seconds until a model may leave; None if none will."""
        times = [model.expires for model in self._loaded.values() if model.expires is not None and not model.jobs]
        return None if not times else max(0.0, min(times) - time.monotonic())

    def unload(self, model: LoadedModel) -> None:
        """Free the memory of a model, before another one is planned."""
        self._loaded.pop(model.source.name, None)
        log.info("unloading %s", model.source.name)
        model.close()
        del model
        _free()

    def unload_named(self, names: Iterable[str]) -> None:
        for name in names:
            model = self._loaded.get(name)
            if model is not None and not model.jobs:
                self.unload(model)

    def close(self) -> None:
        for model in list(self._loaded.values()):
            self.unload(model)

    def _try(self, source: Source, path: Path) -> tuple[FlashLLM, Any, Sight | None] | None:
        """Return a model that is planned beside those in memory, its tokenizer, and how it sees if it does.

        None if those in memory have to leave.
        """
        others = bool(self._loaded)
        if others and self._ranks is not None:  # whose budgets differ, while all of them must decide alike
            return None
        sight = None
        try:
            tokenizer = load_tokenizer(path, source.tokenizer_settings, source.config)
            if loads_with_vlm(path, source.vision, prefers=False):
                sight = self._open_sight(source, path, tokenizer)
                model: FlashLLM = sight.model.language_model
            else:
                model = _text_model(path, source.config)
        except BudgetError:
            if not others:
                raise
            return None
        if others and model.plan.read_bytes:
            (model if sight is None else sight.model).close()
            del model, tokenizer, sight
            _free()
            return None
        return model, tokenizer, sight

    def _open_sight(self, source: Source, path: Path, tokenizer: Any) -> Sight:
        given = {"an adapter": source.adapter, "a draft model": source.draft, "several ranks": self._ranks}
        for words, value in given.items():
            if value is not None:
                raise ConfigError(
                    f"{source.name} sees, and {words} cannot be used with it. Hint: --no-vision, or leave it out."
                )
        from mlx_flash.server.seeing import open_sight

        trusts = bool(source.tokenizer_settings.get("trust_remote_code"))
        return open_sight(path, source.config, tokenizer, trust_remote_code=trusts)


def _text_model(path: Path, config: FlashConfig) -> FlashLLM:
    """Return a model with a prefix cache, unless the settings, the budget, or several ranks have no room for one."""
    group = launched_group()
    if config.kv_prefixes is None and group is None:
        kept = replace(config, kv_prefixes="exact")
        try:
            return FlashLLM(prepare(path, kept), kept, model_name(path))
        except BudgetError:
            log.info("prompts are not kept on disk: the budget has no room for their pages")
    return FlashLLM(prepare(path, config, group=group), config, model_name(path))


def _free() -> None:
    gc.collect()
    free_unused()
