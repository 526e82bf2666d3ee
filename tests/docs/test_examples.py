"""Tests of the examples: each runs, and its text is that of mlx-lm."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

import children
import mlx_flash
from adapters import save_adapter
from children import ROOT
from live import ENV, free_port, live, served
from mlx_flash import FlashLLM
from mlx_flash.server import loaded
from saved_models import random_model_fixture
from scripted import make_scripted_model, saying

EXAMPLES = ROOT / "examples"
SHAPE = "--layers 4 --hidden-size 256 --intermediate-size 704 --heads 8 --kv-heads 4 --vocab-size 1000"

model_dir = random_model_fixture(SHAPE, "llama")


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    yield
    mlx_flash.remove_flash_patch()


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run an example in this process. Return its output and the bytes that its last model read for streamed layers."""

    def run(name: str, *arguments: object) -> tuple[str, int]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        left = runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        model = left["model"]
        num_bytes = 0
        if isinstance(model, FlashLLM):
            assert model.engine is not None
            num_bytes = model.plan.streaming.read_bytes * (model.engine.stream.stats.num_acquired > 0)
            model.close()
        return capsys.readouterr().out, num_bytes

    return run


OF_MLX_LM = {
    "quick_start.py": "--flash --ram-budget-gb min --max-tokens 20",
    "adapter.py": "--adapter-path ADAPTER --max-tokens 16",
    "batch.py": "--max-tokens 8 --context-length 1024 Why? And-the-sea? And-grass-green?",
    "judge.py": "--tokens 64 FOLDER/sea FOLDER/sky FOLDER/long",
    "long_document.py": "--ram-budget-gb 1 --context-length 4096 --max-tokens 8 FOLDER/long Who? Where?",
}
"""Arguments of the examples whose output is the same with mlx-lm alone."""


@pytest.mark.parametrize("name", OF_MLX_LM)
def test_the_output_is_that_of_mlx_lm(
    name: str, model_dir: Path, tmp_path: Path, say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file, number in (("sea", 3), ("sky", 5), ("long", 200)):
        (tmp_path / file).write_text(f"the {file} is blue " * number)
    adapter = save_adapter(tmp_path / "adapter", model_dir, "lora", 3)
    words = OF_MLX_LM[name].replace("FOLDER", str(tmp_path)).replace("ADAPTER", str(adapter)).split()
    found, num_bytes = say(name, "--model", model_dir, *words)
    mlx_flash.remove_flash_patch()
    monkeypatch.setattr(mlx_flash, "apply_flash_patch", lambda config: None)
    monkeypatch.setattr(mlx_flash, "load", lambda path, config: mlx_lm.load(path))
    monkeypatch.setattr(mlx_flash, "stream_generate", mlx_lm.stream_generate)
    expected, nothing = say(name, "--model", model_dir, *words)
    assert found == expected and len(found) > 10 and nothing == 0 < num_bytes + (name == "long_document.py")


def test_context_manager(model_dir: Path, say: Any) -> None:
    out, num_bytes = say("context_manager.py", "--model", model_dir)
    streamed, resident = out.removeprefix("streamed: ").rstrip("\n").split("\nresident: ")
    assert streamed == resident != ""
    assert num_bytes == 0, "the last model is mlx-lm's own"


def test_openai_client(model_dir: Path, tmp_path: Path, say: Any) -> None:
    pytest.importorskip("openai")
    port = free_port()
    server = ["serve", "--model", str(model_dir), "--ram-budget-gb", "0.4", "--port", str(port)]
    with served(["-m", "mlx_flash", *server], port, tmp_path / "log"):
        client = [EXAMPLES / "openai_client.py", "Why is the sky blue?", "--max-tokens", "20"]
        found = children.run(*client, "--port", port)
    assert found.stdout.decode() == say("quick_start.py", "--model", model_dir, "--max-tokens", 20)[0]


def test_agent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model whose words are written down lists the files, asks for one that is missing, reads one, and answers."""
    pytest.importorskip("openai")
    calls = [{"name": "list_files", "arguments": {}}]
    calls += [{"name": "read_file", "arguments": {"name": name}} for name in ("no.txt", "b.txt")]
    words = [*(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls), "It is b."]
    prompts: list[str] = []

    def sampler_of(sampling: Any, tokenizer: Any, vocab_size: int) -> Any:
        said = tokenizer.encode(words[prompts[-1].count("<|tool|>")], add_special_tokens=False)
        tokens = iter([*said, *sorted(tokenizer.eos_token_ids)])
        return lambda logprobs: mx.array([next(tokens)])

    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"This is {name}.")
    model = make_scripted_model(tmp_path / "model")
    with live(str(model), context_length=4096) as server, saying("", prompts), pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaded, "sampler_of", sampler_of)
        arguments = ["agent.py", "--folder", tmp_path, "--port", server.port, "Which file is b?"]
        patch.setattr(sys, "argv", [*map(str, arguments)])
        left = runpy.run_path(str(EXAMPLES / "agent.py"), run_name="__main__")
    results = [message["content"] for message in left["messages"] if message["role"] == "tool"]
    assert results == ["a.txt\nb.txt", "there is no file no.txt", "This is b."]
    assert capsys.readouterr().out.splitlines()[-1] == "It is b."


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")  # by the tiny model
def test_pictures(tmp_path: Path, say: Any) -> None:
    mlx_vlm = pytest.importorskip("mlx_vlm")
    from mlx_vlm.prompt_utils import apply_chat_template

    from tiny_vlms import picture, save, write_processor

    folder, png = write_processor(save(tmp_path / "model", "qwen2_vl")), str(picture(tmp_path))
    found, _ = say("pictures.py", "--model", folder, "--prompt", "one two", "--max-tokens", 8, png)
    model, processor = mlx_vlm.load(str(folder))
    prompt = apply_chat_template(processor, model.config, "one two", num_images=1)
    assert found.strip() and found == mlx_vlm.generate(model, processor, prompt, image=[png], max_tokens=8).text + "\n"


def test_every_example_has_a_test() -> None:
    """Every example is named in a test of this file, and is short."""
    programs = {path.name: path.read_text() for path in EXAMPLES.glob("*.py")}
    text = Path(__file__).read_text()
    assert all(f'"{name}"' in text for name in programs)
    assert max(len(program.splitlines()) for program in programs.values()) < 50
    assert {path.name for path in EXAMPLES.iterdir()} - programs.keys() - {"__pycache__"} == {"Modelfile", "pair"}


# What LM Studio's engine does with a text model, in the order in which it does it: loads it lazily, to see whether the
# caches of several sequences can be merged, and forgets it; loads it again; works prompts through in chunks by itself,
# into a cache that it keeps copies of; lets mlx-lm generate.
ENGINE = """
import copy, json, os, sys
from pathlib import Path

import mlx.core as mx
import mlx_lm
import mlx_lm.utils
from mlx_lm.generate import generation_stream, stream_generate
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

path, CHUNK = Path(sys.argv[1]), 8
probed, _ = mlx_lm.load(path, lazy=True)
assert all(hasattr(entry, "merge") for entry in make_prompt_cache(probed))
del probed
model, tokenizer = mlx_lm.utils.load(path, lazy=False)
history, prompt, found = LRUPromptCache(max_size=10), [], []
for turn in ["Why is the sky blue?", " And the sea, what lives in it?"]:
    prompt += tokenizer.encode(turn)
    cache, rest = history.fetch_nearest_cache("session", prompt)
    is_cached = cache is not None
    cache = cache or make_prompt_cache(model, None)
    left = mx.array(rest[:-1])
    with mx.stream(generation_stream):
        while left.size:
            model(left[:CHUNK][None], cache=cache)
            mx.eval([entry.state for entry in cache])
            left = left[CHUNK:]
            mx.clear_cache()
    responses = stream_generate(model, tokenizer, mx.array(rest[-1:]), max_tokens=10, prompt_cache=cache)
    tokens = [response.token for response in responses]
    found.append([is_cached, tokens])
    prompt += tokens
    history.insert_cache("session", prompt[: cache[0].offset], [copy.deepcopy(entry) for entry in cache])
engine = getattr(model, "engine", None)
streamed = None if engine is None else [engine.stream.stats.num_acquired, model.plan.streaming.read_bytes]
print(json.dumps([type(model).__name__, streamed, found]), flush=True)
os._exit(0)  # MLX may abort when Python ends
"""


Environment = tuple[Path, Path]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """(Python, site-packages) of an environment whose lower layer is linked by a sitecustomize, as LM Studio's are."""
    base = tmp_path_factory.mktemp("environment")
    venv.create(base, with_pip=False, symlinks=True)
    python = base / "bin/python"
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site_packages = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    layer = Path(mlx_lm.__file__).parents[1]
    lines = f"import site, sys\nsite.addsitedir({str(layer)!r})\nsys.path.append({str(ROOT)!r})\n"
    (site_packages / "sitecustomize.py").write_text(lines)
    return python, site_packages


def run_in(environment: Environment, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program there. PYTHONPATH comes before the sitecustomize that some systems have themselves."""
    python, site_packages = environment
    env = ENV | variables | {"PYTHONPATH": str(site_packages)}
    done = subprocess.run([str(python), "-c", *map(str, words)], capture_output=True, text=True, env=env, timeout=200)
    assert done.returncode == 0, done.stderr
    return done


def engine_like(environment: Environment, model_dir: Path, **variables: str) -> Any:
    return json.loads(run_in(environment, ENGINE, model_dir, **variables).stdout)


def test_a_program_that_loads_like_lm_studio(model_dir: Path, environment: Environment) -> None:
    _, site_packages = environment
    kind, nothing, *expected = engine_like(environment, model_dir)
    assert kind == "Model" and nothing is None
    assert [cached for cached, _ in expected[0]] == [False, True], "the second turn goes on from a copy of the cache"
    shutil.copy(EXAMPLES / "lmstudio_hook.py", site_packages / "mlx_flash_hook.py")
    (site_packages / "mlx_flash_hook.pth").write_text("import mlx_flash_hook\n")
    settings = {"RAM_BUDGET_GB": "min", "CONTEXT_LENGTH": "2048", "PREFILL_STEP_SIZE": "64"}
    variables = {f"MLX_FLASH_{name}": value for name, value in settings.items()}
    kind, streamed, *found = engine_like(environment, model_dir, **variables)
    assert kind == "FlashLLM" and min(streamed) > 0
    assert found == expected
    kind, nothing, *found = engine_like(environment, model_dir, MLX_FLASH_ENABLED="false")
    assert kind == "Model" and found == expected


def test_a_hook_that_cannot_start_steps_aside(model_dir: Path, environment: Environment) -> None:
    _, site_packages = environment
    shutil.copy(EXAMPLES / "lmstudio_hook.py", site_packages / "mlx_flash_hook.py")
    (site_packages / "mlx_flash_hook.pth").write_text("import mlx_flash_hook\n")
    code = "import sys, mlx_lm; print(type(mlx_lm.load(sys.argv[1])[0]).__name__)"
    without = "import sys; sys.modules['greenlet'] = None; "
    for program, variables, reason in (
        (without + code, {}, "ModuleNotFoundError: import of greenlet halted"),
        (code, {"MLX_FLASH_RAM_BUDGET_GB": "much"}, "ConfigError"),
    ):
        done = run_in(environment, program, model_dir, **variables)
        assert done.stdout == "Model\n"
        assert done.stderr.count("mlx-flash does not stream models here: " + reason) == 1
