from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_flash import FlashConfig, FlashLLM
from mlx_flash.loading import load_model
from mlx_flash.memory.footprint import footprint
from mlx_flash.residency.plan import ResidencyPlan
from models import LLAMA, save

MORE_GB = 0.3 if mx.default_device() == mx.cpu else 1.5
"""Room for a model that stays in memory, beside the process. A GPU's process grows when it runs."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> FlashLLM:
    directory = tmp_path_factory.mktemp("model")
    save(directory, {**LLAMA}, bits=None)
    model, _ = load_model(directory, FlashConfig(ram_budget_gb=footprint() / 1e9 + MORE_GB, telemetry=False))
    return model


@pytest.fixture
def plan(model: FlashLLM) -> ResidencyPlan:
    return model.plan
