"""Commands on models that see: which library loads a model, with which prompt."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_flash.commands.common import Status, make_config
from mlx_flash.config import FlashConfig
from mlx_flash.engine.prepare import Prepared, prepare
from mlx_flash.errors import ConfigError
from mlx_flash.vision.detect import check_installed, loads_with_vlm

if TYPE_CHECKING:  # mlx-vlm is an extra
    from mlx_flash.vision.flashvlm import FlashVLM
    from mlx_flash.vision.pictures import PicturePrompt


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
