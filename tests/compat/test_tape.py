"""The record of a computation counts the memory of its results, without computing them."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_flash.compat.arrays import result_bytes, tape_of


class OwnAttention(nn.Module):
    """Attention with scores of its own."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.qkv, self.out, self.num_heads = nn.Linear(width, 3 * width), nn.Linear(width, width), num_heads

    def __call__(self, x: mx.array) -> mx.array:
        parts = mx.split(self.qkv(x), 3, axis=-1)
        q, k, v = (part.reshape(*x.shape[:2], self.num_heads, -1).transpose(0, 2, 1, 3) for part in parts)
        scores = mx.softmax(q @ k.swapaxes(-1, -2) * 0.1, axis=-1)
        return self.out((scores @ v).transpose(0, 2, 1, 3).reshape(x.shape))


def taken(module: nn.Module, x: mx.array) -> int:
    mx.eval(module.parameters(), x)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(module(x))
    return int(mx.get_peak_memory() - before)


@pytest.mark.parametrize("length", [256, 1024])
@pytest.mark.parametrize("kind", ["own", "mlx's", "convolution"])
def test_a_record_foretells_what_results_take(kind: str, length: int) -> None:
    if mx.default_device() != mx.cpu:
        pytest.skip("other back ends have other kernels")
    module: nn.Module = {
        "own": lambda: OwnAttention(256, 8),
        "mlx's": lambda: nn.MultiHeadAttention(256, 8),
        "convolution": lambda: nn.Conv2d(3, 256, 14, 14),
    }[kind]()
    x = mx.random.normal((1, 448, 14 * length // 32, 3) if kind == "convolution" else (1, length, 256))

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def __call__(self, x: mx.array) -> mx.array:
            return self.inner(x, x, x) if kind == "mlx's" else self.inner(x)

    found = result_bytes(tape_of(Called(), [mx.broadcast_to(mx.zeros(()), x.shape)]))
    assert found == pytest.approx(taken(Called(), x), rel=0.5) and found * 1.25 >= taken(Called(), x)


def test_views_and_weights_take_nothing() -> None:
    weight = mx.broadcast_to(mx.zeros(()), (512, 512))
    x = mx.zeros((8, 512))
    assert result_bytes(tape_of(lambda x: x.reshape(2, 4, 512)[1:].swapaxes(0, 1), [x])) == 0
    assert result_bytes(tape_of(lambda x: x @ weight.T, [x])) == 8 * 512 * 4 + 4  # and one zero


def test_looking_at_numbers_is_an_error() -> None:
    with pytest.raises(ValueError, match="eval"):
        tape_of(lambda x: x * x.sum().item(), [mx.zeros((2,))])
