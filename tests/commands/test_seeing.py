"""Commands on models that see: mlx-vlm's own answers within the budget, plans with towers, receipts with pictures."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_flash import ConfigError, PictureError
from mlx_flash.commands.arguments import parse_arguments
from mlx_flash.commands.doctor import doctor, plan
from mlx_flash.commands.generate import generate
from mlx_flash.commands.run import run as run_command
from mlx_flash.commands.verify import verify
from mlx_flash.commands.vision import is_vision
from mlx_flash.vision import detect

pytestmark = pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")  # by the tiny model

KINDS = {"text": {"model_type": "llama"}, "both": {"model_type": "gemma3", "vision_config": {}}}
KINDS["sees"] = {"model_type": "nothing_of_mlx_lm", "image_token_index": 3}


def run(command: Any, *words: object) -> tuple[int, str]:
    out = io.StringIO()
    flags = ["--ram-budget-gb", "min", "--no-telemetry", "--quiet"]
    return command(parse_arguments([command.__name__, *map(str, words), *flags]), out), out.getvalue()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flags", [[], ["--vision"], ["--no-vision"], ["--image", "x.png"]], ids=" ".join)
@pytest.mark.parametrize("is_installed", [False, True])
def test_the_library_follows_flags_the_model_and_what_is_installed(
    kind: str, flags: list[str], is_installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KINDS[kind]))
    monkeypatch.setattr(detect, "find_spec", lambda name: is_installed or None)
    args = parse_arguments(["generate", "--model", str(tmp_path), *flags])
    asks, must = flags[:1] in (["--vision"], ["--image"]), kind == "sees" and flags != ["--no-vision"]
    for prefers in (False, True):
        if (asks or must) and not is_installed:
            with pytest.raises(ConfigError, match=r"needs mlx-vlm, .* pip install mlx-vlm"):
                is_vision(args, tmp_path, prefers=prefers)
        else:
            wanted = asks or must or (kind == "both" and not flags and prefers and is_installed)
            assert is_vision(args, tmp_path, prefers=prefers) == wanted


def test_a_picture_without_mlx_vlm_is_a_contradiction(tmp_path: Path) -> None:
    args = parse_arguments(["generate", "--model", str(tmp_path), "--image", "x.png", "--no-vision"])
    with pytest.raises(ConfigError, match=r"--image needs mlx-vlm, and --no-vision forbids it"):
        is_vision(args, tmp_path, prefers=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mlx_vlm")
    from tiny_vlms import save, write_processor

    return write_processor(save(tmp_path_factory.mktemp("model"), "qwen2_vl"))


def answer_of_mlx_vlm(folder: Path, pictures: list[str], **options: Any) -> list[int]:
    import mlx_vlm
    from mlx_vlm.prompt_utils import apply_chat_template

    model, processor = mlx_vlm.load(str(folder))
    prompt = apply_chat_template(processor, model.config, ["What is it?"], num_images=len(pictures))
    found = mlx_vlm.generate(
        model, processor, prompt, image=pictures, max_tokens=8, temperature=0, prefill_step_size=16, **options
    )
    return list(found.token_ids)


@pytest.mark.parametrize("num_pictures", [0, 1, 2])
def test_generate_gives_the_answer_of_mlx_vlm_within_the_budget(folder: Path, num_pictures: int) -> None:
    from tiny_vlms import picture

    pictures = [str(picture(folder, size)) for size in ((56, 84), (84, 56))[:num_pictures]]
    flags = ["--image", *pictures] if pictures else ["--vision"]
    words = ("--model", folder, *flags, "--prompt", "What is it?", "-m", 8, "--prefill-step-size", 16, "--json")
    status, text = run(generate, *words)
    report = json.loads(text)
    assert status == 0 and report["tokens"] == answer_of_mlx_vlm(folder, pictures)
    assert report["plan"]["streaming"]["num_units"] and report["generation_tokens"] == 8
    assert report["prompt_tokens"] > 30 * num_pictures / 2 and report["finish_reason"] == "length"
    if num_pictures:
        assert report["tokens"] != answer_of_mlx_vlm(folder, [])


def test_a_conversation_about_pictures_is_that_of_mlx_vlm(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import mlx_vlm
    from mlx_vlm.prompt_utils import apply_chat_template

    from mlx_flash import cli
    from tiny_vlms import picture

    first, second = str(picture(folder, (56, 84))), str(picture(folder, (84, 56)))
    flags = ["--image", first, "-m", "6", "--prefill-step-size", "16", "--ram-budget-gb", "0.5", "--no-telemetry"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO(f"What is it?\n/image no.png\nLost\n/image {second}\nAnd this?\n"))
        assert cli.main(["run", str(folder), *flags]) == 1
    told, errors = capsys.readouterr()
    assert "no.png does not exist" in errors
    model, processor = mlx_vlm.load(str(folder))
    messages: list[dict[str, Any]] = []
    for pictures, text in (([first], "What is it?"), ([first, second], "And this?")):
        messages.append({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]})
        prompt = apply_chat_template(processor, model.config, messages, num_images=len(pictures), enable_thinking=False)
        options = {"max_tokens": 6, "temperature": 0, "prefill_step_size": 16}
        tokens = mlx_vlm.generate(model, processor, prompt, image=pictures, **options).token_ids
        answer = processor.tokenizer.decode(tokens)
        assert told.startswith(f"{answer}\n") and answer
        told = told.removeprefix(f"{answer}\n")
        messages.append({"role": "assistant", "content": answer})
    assert not told


def test_generate_refuses_flags_and_files_that_it_cannot_use(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no picture")
    words = ("--model", folder, "--prompt", "What?", "--image")
    with pytest.raises(ConfigError, match=r"--draft-model is not available for models that see"):
        run(generate, *words, "x.png", "--draft-model", "x")
    with pytest.raises(PictureError, match=r"missing.png does not exist"):
        run(generate, *words, tmp_path / "missing.png")
    with pytest.raises(PictureError, match=r"text.png is no picture of a known kind"):
        run(generate, *words, tmp_path / "text.png")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(PictureError, match=r"missing.png does not exist"):
        patch.setattr("mlx_flash.commands.run.Models.load", None)  # nothing is loaded before
        run(run_command, folder, "What?", "--image", tmp_path / "missing.png")


def test_plan_counts_towers(folder: Path) -> None:
    found = json.loads(run(plan, "--model", folder, "--json")[1])
    towers = found["towers"]
    assert towers["num_units"] > 3 and towers["bytes"] > towers["memory_bytes"] > 0
    assert "Towers:" in run(plan, "--model", folder)[1]


def test_doctor_generates_after_a_picture(folder: Path) -> None:
    found = json.loads(run(doctor, "--model", folder, "--json", "--prompt-tokens", 4, "-m", 3)[1])["run"]
    assert found["generation_tokens"] == 3 and found["prompt_tokens"] > 40 and found["within_budget"] is not None


@pytest.mark.parametrize("reference", ["resident", "layers"])
def test_verify_compares_layers_of_towers_and_tokens_with_mlx_vlm(folder: Path, reference: str) -> None:
    status, text = run(verify, "--model", folder, "--json", "-m", 3, "--reference", reference)
    receipt = json.loads(text)
    assert status == 0 and receipt["is_exact"] and receipt["library"] == "mlx-vlm" and len(receipt["calls"]) == 3
    names = receipt["calls"][0]["layers"]
    assert any(name.startswith("vision_tower.blocks.") for name in names)
    assert any(name.startswith("language_model.model.layers.") for name in names)
    assert receipt["bytes_compared"] > receipt["bytes_read"] * 0.9


@pytest.mark.parametrize(("budget", "size"), [("min", (448, 588)), (0.5, (392, 392))])
def test_the_peak_stays_within_the_budget_with_a_picture(
    folder: Path, tmp_path: Path, budget: float | str, size: tuple[int, int]
) -> None:
    """Attention scores of the larger picture take 115 MB in each layer of the tower. 0.5 GB has room for either."""
    from tiny_vlms import picture, write_processor

    fine = write_processor(Path(shutil.copytree(folder, tmp_path / "model")), max_pixels=1_000_000)
    config = json.loads((fine / "config.json").read_text())
    config["vision_config"]["num_heads"] = 16  # many scores of few patches, with the same weights
    (fine / "config.json").write_text(json.dumps(config))
    flags = ["--image", str(picture(tmp_path, size)), "--prompt", "What?", "-m", "3", "--json", "--no-telemetry"]
    words = ["generate", "--model", str(fine), "--ram-budget-gb", str(budget), *flags]
    program = f"import sys; from mlx_flash.cli import main; sys.exit(main({words!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["peak_memory_bytes"] <= report["budget_bytes"] and report["within_budget"]
