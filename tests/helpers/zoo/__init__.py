"""The zoo: a tiny configuration of every architecture of mlx-lm, to check that streaming changes no bit.

A name is that of mlx-lm's module, with a suffix where one architecture comes in several kinds: ``llama:sliding``.
"""

from __future__ import annotations

import copy
import pkgutil
import re
from pathlib import Path
from typing import Any

from mlx_lm import models

from zoo.configurations import CONFIGURATIONS, SHARED


def names() -> list[str]:
    """Return the names of all configurations, those of the installed mlx-lm's architectures among them, in order."""
    folder = Path(models.__path__[0])
    texts = {module.name: (folder / f"{module.name}.py").read_text() for module in pkgutil.iter_modules([str(folder)])}
    found = {
        name for name, text in texts.items() if re.search(r"\bModel\b", text) and re.search(r"\bModelArgs\b", text)
    }
    return sorted(found | CONFIGURATIONS.keys(), key=str.lower)


def configuration(name: str) -> dict[str, Any]:
    """Return the content of ``config.json``."""
    own = copy.deepcopy(CONFIGURATIONS.get(name, {}))
    config = {"model_type": name.split(":", maxsplit=1)[0], "vocab_size": SHARED["vocab_size"], **own}
    if "text_config" in own:
        config["text_config"] = {**copy.deepcopy(SHARED), **own["text_config"]}
        return config
    return {**copy.deepcopy(SHARED), **config}
