"""Tests of the files that make tests faster: they may not change what a test sees."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

STARTUP = Path(__file__).parent / "startup"
SHIM = STARTUP / "bin" / "g++"
HEADER = "mlx/backend/cpu/compiled_preamble.h"


@pytest.fixture
def sitecustomize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("startup", STARTUP / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])  # its finder leaves with this test
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "CACHE", tmp_path / "cache")
    return module


def test_names_are_listed_once_for_each_state_of_a_folder(sitecustomize: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    calls: list[tuple[Any, ...]] = []

    def scan(*arguments: Any) -> dict[str, int]:
        calls.append(arguments)
        return {"names": len(calls)}

    for _ in range(2):
        assert sitecustomize.keep_lists(scan)(folder, prefix="models") == {"names": 1}
    assert calls == [(folder, "models")]
    assert sitecustomize.keep_lists(scan)(folder) == {"names": 2}
    os.utime(folder, ns=(0, 0))
    assert sitecustomize.keep_lists(scan)(folder) == {"names": 3}


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")
def test_a_precompiled_header_gives_the_same_machine_code(tmp_path: Path) -> None:
    header = tmp_path / "include" / HEADER
    header.parent.mkdir(parents=True)
    header.write_text("#include <cmath>\ninline float twice(float a) { return 2 * std::sin(a); }\n")
    source = tmp_path / "kernel.cpp"
    source.write_text(f'#include "{HEADER}"\nextern "C" float kernel(float a) {{ return twice(a); }}\n')
    shim = tmp_path / "bin" / "g++"  # a copy, whose headers go to this test's folder
    shim.parent.mkdir()
    shutil.copy(SHIM, shim)
    flags = ["-std=c++17", "-O3", "-Wall", "-fPIC", "-shared", "-I", str(tmp_path / "include"), str(source), "-o"]
    plain = os.pathsep.join(path for path in os.environ["PATH"].split(os.pathsep) if Path(path) != SHIM.parent)
    for name, path in [("plain", plain), ("first", f"{shim.parent}:{plain}"), ("again", f"{shim.parent}:{plain}")]:
        subprocess.run(["g++", *flags, str(tmp_path / name)], check=True, env={**os.environ, "PATH": path})
    assert len(list(tmp_path.glob(f"__pycache__/headers-*/{HEADER}.gch"))) == 1
    assert (tmp_path / "first").read_bytes() == (tmp_path / "plain").read_bytes()
    assert (tmp_path / "again").read_bytes() == (tmp_path / "plain").read_bytes()
