"""Run mlx-lm models larger than memory, bit for bit."""

from mlx_flash.config import FlashConfig, parse_budget
from mlx_flash.errors import (
    BudgetError,
    CheckpointError,
    CheckpointNotFoundError,
    ClosedError,
    ConfigError,
    FileChangedError,
    FlashError,
    HeaderError,
    IndexFileError,
    ReadError,
    StreamedWeightsError,
    TruncatedFileError,
)
from mlx_flash.model import FlashLLM, load, load_model

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "ClosedError",
    "ConfigError",
    "FileChangedError",
    "FlashConfig",
    "FlashError",
    "FlashLLM",
    "HeaderError",
    "IndexFileError",
    "ReadError",
    "StreamedWeightsError",
    "TruncatedFileError",
    "load",
    "load_model",
    "parse_budget",
]
