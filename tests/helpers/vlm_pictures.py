"""Pictures for tiny models of mlx-vlm, in the forms in which the processors of some architectures give them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

IMAGE = 290
PATCHES = {"spatial_shapes": mx.array([[4, 4]]), "pixel_attention_mask": mx.ones((1, 16), mx.int32)}
Picture = tuple[mx.array, Any, dict[str, Any]]
"""Tokens, the numbers of a picture, and further arguments of ``get_input_embeddings``."""


def _tokens(count: int, image: int = IMAGE) -> mx.array:
    return mx.array([[1, 288, *[image] * count, 2, 3]])


def _marks(count: int) -> mx.array:
    """Return which of the tokens stand for a picture."""
    return _tokens(count) == IMAGE


def _places(count: int) -> mx.array:
    """Return the places of the tokens that stand for a picture."""
    return mx.arange(2, 2 + count)


def _pixels(*shape: int) -> mx.array:
    return mx.random.normal(shape)


def _deepseek_v4() -> Picture:
    """Return a picture whose tokens are behind the vocabulary, of which each kind has its own."""
    kinds = mx.array([0, 2, 2, 2, 2, 4])
    tokens = mx.concatenate([mx.array([1, 5]), 300 + kinds, mx.array([2, 3])])[None]
    extra = {"image_grid_hw": [[4, 4]], "image_sample_indices": [0], "image_offsets": [2], "image_types": kinds}
    extra |= {"image_type_offsets": [0, 6], "image_permutations": [2, 0, 1, 3]}
    return tokens, _pixels(16, 3 * 14 * 14), {name: mx.array(value) for name, value in extra.items()}


FORMS: dict[str, Callable[[], Picture]] = {
    "deepseek_v4": _deepseek_v4,
    "deepseek_vl_v2": lambda: (
        _tokens(41),
        _pixels(1, 2, 3, 64, 64),
        {"images_spatial_crop": mx.array([[[1, 1]]]), "images_seq_mask": _marks(41)},
    ),
    "ernie4_5_moe_vl": lambda: (_tokens(4), _pixels(16, 3 * 14 * 14), {"image_grid_thw": mx.array([[1, 4, 4]])}),
    "fastvlm": lambda: (_tokens(1), _pixels(1, 3, 56, 56), {}),
    "granite4_vision": lambda: (_tokens(16), _pixels(1, 1, 3, 112, 112), {}),
    "idefics2": lambda: (
        _tokens(64),
        _pixels(1, 1, 3, 56, 56),
        {"pixel_attention_mask": mx.ones((1, 1, 56, 56), mx.int32)},
    ),
    "inkling": lambda: (_tokens(2), _pixels(2, 2, 40, 40, 3), {}),
    "jina_vlm": lambda: (
        _tokens(4),
        _pixels(1, 1, 16, 14 * 14 * 3),
        {"image_masks": mx.ones((1, 1, 16)), "image_input_idx": _places(4)[None, None]},
    ),
    "kimi_k25": lambda: (_tokens(4), _pixels(16, 3, 14, 14), {"image_grid_hws": mx.array([[4, 4]])}),
    "kimi_k3": lambda: (_tokens(4), _pixels(16, 3, 14, 14), {"grid_thws": mx.array([[1, 4, 4]])}),
    "kimi_vl": lambda: (_tokens(4), _pixels(16, 3, 14, 14), {"image_grid_hws": mx.array([[4, 4]])}),
    "lfm2_vl": lambda: (_tokens(4), _pixels(1, 16, 3 * 14 * 14), PATCHES),
    "llava_bunny": lambda: (_tokens(1), _pixels(1, 3, 378, 378), {}),
    "llava_onevision": lambda: (_tokens(36), _pixels(1, 2, 3, 56, 56), {"image_sizes": mx.array([[56, 56]])}),
    "locateanything": lambda: (_tokens(4), _pixels(16, 3, 14, 14), {"image_grid_hws": mx.array([[4, 4]])}),
    "minicpmv4_6": lambda: (
        _tokens(1),
        [[_pixels(3, 14, 14 * 16)]],
        {"tgt_sizes": [mx.array([[4, 4]])], "image_bound": [mx.array([[2, 3]])]},
    ),
    "mllama": lambda: (
        _tokens(1),
        _pixels(1, 1, 4, 3, 56, 56),
        {
            "aspect_ratio_ids": mx.array([[1]]),
            "aspect_ratio_mask": mx.array([[[1, 0, 0, 0]]]),
            "cross_attention_mask": mx.array([[[[0] * 4], *[[[1, 0, 0, 0]]] * 4]]),
        },
    ),
    "molmo": lambda: (
        _tokens(4),
        _pixels(1, 1, 16, 3 * 14 * 14),
        {"image_masks": mx.ones((1, 1, 16)), "image_input_idx": _places(4)[None, None]},
    ),
    "molmo2": lambda: (
        mx.array([[1, *[IMAGE] * 4, 289, *[IMAGE] * 4, 289, 2]]),
        _pixels(2, 16, 3 * 14 * 14),
        {
            "image_token_pooling": mx.array([[2 * i + j for j in (0, 1, 4, 5)] for i in range(8)]),
            "image_grids": mx.array([[2, 2, 2, 2]]),
            "image_num_crops": mx.array([2]),
        },
    ),
    "moondream2": lambda: (_tokens(16), _pixels(1, 56, 56, 3), {"num_crops": [1], "crop_layouts": [(1, 1)]}),
    "moondream3": lambda: (_tokens(16), _pixels(1, 56, 56, 3), {"num_crops": [1], "crop_layouts": [(1, 1)]}),
    "muse_glimmer": lambda: (_tokens(4), _pixels(16, 3 * 2 * 14 * 14), {"image_grid_thw": mx.array([[1, 4, 4]])}),
    "paddleocr_vl": lambda: (_tokens(4), _pixels(1, 16, 3, 14, 14), {"image_grid_thw": mx.array([[1, 4, 4]])}),
    "step3p7": lambda: (_tokens(1), _pixels(1, 3, 56, 56), {}),
    "phi4_siglip": lambda: (_tokens(1, -200), _pixels(1, 16, 3 * 14 * 14), PATCHES),
    "phi4mm": lambda: (_tokens(1), _pixels(1, 16, 3 * 14 * 14), PATCHES),
    "plamo2vl": lambda: (_tokens(16), _pixels(1, 1, 3, 56, 56), {}),
    "qwen3_omni_moe": lambda: (_tokens(4), _pixels(16, 3 * 2 * 14 * 14), {"image_grid_thw": mx.array([[1, 4, 4]])}),
    "youtu_vl": lambda: (_tokens(4), _pixels(16, 3 * 14 * 14), {"spatial_shapes": mx.array([[4, 4]])}),
}
"""By architecture: a function that makes the same picture in every run, after ``mx.random.seed``."""


def picture_of(name: str) -> Picture:
    """Return the picture for an architecture of :data:`FORMS`."""
    mx.random.seed(6)
    picture = FORMS[name]()
    mx.eval(picture)
    return picture
