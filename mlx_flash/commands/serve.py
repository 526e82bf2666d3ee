"""``mlx-flash serve``: the server."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from mlx_flash.commands.common import make_config, note, note_lines
from mlx_flash.config import GB, FlashConfig
from mlx_flash.errors import CompatibilityError, ConfigError
from mlx_flash.layout.names import repository_of
from mlx_flash.modelfile.parse import find_modelfile, named_models, read_modelfile
from mlx_flash.monitor.words import size, speed
from mlx_flash.ranks import launched_group
from mlx_flash.residency.plan import DEFAULT_PREFILL_STEP_SIZE, ResidencyPlan, step_in_words
from mlx_flash.vision.detect import check_installed

try:
    from mlx_flash.server.batch import BatchOptions
    from mlx_flash.server.catalog import Catalog, Source, source_of
    from mlx_flash.server.request import Defaults
    from mlx_flash.server.room import EngineRoom
    from mlx_flash.server.serving import Server, make_access, take_port
except ModuleNotFoundError as error:
    raise CompatibilityError(
        f"the server needs the package {error.name}. Hint: in a checkout of mlx-flash, pip install '.[server]'."
    ) from error


def serve(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash serve``."""
    logging.getLogger("mlx_flash").handlers.clear()  # that of --verbose, which would print each line once more
    logging.basicConfig(level=args.log_level, format="%(asctime)s - %(levelname)s - %(message)s")
    config = make_config(args)
    settings: dict[str, Any] = {"trust_remote_code": args.trust_remote_code}
    if args.chat_template:
        settings["chat_template"] = args.chat_template
    given = {name: getattr(args, name) for name in ("top_p", "top_k", "min_p", "max_tokens")}
    defaults = Defaults(temperature=args.temp, template_options=args.chat_template_args, **given)
    models = [*map(_named, args.model), *_in_folder(args.models_dir)]
    files = [base for _, base in models if Path(base).is_file() and Path(base).suffix != ".gguf"]
    modelfiles = {base: read_modelfile(base) for base in files}
    for modelfile in modelfiles.values():
        note_lines(modelfile)
    if len(models) == 1 and modelfiles:
        (only,) = modelfiles.values()
        config = replace(config, ram_budget_gb=make_config(args, only.flash).ram_budget_gb)
    if args.vision:
        check_installed("--vision")

    other = Source(config=config, vision=args.vision, tokenizer_settings=settings, defaults=defaults)
    describe = partial(_described, args, other)
    sources = [
        describe(name, base) if base in modelfiles else replace(other, name=name, base=base) for name, base in models
    ]
    if sources:
        draft = None if args.draft_model is None else find_modelfile(args.draft_model).base
        sources[0] = replace(sources[0], adapter=args.adapter_path or sources[0].adapter, draft=draft)
    catalog = Catalog(sources, other, describe=describe, any_name=args.any_model_name)
    given = {field.name: getattr(args, field.name) for field in fields(BatchOptions) if field.name in args}
    step = args.prefill_step_size or DEFAULT_PREFILL_STEP_SIZE
    return serve_catalog(catalog, BatchOptions(**{**given, "prefill_step_size": step}), args)


def _described(args: argparse.Namespace, other: Source, name: str, path: str | Path) -> Source:
    """Return a model of the server from its Modelfile.

    Raises: ConfigError: the Modelfile gives a budget of its own, or leaves the model to mlx-lm.
    """
    modelfile = read_modelfile(path)
    config = make_config(args, modelfile.flash)
    if config.ram_budget_gb != other.config.ram_budget_gb:
        raise ConfigError(
            f"{modelfile.path}: FLASH_RAM_GB {config.ram_budget_gb} is for one model, and all models of a server "
            "share one budget. Hint: give it with --ram-budget-gb, which wins over Modelfiles."
        )
    if not config.enabled:
        raise ConfigError(f"{modelfile.path}: FLASH false leaves the model to mlx-lm. Hint: run mlx_lm.server.")
    return source_of(modelfile, name, replace(other, config=config))


def serve_catalog(catalog: Catalog, options: BatchOptions, args: argparse.Namespace) -> int:
    """Serve models until a signal ends it."""
    if catalog.default is not None and not catalog.default.config.enabled:
        raise ConfigError("enabled is False, which leaves models to mlx-lm. Hint: run mlx_lm.server.")
    access = make_access(args.host, args.allowed_origins, args.api_key_file, args.no_auth)
    room = EngineRoom(catalog, options, args.keepalive)
    group = launched_group()
    if group is not None and group.rank() > 0:  # rank 0 has the clients
        room.start()
        return int(not room.join())
    with closing(take_port(args.host, args.port)) as listener:
        plan = room.start()
        if plan is not None and catalog.default is not None:
            _note_plan(plan, catalog.default.config, options)
        return Server(room, access).answer(listener)


def _note_plan(plan: ResidencyPlan, config: FlashConfig, options: BatchOptions) -> None:
    """Print the plan in one line, and another prefill step."""
    expected = f", about {speed(1 / plan.opening_seconds)}" if plan.opening_seconds else ""
    note(
        f"mlx-flash: {size(plan.model_bytes)} of weights in a budget of {plan.budget_bytes / GB:.3f} GB: "
        f"{size(plan.read_bytes)} read for each token{expected}"
    )
    if plan.prefill_step_size < options.prefill_step_size:
        note(f"mlx-flash: {step_in_words(plan.prefill_step_size, config)}")


def _named(text: str) -> tuple[str, str]:
    """Return name and place of a model of the command line, which may be named by a short name or a Modelfile's."""
    name, separator, base = text.partition("=")
    if not separator or not name or Path(text).exists():
        name = base = text
    created = None if Path(base).is_dir() else named_models().get(base)
    return name, repository_of(base) if created is None else str(created)


def _in_folder(folder: Path | None) -> Iterator[tuple[str, str]]:
    """Yield names and places of the models in a folder: folders with a model, and Modelfiles ``NAME.modelfile``."""
    for path in sorted(folder.iterdir()) if folder is not None else ():
        if (path / "config.json").is_file():
            yield path.name, str(path)
        elif path.suffix.lower() == ".modelfile" and path.is_file():
            yield path.stem, str(path)
