"""Tests of the documentation: every code block runs as written, on a tiny model instead of the reader's own."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import mlx_lm
import pytest

import children
from adapters import save_adapter
from children import ROOT
from live import ENV, free_port, served
from mlx_flash import FlashConfig
from mlx_flash.modelfile.parse import read_modelfile
from models import make_random_model

DOCUMENTS = ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
SHAPE = "--layers 4 --hidden-size 64 --intermediate-size 192 --heads 4 --kv-heads 2 --vocab-size 1000"
QUESTION = "Why is the sky blue?"

NOT_RUN = {
    "README.md": ["builds a model, and runs every test"],
    "docs/clients.md": ["installs"],
    "docs/features.md": ["needs a model and minutes", "needs mlx-vlm", "needs several machines"],
    "docs/getting-started.md": ["installs", "downloads"],
    "docs/server.md": ["needs lm-eval"],
}
"""Reasons why blocks do not run, in the order of their comments. Add new reasons here."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its place, language and text, and the reason why it does not run."""

    document: str
    line: int
    language: str
    text: str
    not_run: str | None

    @property
    def serves(self) -> bool:
        return "mlx-flash serve" in self.text


FENCE = re.compile(r"(?:^<!-- not run: (?P<why>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)


def blocks_of(document: str) -> list[Block]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return [
        Block(document, text.count("\n", 0, found.start()) + 1, found["language"], found["text"], found["why"])
        for found in FENCE.finditer(text)
    ]


PLAIN_COMMAND = re.compile(r"mlx-flash( +([\w./-]+|\"[\w ?.]+\"))+ *(#.*)?")
"""A line that asks a shell for no more than to start the program."""

BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]


def runnable(language: str, without: str = "\0") -> pytest.MarkDecorator:
    """Run a test with every block of a language that works by itself."""
    blocks = [b for b in BLOCKS if b.language == language and not (b.not_run or b.serves or without in b.text)]
    return pytest.mark.parametrize("block", blocks, ids=[f"{block.document}:{block.line}" for block in blocks])


def the_block(document: str, words: str) -> Block:
    (block,) = [b for b in BLOCKS if b.document == document and words in b.text and not b.not_run]
    return block


@dataclass(frozen=True)
class Desk:
    """A working folder, the values of placeholders, and what was printed by blocks that need not run twice."""

    folder: Path
    names: dict[str, str]
    environment: dict[str, str]
    printed: dict[Block, str]

    def own(self, text: str) -> str:
        """Return the text with the placeholders filled in."""
        for name, value in self.names.items():
            text = re.sub(rf"\b{name}\b", value, text)
        return text

    def run_once(self, block: Block) -> str:
        if block not in self.printed:
            self.printed[block] = self.run(block)
        return self.printed[block]

    def run(self, block: Block) -> str:
        text, given = self.own(block.text), "Hello\nq\n"
        if block.language == "python":
            done = children.run("-c", text, stdin=given, cwd=self.folder, env=self.environment)
        elif all(PLAIN_COMMAND.fullmatch(line) for line in text.splitlines()):
            return "".join([self._run_plainly(line) for line in text.splitlines()])
        else:
            command = ["bash", "-euo", "pipefail", "-c", text]
            options = {"cwd": self.folder, "env": self.environment, "timeout": 200}
            done = subprocess.run(command, input=given.encode(), capture_output=True, **options)
        assert done.returncode == 0, f"{text}\n{done.stdout.decode()}\n{done.stderr.decode()}"
        return done.stdout.decode()

    def _run_plainly(self, line: str) -> str:
        """Run what a shell would run, in a process that has imported mlx-lm."""
        words = shlex.split(line, comments=True)
        done = children.run("-m", "mlx_flash", *words[1:], stdin="Hello\nq\n", cwd=self.folder, env=self.environment)
        assert done.returncode == 0, f"{line}\n{done.stdout.decode()}\n{done.stderr.decode()}"
        return done.stdout.decode()


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    folder = tmp_path_factory.mktemp("desk")
    model = folder / "model"
    make_random_model(model, *SHAPE.split())
    for name in ("examples", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    site_packages = folder / "site-packages"
    site_packages.mkdir()
    (site_packages / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(site_packages)!r})\n")
    names = {
        "DIR_OR_REPO": str(model),
        "ADAPTER": str(save_adapter(folder / "adapter", model, "lora", 3)),
        "PACKED": str(folder / "packed"),
        "SITE_PACKAGES": str(site_packages),
        "ENGINE_PYTHON": f"env PYTHONPATH={site_packages}:{ROOT} {sys.executable}",
        "8080": str(free_port()),
    }
    own = {"XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "XDG_RUNTIME_DIR": str(folder)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {key: value for key, value in ENV.items() if not key.startswith("MLX_FLASH_")}
    desk = Desk(folder, names, environment | own | {"PATH": path}, {})
    (modelfile,) = {block.text for block in BLOCKS if block.language == "dockerfile"}
    # Samples of a random model may end at once: these are the same in every run.
    (folder / "Modelfile").write_text(f"{desk.own(modelfile)}PARAMETER seed 1\n")
    return desk


@contextmanager
def server(desk: Desk) -> Iterator[None]:
    """Run the documented server command while the block is open."""
    command = desk.own(the_block("docs/server.md", "mlx-flash serve").text).split()
    with served(["-m", "mlx_flash", *command[1:]], int(desk.names["8080"]), desk.folder / "log"):
        yield


def stock_text(desk: Desk, prompt: str, max_tokens: int) -> str:
    model, tokenizer, *_ = mlx_lm.load(desk.names["DIR_OR_REPO"])
    return mlx_lm.generate(model, tokenizer, prompt, max_tokens=max_tokens)


def stock_answer(desk: Desk, max_tokens: int) -> str:
    _, tokenizer, *_ = mlx_lm.load(desk.names["DIR_OR_REPO"])
    messages = [{"role": "user", "content": QUESTION}]
    return stock_text(desk, tokenizer.apply_chat_template(messages, add_generation_prompt=True), max_tokens)


def test_every_block_names_its_language() -> None:
    assert {block.language for block in BLOCKS} <= {"python", "bash", "dockerfile", "toml", "text"}
    for document in DOCUMENTS:
        fences = re.findall(r"^```", (ROOT / document).read_text(encoding="utf-8"), re.M)
        assert len(fences) == 2 * len(blocks_of(document))
        assert [block.not_run for block in blocks_of(document) if block.not_run] == NOT_RUN.get(document, [])


def test_one_command_starts_the_server() -> None:
    assert {block.text for block in BLOCKS if block.serves} == {the_block("docs/server.md", "mlx-flash serve").text}


@runnable("python", without="8080")
def test_python(block: Block, desk: Desk) -> None:
    assert len(desk.run_once(block).strip()) > 10


@runnable("bash", without="SITE_PACKAGES")
def test_bash(block: Block, desk: Desk) -> None:
    assert len(desk.run_once(block).strip()) > 10


def test_the_patch_gives_the_text_of_mlx_lm(desk: Desk) -> None:
    assert desk.run_once(the_block("README.md", "response.text")) == stock_text(desk, QUESTION, 100)


def test_the_first_command_gives_the_text_of_mlx_lm(desk: Desk) -> None:
    first = next(b for b in BLOCKS if b.language == "bash" and "mlx-flash generate" in b.text and not b.not_run)
    assert desk.run_once(first) == f"{stock_answer(desk, 100)}\n"


def test_clients_get_the_text_of_mlx_lm(desk: Desk) -> None:
    with server(desk):
        for client in ("openai", "ollama", "anthropic"):
            pytest.importorskip(client)
            assert desk.run(the_block("docs/server.md", f"import {client}")) == f"{stock_answer(desk, 50)}\n"


def test_the_modelfile_sets_parameters_and_budget(desk: Desk) -> None:
    modelfile = read_modelfile(desk.folder / "Modelfile")
    assert not modelfile.notes
    assert (modelfile.base, modelfile.parameters["num_predict"]) == (desk.names["DIR_OR_REPO"], 50)
    assert FlashConfig.resolve(modelfile=modelfile.flash, environment={}).ram_budget_gb == 4


@runnable("toml")
def test_settings_files(block: Block, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(block.text)
    assert FlashConfig.resolve(file=tmp_path / "config.toml", environment={}) != FlashConfig()


def test_the_hook_works_from_install_to_removal(desk: Desk) -> None:
    guide = "docs/clients.md"
    make, check, end = (the_block(guide, words) for words in ("cp examples", "ENGINE_PYTHON -c", "rm SITE"))
    desk.run(make)
    assert desk.run(check) == "<class 'mlx_flash.model.FlashLLM'>\n"
    desk.run(end)
    assert desk.run(check) == "<class 'mlx_lm.models.llama.Model'>\n"
