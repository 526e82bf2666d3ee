from __future__ import annotations

import pytest

from models import make_random_model

SHAPE = "--layers 4 --hidden-size 64 --intermediate-size 128 --heads 4 --kv-heads 2 --vocab-size 1000"


SYSTEM = "You answer in one sentence, and never say why. " * 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "llama"
    make_random_model(folder, *SHAPE.split())
    return str(folder)


def turn(text: str, *before: dict[str, str], system: str = SYSTEM) -> list[dict[str, str]]:
    return [*(before or [{"role": "system", "content": system}]), {"role": "user", "content": text}]


LONG = "Because. " * 40
