"""The models that requests can name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub import CacheNotFound, scan_cache_dir, try_to_load_from_cache

from mlx_flash.config import FlashConfig
from mlx_flash.errors import ConfigError, RefusedError
from mlx_flash.layout.names import repository_of
from mlx_flash.modelfile.parse import Modelfile, named_models, recent_tokens
from mlx_flash.server.request import Defaults

DEFAULT_NAME = "default_model"
"""The name that always means the first model of the command line, as in mlx-lm's server."""

LATEST = ":latest"
"""The end of names that Ollama's clients may add."""

_FILES = {"config.json", "tokenizer_config.json"}
"""Files of a repository in Hugging Face's cache folder that make it a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model that can be loaded."""

    name: str = ""  # by which requests name it
    base: str = ""  # its folder, or its Hugging Face repository
    config: FlashConfig  # how to stream
    vision: bool | None = None  # load it with mlx-vlm if it sees; None only where mlx-lm does not know it
    adapter: str | None = None  # folder of a LoRA adapter
    draft: str | None = None  # folder or repository of a model that guesses tokens
    tokenizer_settings: dict[str, Any] = field(default_factory=dict)  # of the tokenizer, such as its chat template
    defaults: Defaults = field(default_factory=Defaults)  # settings of requests that leave them out
    first_messages: tuple[dict[str, str], ...] = ()  # of every conversation; a request's own system prompt wins
    created: int = field(default_factory=lambda: int(time.time()), compare=False)  # seconds since 1970, for listings


class Catalog:
    """The models that requests can name: those of the command line, folders, those that ``mlx-flash create`` named, and
    Hugging Face's cache folder, also by short names.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        other: Source,
        *,
        describe: Callable[[str, Path], Source] | None = None,
        any_name: bool | None = None,
    ) -> None:
        self._named = {source.name: source for source in sources}
        if len(self._named) < len(sources):
            raise ConfigError("two models have the same name. Hint: name them with --model NAME=DIR.")
        self._other, self._describe = other, describe
        self._any_name = len(sources) == 1 if any_name is None else any_name

    def is_given(self, name: str) -> bool:
        """Return whether the command line gave a name."""
        return name in self._named or name == DEFAULT_NAME

    @property
    def default(self) -> Source | None:
        """The model of requests that name none; None if there is none."""
        return next(iter(self._named.values()), None)

    def known(self, name: str) -> str:
        """Return the name of the model that answers requests for a name, if any name will do; else this name."""
        if not self._any_name or self.default is None or self._found(name) is not None:
            return name
        return self.default.name

    def find(self, name: str) -> Source:
        """Return the model of a name, which may end with ``:latest``: nothing is downloaded."""
        if (found := self._found(name)) is not None:
            return found
        names = ", ".join(map(repr, self.names([DEFAULT_NAME] if self._named else [])))
        raise RefusedError(
            f"there is no model {name.removesuffix(LATEST)!r} here. Hint: this server has {names or 'none'}.",
            404,
            "model",
        )

    def _found(self, name: str) -> Source | None:
        if name == DEFAULT_NAME and self.default is not None:
            return self.default
        if name in self._named:
            return self._named[name]
        for source in self._named.values():
            if name == source.base or (Path(source.base).exists() and name == str(Path(source.base).resolve())):
                return source
        if _is_model(name):
            return replace(self._other, name=name, base=name)
        try:
            if self._describe is not None and (path := named_models().get(name)):
                return self._describe(name, path)
            base = repository_of(name)
        except ConfigError as error:
            raise RefusedError(str(error), 400, "model") from error
        if base != name and _is_model(base):
            return replace(self._other, name=name, base=base)
        return self._found(name.removesuffix(LATEST)) if name.endswith(LATEST) else None

    def names(self, first: Iterable[str] = ()) -> list[str]:
        """Return some names, then those of the command line, of Modelfiles, and in Hugging Face's cache folder."""
        try:
            repos = scan_cache_dir().repos
        except CacheNotFound:
            repos = frozenset()
        found = [r.repo_id for r in repos if "main" in r.refs and _FILES <= {f.file_name for f in r.refs["main"].files}]
        created = named_models() if self._describe is not None else ()
        return list(dict.fromkeys([*first, *self._named, *created, *sorted(found)]))


def _is_model(name: str) -> bool:
    """Return whether a name is that of a folder with a model, or of a repository in Hugging Face's cache folder."""
    try:
        if (Path(name) / "config.json").is_file():
            return True
        return "/" in name and isinstance(try_to_load_from_cache(name, "config.json"), str)
    except (ValueError, OSError):  # it is no name of a repository, or too long for one of a file
        return False


def source_of(modelfile: Modelfile, name: str, other: Source) -> Source:
    """Return the model of a Modelfile."""
    template = {} if modelfile.chat_template is None else {"chat_template": modelfile.chat_template}
    return replace(
        other,
        name=name,
        base=modelfile.base,
        adapter=None if modelfile.adapter is None else str(modelfile.adapter),
        tokenizer_settings={**other.tokenizer_settings, **template},
        defaults=defaults_of(modelfile, other.defaults),
        first_messages=modelfile.first_messages,
    )


def defaults_of(modelfile: Modelfile, defaults: Defaults) -> Defaults:
    """Return the settings of a Modelfile, and others where it has none."""
    parameters = modelfile.parameters
    names = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty")
    given: dict[str, Any] = {name: parameters[name] for name in names if name in parameters}
    if modelfile.stop:
        given["stop"] = modelfile.stop
    if (num_tokens := parameters.get("num_predict", 0)) > 0:
        given["max_tokens"] = num_tokens
    if recent := recent_tokens(parameters.get("repeat_last_n")):
        kinds = {"repetition": "repeat", "presence": "presence", "frequency": "frequency"}
        given |= {f"{kind}_context_size": recent for kind, name in kinds.items() if f"{name}_penalty" in parameters}
        if "repeat_penalty" in parameters:
            given["repetition_penalty"] = parameters["repeat_penalty"]
    return replace(defaults, **given)
