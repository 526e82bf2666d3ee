"""A module imports only from lower floors, and design.md shows the floors as they are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mlx_flash"

FLOORS = [
    ["errors"],
    [
        "config",
        "checkpoint.safetensors",
        "storage.pagecache",
        "residency.memory",
        "streaming.swap",
        "integration.gotemplate",
        "telemetry",
        "monitor.system",
        "monitor.terminal",
        "streaming.arrays",
        "streaming.dropped",
        "kv.folder",
        "kv.wear",
        "kv.stats",
        "kv.history",
        "kv.callers",
        "checkpoint.identity",
        "kv.store_queue",
        "kv.store_sessions",
    ],
    [
        "storage.placement",
        "storage.source",
        "kv.options",
        "kv.shared",
        "kv.lone",
        "checkpoint.sources",
        "checkpoint.writer",
        "integration.modelfile",
        "monitor.state",
        "kv.store_files",
    ],
    ["checkpoint.layout", "monitor.experts", "kv.store_index", "kv.layout", "kv.memory"],
    [
        "checkpoint.calls",
        "checkpoint.fingerprint",
        "checkpoint.renewal",
        "storage.reader",
        "streaming.slots",
        "monitor.glyphs",
        "monitor.history",
        "conversation",
        "kv.store_recovery",
    ],
    ["checkpoint.experts", "kv.store_access"],
    [
        "checkpoint.units",
        "checkpoint.order",
        "storage.probe",
        "residency.sizes",
        "streaming.stream",
        "kv.pages",
        "monitor.render",
        "monitor.watch",
        "kv.store_writer",
    ],
    [
        "checkpoint.pack",
        "checkpoint.copies",
        "residency.popularity",
        "streaming.eviction",
        "kv.slots",
        "streaming.layers",
        "monitor.app",
        "kv.store",
        "residency.kv",
        "residency.spread",
    ],
    ["checkpoint.derived", "streaming.pool", "residency.plan", "kv.ring", "kv.budget", "kv.files"],
    ["streaming.stage", "streaming.lookahead", "residency.assemble", "residency.machine", "kv.pool"],
    ["streaming.experts", "residency.search", "kv.cache"],
    ["streaming.engine", "kv.leaves", "kv.kept", "streaming.trace", "residency.headroom"],
    ["streaming.status", "streaming.facade", "kv.prefixes"],
    ["model"],
    ["arguments", "report", "integration.mlx_lm", "integration.server"],
    ["commands.common", "integration.lmstudio"],
    ["commands.generate", "commands.plan", "commands.mlx_lm", "commands.pack", "commands.cache"],
    ["commands.run"],
    ["cli"],
]
FREE = {"__init__", "__main__"}
"""Package fronts: they re-export and start, and hold no code."""


def modules() -> dict[str, Path]:
    paths = {path: ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    return {name: path for path, name in paths.items() if name.rsplit(".", 1)[-1] not in FREE}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module and node.module.startswith("mlx_flash."):
                found.add(node.module.removeprefix("mlx_flash."))
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("mlx_flash.") for alias in node.names if "mlx_flash." in alias.name}
    return found


def test_every_module_has_a_floor() -> None:
    assert sorted(modules()) == sorted(name for floor in FLOORS for name in floor)


def test_modules_import_only_from_lower_floors() -> None:
    rank = {name: i for i, floor in enumerate(FLOORS) for name in floor}
    wrong = [
        f"{name} (floor {rank[name]}) imports {other} (floor {rank[other]})"
        for name, path in modules().items()
        for other in imports(path) & rank.keys()
        if rank[other] >= rank[name]
    ]
    assert not wrong


def test_every_module_is_used() -> None:
    used = set().union(*(imports(path) for path in PACKAGE.rglob("*.py")))
    assert set(modules()) - used <= {"cli", "integration.lmstudio"}  # what users name


def test_the_design_document_names_every_module() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    missing = [name for name in modules() if not re.search(rf"\b{name.rsplit('.', 1)[-1]}\.py\b", text)]
    assert not missing


def test_nothing_catches_everything() -> None:
    """No broad ``except`` outside the command line's last line."""
    broad = []
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                kind = ast.unparse(node.type) if node.type else "everything"
                reraises = isinstance(node.body[-1], ast.Raise)
                if kind in {"everything", "Exception", "BaseException"} and not reraises:
                    broad.append((name, node.lineno))
    assert all(name == "cli" for name, _ in broad)
    assert len(broad) <= 1
