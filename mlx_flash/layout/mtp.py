"""The head for multi-token prediction that some checkpoints have beside the model, and mlx-lm drops.

It has one layer like the model's. It gets a token's embedding together with the hidden state of the token before. From
its output, the model's own output head makes the logits of the next token. So it is built as mlx-lm's model with one
layer, and with a table of embeddings that makes this input: masks, caches and quantization are mlx-lm's.

Hidden states are taken after the model's final norm, for all families, as vLLM does. For Qwen, llama.cpp and LightLLM
measured more right guesses so. For DeepSeek and GLM, llama.cpp takes them before the norm.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_flash.compat.arrays import random_key, set_random_key
from mlx_flash.compat.loaders import model_classes
from mlx_flash.errors import CheckpointError
from mlx_flash.layout.load import LoadedModel, iter_parameters, load_lazily
from mlx_flash.layout.parts import ModelLayout, OwnHead, Parameter, body_of
from mlx_flash.logs import log
from mlx_flash.storage.safetensors import Checkpoint

_DEEPSEEK = {"shared_head.norm": "norm", "enorm": "enorm", "hnorm": "hnorm", "eh_proj": "join"}
_QWEN = {"norm": "norm", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "join"}
_MIMO = {"final_layernorm": "norm", "token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "join"}


class _Family(NamedTuple):
    """The way some models store their head."""

    prefix: str  # of the names of its tensors, a pattern; ``{n}`` is the number of layers
    # modules beside the layer, each with ours: the norms of the output, of the embedding and of the hidden state, and
    # the projection of both
    names: Mapping[str, str]
    layer: str = ""  # begins the names of the layer's tensors, after the prefix
    promise: str = "num_nextn_predict_layers"  # the entry of ``config.json`` with the number of layers in the head
    # entries of ``config.json`` that make the layer of the right kind the only one
    config: Mapping[str, Any] = {"first_k_dense_replace": 0}
    hidden_first: bool = False  # whether the hidden state comes before the embedding in the input of the projection


_ATTENTION = {"full_attention_interval": 1, "decoder_sparse_step": 1, "mlp_only_layers": []}
_LIKE_DEEPSEEK = _Family(r"model\.layers\.{n}\.", _DEEPSEEK)
_LIKE_QWEN = _Family(r"(?:language_model\.)?mtp\.", _QWEN, "layers.0.", "mtp_num_hidden_layers", _ATTENTION)

FAMILIES = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"), _LIKE_DEEPSEEK),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _LIKE_QWEN),
    "qwen3_next": _LIKE_QWEN._replace(promise="num_nextn_predict_layers"),
    "mimo": _Family(r"model\.mtp_layers\.0\.", _MIMO, config={}, hidden_first=True),
}
"""By the name of mlx-lm's module; the names of tensors and the orders are those of vLLM's sources."""


class Joined(nn.Module):
    """The table of embeddings of a head, called with tokens, and the hidden states of those before them."""

    def __init__(self, norm: nn.Module, dims: int, hidden_first: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.enorm, self.hnorm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.join = nn.Linear(2 * dims, dims, bias=False)
        self._hidden_first = hidden_first
        self.table: Any = None

    def __call__(self, given: tuple[mx.array, mx.array]) -> mx.array:
        enorm, hnorm = cast(Any, self.enorm), cast(Any, self.hnorm)
        parts = [enorm(self.table(given[0])), hnorm(given[1])]
        return self.join(mx.concatenate(parts[::-1] if self._hidden_first else parts, axis=-1))

    def as_linear(self, x: mx.array) -> mx.array:
        """The table as output head."""
        return cast(mx.array, self.table.as_linear(x))


def find_head(layout: ModelLayout, loaded: LoadedModel, checkpoint: Checkpoint) -> None:
    """Note a model's head in its layout, or that ``config.json`` promises one which is not there. Reads no weights."""
    family = FAMILIES.get(type(loaded.called).__module__.rpartition(".")[2])
    if family is None or (own := body_of(loaded.called)) is None:
        return
    config = loaded.config.get("text_config", loaded.config)
    prefix = re.compile(family.prefix.replace("{n}", str(len(loaded.called.layers))))
    names = {name: name[found.end() :] for name in checkpoint.tensors if (found := prefix.match(name))}
    layout.lacks_head = not names and bool(config.get(family.promise))
    if not names:
        return
    changes: dict[str, Any] = {**family.config, "num_hidden_layers": 1}
    changes = {"text_config": {**config, **changes}} if "text_config" in loaded.config else changes
    if of_all := loaded.config.get("quantization"):  # without the exceptions for modules of the model
        changes["quantization"] = {key: of_all[key] for key in ("group_size", "bits", "mode") if key in of_all}
    classes, random = partial(_head_classes, family, names), random_key()
    try:
        head = load_lazily(checkpoint.directory, checkpoint, changes, get_model_classes=classes)
        parameters = [
            Parameter(f"mtp.{name}", container, key, array, array.nbytes, head.sources.get(id(array), ()))
            for name, container, key, array in iter_parameters(head.model)
        ]
        around, body = _around(head.model)
        body["embed_tokens"].table = own["embed_tokens"]
        for module in loaded.called.modules():
            if "lm_head" in module:
                around.lm_head = module["lm_head"]
        layout.head = OwnHead(head.model, body, parameters)
    except (CheckpointError, ValueError) as error:  # of MLX where it cannot compute; the output is the same without it
        log.warning("the head for multi-token prediction is not used: %s Hide this with mtp='off'.", error)
    finally:
        set_random_key(random)  # new modules draw their weights; seeds give mlx-lm's samples


def _around(model: nn.Module) -> tuple[Any, nn.Module]:
    """Return the module with the body of a head's model, and the body."""
    modules = model.modules()
    body = next(module for module in modules if isinstance(module.get("embed_tokens"), Joined))
    return next(module for module in modules if any(child is body for child in module.values())), body


def _head_classes(family: _Family, names: Mapping[str, str], config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    """Return mlx-lm's classes of a model, changed to that of its head."""
    model_class, args_class = model_classes(config=config)

    class Head(cast(Any, model_class)):  # type: ignore[misc]
        def __init__(self, args: Any) -> None:
            super().__init__(args)
            body: Any = body_of(self)
            body.embed_tokens = Joined(body.norm, body.embed_tokens.weight.shape[1], family.hidden_first)
            _around(self)[0].pop("lm_head", None)
            if "ssm_idx" in vars(body):
                body.ssm_idx = None  # no layer is recurrent

        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            body = _around(self)[1]
            path = next(name for name, module in self.named_modules() if module is body)
            return _sanitized(super().sanitize, path, family, names, weights)

    return Head, args_class


def _sanitized(
    sanitize: Callable[[dict[str, mx.array]], dict[str, mx.array]],
    path: str,
    family: _Family,
    names: Mapping[str, str],
    weights: Mapping[str, mx.array],
) -> dict[str, mx.array]:
    """Return the head's weights by their names in mlx-lm's model of one layer, as mlx-lm's code changes them."""
    given, joined, stacks = dict[str, mx.array](), dict[str, mx.array](), dict[str, dict[int, mx.array]]()
    for name, short in names.items():
        module, _, kind = short.rpartition(".")
        ours = family.names.get(module)
        if ours == "norm":
            given[f"{path}.norm.{kind}"] = weights[name]
        elif ours is not None:
            joined[f"{path}.embed_tokens.{ours}.{kind}"] = weights[name]
        elif short.startswith(family.layer) and not short.startswith(("embed_tokens.", "shared_head.")):
            given[f"{path}.layers.0.{short.removeprefix(family.layer)}"] = weights[name]
    norm = f"{path}.norm.weight"
    shows = {name: array for name, array in weights.items() if "conv1d.weight" in name}  # whether norms lack a one
    sanitized = sanitize({**given, **shows})
    found = {name: array for name, array in sanitized.items() if name.startswith(path) and "conv1d" not in name}
    for name in list(found):
        if expert := re.fullmatch(r"(.*\.mlp)\.experts\.(\d+)\.(.*)", name):  # which mlx-lm's code has not stacked
            stacks.setdefault(f"{expert[1]}.switch_mlp.{expert[3]}", {})[int(expert[2])] = found.pop(name)
    found |= {name: mx.stack([stack[i] for i in sorted(stack)]) for name, stack in stacks.items()}
    if norm in given and found[norm] is not given[norm]:
        joined = {name: array + 1.0 if "norm." in name else array for name, array in joined.items()}
    return {**found, **joined}
