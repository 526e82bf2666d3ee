"""Every command that the documents name exists, and has the flags that they give it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest

from children import ROOT
from mlx_flash.commands.arguments import make_parser

DOCUMENTS = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")} - {ROOT / "CHANGELOG.md"})
SPANS = re.compile(r"^```(?:bash|console|text)\n(.*?)^```$|`([^`\n]+)`", re.M | re.S)
KINDS = ("mlx-flash ", "python scripts/", "python benchmarks/", "make ", "pytest tests")


def commands() -> Iterator[tuple[str, str]]:
    for document in DOCUMENTS:
        for block, span in SPANS.findall(document.read_text(encoding="utf-8")):
            for line in (block or span).replace("\\\n", " ").splitlines():
                if (line := line.strip().removeprefix("$ ")).startswith(KINDS):
                    yield str(document.relative_to(ROOT)), re.split(r"\s(?:#|\||>|&&|;)", line)[0]


def problem(command: str) -> str | None:
    """Return what is wrong with a command; None if nothing is."""
    try:
        words = shlex.split(command)
    except ValueError:
        return None  # a part of a sentence
    flags = [re.split("[=/]", word)[0] for word in words if re.match(r"--[a-z]", word)]
    if words[0] == "mlx-flash":
        if words[1].startswith("-") or not words[1].islower():
            return None
        known = subcommand_flags(words[1])
        if known is None:
            return f"there is no subcommand {words[1]}"
        flags = [] if words[1] == "exec" else flags
    elif words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        return None if words[1] in targets else f"there is no target {words[1]}"
    elif words[0] == "pytest":
        places = [word for word in words[1:] if word.startswith("tests")]
        return next((f"{place} does not exist" for place in places if not (ROOT / place).exists()), None)
    else:
        if not (ROOT / words[1]).is_file():
            return f"{words[1]} does not exist"
        known = set(re.findall(r"--[a-z][a-z0-9-]*", (ROOT / words[1]).read_text() + shared_flags()))
    return next((f"there is no flag {flag}" for flag in flags if flag not in known), None)


def subcommand_flags(name: str) -> set[str] | None:
    try:
        _, parser = make_parser(name)
    except SystemExit:
        return None
    return parser and set(parser._option_string_actions)


def shared_flags() -> str:
    """Return the text of modules that add flags for several scripts and benchmarks."""
    files = [*(ROOT / "benchmarks").glob("*.py"), ROOT / "scripts" / "stress.py"]
    return "".join(text for text in (file.read_text() for file in files) if "add_argument" in text)


def test_every_command_of_the_documents_exists() -> None:
    found = sorted(set(commands()))
    assert len(found) > 50
    wrong = [f"{document}: {command}: {why}" for document, command in found if (why := problem(command))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "command", ["mlx-flash fly", "mlx-flash plan --wings 2", "make coffee", "pytest tests/none.py"]
)
def test_a_wrong_command_is_noticed(command: str) -> None:
    assert problem(command)
