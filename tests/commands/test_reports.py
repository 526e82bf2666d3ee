"""Templates of reports: every place names a fact that there is, and only what is unknown is left out."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from string import Formatter
from typing import Any

from mlx_flash.commands import doctor, models, report, run, verify
from mlx_flash.commands.arguments import parse_arguments
from mlx_flash.config import FlashConfig
from mlx_flash.engine.prepare import prepare
from mlx_flash.monitor.words import filled
from models import LLAMA
from saved_models import model_fixture


def unknown(template: str, facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names in a template that no fact has. A fact that is None may have any parts."""
    for _, name, _, _ in Formatter().parse(template):
        found: Any = facts
        for part in name.split(".") if name else ():
            if found is not None and part not in found:
                yield str(name)
                break
            found = None if found is None else found[part]


folder = model_fixture(LLAMA, name="llama")


def measured(folder: Path, command: Any, name: str, *flags: object) -> dict[str, Any]:
    out = io.StringIO()
    words = [name, folder, *flags, "--ram-budget-gb", "min", "--no-telemetry", "--json"]
    assert command(parse_arguments([str(word) for word in words]), out) == 0
    return dict(json.loads(out.getvalue()))


def test_every_place_of_a_report_has_a_fact(folder: Path, tmp_path: Path) -> None:
    prepared = prepare(folder, FlashConfig(ram_budget_gb="min"), writes=False)
    facts = report.planning_to_json("llama", prepared.layout, prepared.plan)
    facts |= report._more_facts(prepared.layout, prepared.plan)
    found = measured(folder, doctor.doctor, "doctor", "-m", 2)["run"]
    run_facts = {**found, "footprint": 1, "planned": {**found["plan"], "first_seconds": 1.0}}
    receipt, out = measured(folder, verify.verify, "verify", "-m", 1), io.StringIO()
    models.pack(parse_arguments(["pack", str(folder), str(tmp_path / "packed"), "--json"]), out)
    machine = asdict(doctor.examine(folder, FlashConfig()))
    for template, known, added in (
        (report.PLAN, facts, ""),
        (report.RUN + run.BRIEF, run_facts, "is_over step"),
        (verify.VERIFICATION, receipt, "is_equal wrong compared layers result digest"),
        (doctor.MACHINE, machine, "num_processors lost"),
        (models.PACKED, json.loads(out.getvalue()), "is_equal files compressed is_stock"),
    ):
        assert not [*unknown(template, {**known, **dict.fromkeys(added.split())})]
    assert [*unknown("{tokens_per_hour}{plan.tokens_per_hour}", found)] == ["tokens_per_hour", "plan.tokens_per_hour"]


def test_parts_with_unknown_facts_are_left_out() -> None:
    template = """
Read: {read.nbytes:size}, {files:file}, {is_cached:from memory}, {share:percent} of it
Time: {seconds:duration}
"""
    facts = {"read": {"nbytes": 3e6}, "files": ["a", "b"], "is_cached": True, "share": 0, "seconds": None}
    assert list(filled(template, facts)) == [("Read", "3.0 MB, 2 files, from memory")]
    assert list(filled("Loss: {share:percent}, {files:file}", facts)) == []
