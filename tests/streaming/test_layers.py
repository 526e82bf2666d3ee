"""Swapped modules compute what they computed before, and swapping leaves no trace."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import CacheList, KVCache

from mlx_flash.layout.load import load_lazily
from mlx_flash.layout.swap import swap_class
from mlx_flash.layout.units import make_layout
from mlx_flash.storage.prefetcher import BackgroundPrefetcher
from mlx_flash.storage.safetensors import read_checkpoint
from mlx_flash.streaming.stream import EmbeddingRows, TableState, arrays_in
from models import LLAMA, VOCAB_SIZE, save, stock


@dataclass
class Record:
    inner: Any


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


Pair = namedtuple("Pair", "left right")


def test_every_reachable_array_is_found() -> None:
    a = [mx.array(i) for i in range(9)]
    cache = KVCache()
    cache.keys, cache.values = a[0], a[1]
    looped: dict[str, Any] = {"x": a[2]}
    looped["self"] = looped
    roots = (Record({"deep": [Slotted(a[3])]}), CacheList(cache), looped, Pair(a[4], (a[5], None, "text")), {6: a[6]})
    found = {id(array) for array in arrays_in(*roots)}
    assert found == {id(array) for array in a[:7]}
    assert arrays_in(nn.Linear(2, 2)) == []


@pytest.fixture(scope="module", params=["plain", "quantized"])
def table(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("embedding")
    save(directory, LLAMA, mx.bfloat16, bits=4 if request.param == "quantized" else None, header_shift=3)
    layout = make_layout(load_lazily(directory, read_checkpoint(directory)))
    (unit,) = layout.embeddings
    reader = BackgroundPrefetcher(sorted({p.record.path for p in unit.large if p.record}))
    swap_class(unit.module, EmbeddingRows, TableState(unit.module, unit.large, reader, None))
    yield unit.module, stock(directory).model.embed_tokens
    reader.close()


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_embedding_rows_equal_the_whole_table(table: Any, data: st.DataObject) -> None:
    streamed, reference = table
    shape = data.draw(st.sampled_from([(1, 1), (1, 7), (2, 3), (4,), (1, 40)]))
    size = mx.zeros(shape).size
    ids = data.draw(st.lists(st.integers(-VOCAB_SIZE, VOCAB_SIZE - 1), min_size=size, max_size=size))
    tokens = mx.array(ids).reshape(shape)
    assert mx.array_equal(streamed(tokens), reference(tokens))


def test_embedding_rows_that_do_not_exist(table: Any) -> None:
    with pytest.raises(IndexError, match="rows 0 to 999"):
        table[0](mx.array([[5, VOCAB_SIZE]]))


def test_an_empty_lookup(table: Any) -> None:
    if isinstance(table[0], nn.QuantizedEmbedding):
        pytest.skip("MLX cannot dequantize nothing")
    assert table[0](mx.zeros((1, 0), dtype=mx.int32)).shape == (1, 0, LLAMA["hidden_size"])
