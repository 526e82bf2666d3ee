"""The zoo: a tiny configuration of every architecture of mlx-lm, to check that streaming changes no bit.

A name is that of mlx-lm's module, with a suffix where one architecture comes in several kinds: ``llama:sliding``.
"""

from __future__ import annotations

import copy
import importlib
import pkgutil
from typing import Any

from mlx_lm import models

from zoo.configurations import CONFIGURATIONS, SHARED


def names() -> list[str]:
    """Return the names of all configurations, in alphabetical order."""
    return sorted(CONFIGURATIONS, key=str.lower)


def architecture(name: str) -> str:
    """Return the mlx-lm module of a configuration."""
    return name.split(":", maxsplit=1)[0]


def configuration(name: str) -> dict[str, Any]:
    """Return the content of ``config.json``."""
    own = copy.deepcopy(CONFIGURATIONS[name])
    config = {"model_type": architecture(name), "vocab_size": SHARED["vocab_size"], **own}
    if "text_config" in own:
        config["text_config"] = {**copy.deepcopy(SHARED), **own["text_config"]}
        return config
    return {**copy.deepcopy(SHARED), **config}


def unconfigured() -> list[str]:
    """Return the architectures of the installed mlx-lm without a configuration here."""
    known = {architecture(name) for name in CONFIGURATIONS}
    found = [module.name for module in pkgutil.iter_modules(models.__path__)]
    return [name for name in sorted(set(found) - known) if _is_architecture(name)]


def _is_architecture(name: str) -> bool:
    module = importlib.import_module(f"mlx_lm.models.{name}")
    return hasattr(module, "Model") and hasattr(module, "ModelArgs")
