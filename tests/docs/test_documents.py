"""Documents name only commands, flags, fields, files, links and pictures that exist, and stay short."""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import mlx_lm
import pytest

from children import ROOT
from mlx_flash import FlashConfig
from mlx_flash.commands.arguments import COMMANDS, make_parser, parse_arguments
from mlx_flash.server.serving import OPEN_PATHS

PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")})
OF_TODAY = [*(page for page in PAGES if page.name != "CHANGELOG.md"), ROOT / "examples" / "pair" / "README.md"]
"""Pages that speak of the code as it is. The changelog also names what is gone."""

FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.M | re.S)
KINDS = ("mlx-flash ", "python scripts/", "python benchmarks/", "make ", "pytest tests")

FOREIGN_FLAGS = {
    "--extensions", "--openai-api-base", "--openai-api-key", "--hostfile", "--backend", "--over", "--hosts",
    "--output-hostfile", "--auto-setup", "--no-deps", "--target", "--tasks", "--batch_size", "--model_args",
    "--test", "--size",
}  # fmt: skip
"""Flags of other programs: pip, mlx.launch, mlx.distributed_config, lm_eval, aider, mlx-lm-lora."""

FOREIGN_NAMES = {
    "api_key", "add_bos_token", "model_provider", "web_search", "wire_api", "env_key", "stream_idle_timeout_ms",
    "num_concurrent", "sw_vers", "wired_limit_mb", "auto_map", "mlx_flash_hook", "CLAUDE_CODE_ATTRIBUTION_HEADER",
    "CLAUDE_STREAM_IDLE_TIMEOUT_MS", "ENGINE_PYTHON", "SITE_PACKAGES", "POSIX_FADV_WILLNEED", "ANTHROPIC_BASE_URL",
    "ANTHROPIC_API_KEY", "model_providers",
}  # fmt: skip
"""Names of clients, lm_eval, transformers and systems, and those that a guide makes."""

WORDS_AT_MOST, README_LINES, README_WORDS, CHANGELOG_LINES = 25_000, 120, 900, 200


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def spans() -> Iterator[tuple[str, str]]:
    """Yield (page, code) for each span, which may go over lines, and each block of a shell or of text."""
    for page in OF_TODAY:
        text, name = text_of(page), str(page.relative_to(ROOT))
        for language, block in FENCE.findall(text):
            if language in ("bash", "console", "text"):
                yield name, block
        for paragraph in FENCE.sub("", text).split("\n\n"):
            for span in re.findall(r"`([^`]+)`", paragraph):
                yield name, " ".join(span.split())


def commands() -> Iterator[tuple[str, str]]:
    for page, code in spans():
        for line in code.replace("\\\n", " ").splitlines():
            command = line.strip().removeprefix("$ ").removeprefix(".venv/bin/")
            if command.startswith(KINDS):
                yield page, re.split(r"\s(?:#|\||>|&&|;)", command)[0]


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


@functools.cache
def subcommand_flags(name: str) -> frozenset[str] | None:
    try:
        _, parser = make_parser(name)
    except SystemExit:
        return None
    return parser and frozenset(parser._option_string_actions)


def shared_flags() -> str:
    """Return the text of modules that add flags for several benchmarks."""
    files = (ROOT / "benchmarks").glob("*.py")
    return "".join(text for text in (file.read_text() for file in files) if "add_argument" in text)


def sources(*folders: str) -> str:
    return "".join(text_of(path) for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))


def unknown_flag(code: str) -> str | None:
    known = {flag for name in COMMANDS for flag in subcommand_flags(name) or ()} | FOREIGN_FLAGS
    known |= set(re.findall(r"--[a-z][a-z0-9-]*", ours()))
    return next((flag for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]+", code) if flag not in known), None)


@functools.cache
def ours() -> str:
    return sources("mlx_flash", "scripts", "benchmarks", "tests/server", "tests/engine") + text_of(ROOT / "Makefile")


@functools.cache
def names() -> frozenset[str]:
    """The names of the code, and of the mlx-lm that it patches."""
    stock = "".join(path.read_text() for path in Path(mlx_lm.__file__).parent.rglob("*.py"))
    return frozenset(re.findall(r"\w+", ours() + stock)) | FOREIGN_NAMES


NAMES = re.compile(
    r"(?<![\w/.-])(?:_?[a-z][a-z0-9]*(?:_[a-z0-9]+)+|[A-Z][a-z]\w*[a-z][A-Z]\w*|[A-Z0-9]+(?:_[A-Z0-9]+)+)(?![\w/-])"
)


def unknown_name(code: str) -> str | None:
    """Return a name such as ``kv_prefixes``, ``DiskKVCache`` or ``MLX_FLASH_IO`` that is nowhere in the code."""
    for name in NAMES.findall(code):
        if name not in names() and not name.startswith(("FLASH_", "MLX_FLASH_")):
            return name
    settings = {field.name.upper() for field in fields(FlashConfig)}
    for name in re.findall(r"(?<!\w)(?:MLX_)?FLASH_([A-Z_]+)", code):
        if name not in settings | {"KEY"} and f"FLASH_{name}" not in ours():
            return f"FLASH_{name}"
    return None


PATHS = re.compile(r"(?<![\w@~./<-])(?:[\w.-]+/)+[\w.-]+\.(?:py|json|md|txt|toml|yml)\b|(?<![\w/.])\w+\.py\b")
FOLDERS = ("", "mlx_flash", "tests", "docs", "scripts", "benchmarks", "examples", "tests/server")


def missing_file(code: str) -> str | None:
    """Return a path in the code that leads to nothing."""
    for path in PATHS.findall(code):
        beside = any((ROOT / folder / path).exists() for folder in FOLDERS)
        if not (beside or any(path.endswith(f"/{name}") or path == name for name in WRITTEN)):
            return path
    return None


WRITTEN = {"config.json", "receipt.json", "config.toml", "opencode.json", "mlx_flash_hook.py", "hosts.json", "hello.py"}
WRITTEN |= {"model.safetensors.index.json", "sitecustomize.py", "selftest.json", "disks.json"}
WRITTEN |= {"last.json", "tokenizer.json", "generation_config.json"}
"""Files that programs write, or that belong to a model."""


def test_every_command_of_the_documents_exists() -> None:
    found = sorted(set(commands()))
    assert len(found) > 50
    wrong = [f"{page}: {command}: {why}" for page, command in found if (why := problem(command))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("look", [unknown_flag, unknown_name, missing_file])
def test_every_flag_field_and_file_of_the_documents_exists(look: Callable[[str], str | None]) -> None:
    wrong = [
        f"{page}: {found} in {code[:60]!r}"
        for page, code in spans()
        if "git show" not in code and (found := look(code))
    ]
    assert not wrong, "\n".join(sorted(set(wrong)))


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_have_targets() -> None:
    for page in (*PAGES, ROOT / "examples" / "pair" / "README.md"):
        for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
            if target.startswith("https://"):
                continue
            path, _, anchor = target.partition("#")
            place = page.parent / path if path else page
            assert place.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in slugs(place), f"{page.name}: {target}: no such heading"
    named = set(
        re.findall(r"\bdocs/[\w./-]+\.(?:md|svg|png)", sources("mlx_flash", "scripts", "examples", "benchmarks"))
    )
    assert named and not [page for page in named if not (ROOT / page).exists()]


def test_the_documents_are_short() -> None:
    counts = {page.name: len(text_of(page).split()) for page in PAGES}
    assert sum(counts.values()) <= WORDS_AT_MOST, counts
    assert counts["README.md"] <= README_WORDS
    for name, lines in (("README.md", README_LINES), ("CHANGELOG.md", CHANGELOG_LINES)):
        assert len(text_of(ROOT / name).splitlines()) <= lines


def test_the_table_of_settings_is_flash_config() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (`[^`]*`|unset) \|", text_of(ROOT / "docs" / "settings.md"), re.M)
    shown = {name: default.strip("`").strip('"') for name, default in rows}
    assert list(shown) == [field.name for field in fields(FlashConfig)]
    for field in fields(FlashConfig):
        word = "balanced" if field.name == "ram_budget_gb" else "unset"
        assert shown[field.name] == (word if field.default is None else str(field.default))


# --- figures ----------------------------------------------------------------------------------------------------------


def rows_of(page: str, head: str) -> list[list[str]]:
    """Return the cells of the table with this beginning of its first line, without its head."""
    text = (ROOT / page).read_text(encoding="utf-8")
    (table,) = [part for part in text.split("\n\n") if part.startswith(head)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def number(text: str) -> float:
    found = re.search(r"[\d.]+", text)
    assert found, text
    return float(found[0])


def agrees(text: str, value: float) -> bool:
    """Return whether the number of a text is the value, rounded to as many places."""
    digits = re.search(r"\d+(?:\.(\d+))?", text)
    return digits is not None and float(digits[0]) == pytest.approx(value, abs=0.51 * 10 ** -len(digits[1] or ""))


def test_readme_has_what_was_measured() -> None:
    rows = rows_of("README.md", "| measured | budget |")
    qwen, gpu = result("limits-qwen-bf16")["summary"], result("dense-bf16-h200")["summary"]["streamed"][0]
    least = qwen["streamed"][0]
    assert float(rows[0][1].split()[0]) == least["budget"] and agrees(rows[0][2], least["bytes_per_token"] / 1e9)
    alone, in_memory = re.findall(r"[\d.]+ s", rows[0][3])
    assert agrees(alone, least["seconds_per_token"]) and agrees(in_memory, qwen["resident"]["seconds_per_token"])
    assert float(rows[1][1].split()[0]) == gpu["budget"] and agrees(rows[1][2], gpu["bytes_per_token"] / 1e9)
    assert agrees(rows[1][3], gpu["seconds_per_token"])
    elsewhere = rows_of("docs/benchmarks.md", "| model | budget | peak | first token of 15 | a token | read a token |")
    for row, there in ((rows[2], elsewhere[2]), (rows[3], elsewhere[0])):
        assert row[1:3] == [there[1], there[5]] and agrees(row[3], number(there[4])), row


# --- workflows, the image, the version --------------------------------------------------------------------------------


def test_a_tag_replaces_the_version() -> None:
    (pattern,) = re.findall(r'sed -i "s/(.*?)/VERSION', (ROOT / ".github" / "workflows" / "release.yml").read_text())
    text = (ROOT / "mlx_flash" / "version.py").read_text()
    assert len(re.findall(pattern, text, re.M)) == 1


def test_the_image_serves_what_its_health_check_asks() -> None:
    text = (ROOT / "Dockerfile").read_text()
    (words,) = re.findall(r"ENTRYPOINT \[(.*)\]", text)
    args = parse_arguments([*re.findall(r'"([^"]+)"', words)[1:], "--model", "qwen3-30b-a3b"])
    (port, path) = re.findall(r"127\.0\.0\.1:(\d+)(/\w+)", text)[0]
    assert (args.command, str(args.port)) == ("serve", port) and path in OPEN_PATHS
    copied = {name for line in re.findall(r"^COPY (.*) /src", text, re.M) for name in line.split()}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert copied == {line[1:] for line in ignored if line.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)


WITH_EVERY_SDIST = {"README.md", "pyproject.toml", "LICENSE", "MANIFEST.in"}
"""What setuptools adds by itself, besides the package."""


def test_what_tests_read_ships_with_them() -> None:
    lines = [line.split() for line in (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()]
    shipped = {name for command, *names in lines if command in ("graft", "include") for name in names}
    tests = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("*.py")))
    read = set(re.findall(r'\bROOT / "([^"/]+)', tests))
    assert {"Makefile", "benchmarks", "docs", "examples", "scripts"} <= read
    assert read <= shipped | WITH_EVERY_SDIST | {"mlx_flash"}
