"""What the server process of ``children.py`` imports and computes, once for all programs that it forks."""

from __future__ import annotations

import shutil
from importlib import import_module

import roomy
from mlx_flash.commands import dispatch

for name in (
    "mlx_flash.commands.serve",
    "mlx_lm.models.llama",
    "mlx_lm.models.qwen3_moe",
    "mlx_lm.server",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.configuration_llama",
    "transformers.models.qwen3_moe.configuration_qwen3_moe",
):
    import_module(name)
for name in ("generate", "run", "plan", "verify", "doctor", "exec", "models", "pack", "cache"):
    dispatch._load_command(name)
shutil.disk_usage = roomy.disk_usage
