"""Commands on models that see: which library loads a model, and ``mlx-flash generate --image``."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_flash.commands.common import LOOP_FLAGS, Status, make_config, prompt_text, turns
from mlx_flash.commands.report import Recorder, Responses
from mlx_flash.config import FlashConfig
from mlx_flash.engine.prepare import prepare
from mlx_flash.engine.prepared import Prepared
from mlx_flash.errors import ConfigError
from mlx_flash.ranks import read_on_rank_0
from mlx_flash.vision.detect import check_installed, loads_with_vlm

if TYPE_CHECKING:  # mlx-vlm is an extra
    from mlx_flash.vision.flashvlm import FlashVLM
    from mlx_flash.vision.pictures import PicturePrompt

_WITHOUT = {
    "adapter_path": None,
    "draft_model": None,
    "prefill_response": None,
    "xtc_probability": 0.0,
    "min_tokens_to_keep": 1,
}
"""Flags that mlx-vlm's loops have nothing for, and their defaults."""


def is_vision(args: argparse.Namespace, path: Path, *, prefers: bool) -> bool:
    """Return whether mlx-vlm loads a model, because of ``--image``, ``--vision`` or its kind.

    A command that ``prefers`` mlx-vlm takes it for a model that mlx-lm could load as text alone, too.
    """
    has_pictures = bool(vars(args).get("image"))
    if has_pictures and args.vision is False:
        raise ConfigError("--image needs mlx-vlm, and --no-vision forbids it. Hint: leave one out.")
    if has_pictures or args.vision:
        check_installed("--image" if has_pictures else "--vision")
        return True
    return loads_with_vlm(path, args.vision, prefers=prefers)


def prepare_model(path: Path, config: FlashConfig, probe: Path | None = None, *, with_vlm: bool) -> Prepared:
    """Return a model's plan, and what it is made of; of one that sees, with its towers. Writes nothing."""
    if not with_vlm:
        return prepare(path, config, writes=False, probe=probe)
    from mlx_flash.vision.flashvlm import prepare_vlm

    return prepare_vlm(path, config, writes=False, probe=probe)


@contextlib.contextmanager
def seeing(
    args: argparse.Namespace,
    path: Path,
    messages: Any,
    pictures: Sequence[Any],
    *,
    num_tokens: int | None = None,
    **options: Any,
) -> Iterator[tuple[FlashVLM, Any, PicturePrompt]]:
    """Yield a model that sees, its processor, and a prompt.

    The plan has room for the prompt's pictures, which may be files, and for ``num_tokens`` more; None is no limit.
    Further options are those of :func:`mlx_flash.vision.pictures.make_prompt`.
    """
    from mlx_flash.vision.flashvlm import load_processor_of, load_vlm_model
    from mlx_flash.vision.pictures import make_prompt, open_picture

    config = make_config(args)
    trusts = vars(args).get("trust_remote_code", False)  # commands without the flag do not
    found: Any = [open_picture(each, str(each)) if isinstance(each, Path) else each for each in pictures]
    with load_vlm_model(path, config) as model:
        processor = load_processor_of(path, model, trust_remote_code=trusts)
        prompt = make_prompt(model, processor, messages, found, **options)
        del found, pictures  # before the plan, which counts the process
        model.expect(None if num_tokens is None else len(prompt.tokens) + num_tokens, prompt.keywords)
        with Status("Loading", args.verbose) as status:
            model.start(status.show_bytes)
        yield model, processor, prompt


@contextlib.contextmanager
def sampled(args: argparse.Namespace, path: Path) -> Iterator[tuple[FlashVLM, PicturePrompt]]:
    """Yield a started model that sees, and a prompt of words and a picture that is the same in every run."""
    from mlx_flash.vision.pictures import sample_picture

    words = " ".join(islice(cycle(("What", "is", "in", "this", "picture", "?")), args.prompt_tokens))
    with seeing(args, path, words, [sample_picture()], num_tokens=args.max_tokens) as (model, _, prompt):
        yield model, prompt


@contextlib.contextmanager
def answer_about_pictures(args: argparse.Namespace, path: Path) -> Iterator[tuple[Recorder, Responses]]:
    """Yield the answer to a prompt with pictures, as mlx-vlm generates it, and its recorder."""
    for name, default in _WITHOUT.items():
        if getattr(args, name) != default:
            raise ConfigError(
                f"--{name.replace('_', '-')} is not available for models that see, which mlx-vlm's loops run. "
                "Hint: leave it out."
            )
    began, text, is_chat = time.perf_counter(), prompt_text(args, read_on_rank_0), not args.ignore_chat_template
    options: dict[str, Any] = {}
    if is_chat:  # as in mlx-vlm's program, reasoning is off unless it is asked for
        options = {"enable_thinking": False, **(args.chat_template_config or {})}
    most, messages = args.max_tokens if args.max_tokens > 0 else None, turns(args, text) if is_chat else text
    pictures = args.image or ()
    with seeing(args, path, messages, pictures, num_tokens=most, is_chat=is_chat, **options) as found:
        model, processor, prompt = found
        tokenizer = getattr(processor, "tokenizer", processor)
        tokenizer.stopping_criteria.add_eos_token_ids(args.extra_eos_token)
        run = Recorder(model.language_model, len(prompt.tokens), time.perf_counter() - began)
        loop = {name: getattr(args, name) for name in (*LOOP_FLAGS, "top_p", "min_p", "top_k")}
        loop |= {"temperature": args.temp, "prefill_step_size": run.plan.prefill_step_size}
        yield run, prompt.responses(model, processor, **loop)
