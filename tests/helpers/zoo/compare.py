"""One architecture, stock and streamed, compared bit for bit."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from mlx_flash import FlashLLM
from models import computed, stock
from streamed import streamed_whole
from zoo import configuration
from zoo.weights import VARIANTS, UnfitError, save

PROMPT = [5, 17, 300, 3, 3, 42, 64, 99, 128, 7, 21]
LONGEST_CALL = 64
LONG_PROMPT = [(7 * i * i + 3 * i) % 320 for i in range(LONGEST_CALL)]
GENERATIONS: Sequence[Sequence[Sequence[Sequence[int]]]] = (
    ([PROMPT], [[319]], [[51, 4, 8, 31, 0]], [[9]]),
    ([PROMPT, PROMPT[::-1]], [[12], [7]], [[1], [290]], [[6, 2, 200], [8, 8, 30]]),
    ([LONG_PROMPT], [[200]]),
    ([[256, 1, 9]], [[77]]),
)
"""Calls of each generation: rows of tokens. They exceed the sliding windows of 8 tokens, and one call is so long that
mlx-lm sorts its tokens by expert, even with one expert a token."""

IN_PARTS, SIDE_BY_SIDE = -1, -2
"""Stand for a prompt in parts, and for sequences that share passes, among the numbers of generations."""

EVERY = (SIDE_BY_SIDE, IN_PARTS, 0, 1, 2, 3)
TURNS = ((SIDE_BY_SIDE, 0, 2), (IN_PARTS, 1, 3))
"""Numbers of generations: cuts and pools take turns at these halves where time matters."""

PART = 9
"""Tokens of a part of a prompt: the sliding windows are shorter, and the last part has fewer."""

SEQUENCES = (LONG_PROMPT[: 2 * PART + 2], [12], PROMPT)
NUM_TOKENS = 2
"""Of each sequence, after its prompt."""

UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


@dataclass(slots=True)
class Outcome:
    """The result for one architecture and variant."""

    name: str
    variant: str
    status: str = "failed"  # ``ok``, ``cannot``: stock cannot run it here, or ``refused``: mlx-flash says why not
    reason: str = ""
    note: str = ""  # why this variant and not another
    num_layers: int = 0
    num_streamed: int = 0  # layers of which weights were streamed
    nbytes: int = 0
    streamed_bytes: int = 0
    num_cuts: int = 0  # finer cuts of the layers, row tiles among them, that gave the same bits
    num_stacks: int = 0  # stacks of experts that were read expert by expert
    num_pools: int = 0  # ways to read them that gave the same bits
    seconds: float = 0.0
    sees: bool = False  # a picture was compared too
    num_towers: int = 0  # units in towers of vision


def compare(
    name: str, variant: str, enter: Callable[[str], None] = lambda phase: None, *, in_turns: bool = False
) -> Outcome:
    """Save a random model, run it stock and streamed, and return the outcome.

    ``enter`` is called with each phase as it begins, so that a crash is attributed. In turns, only the finest cut and
    row tiles are tried beside whole layers, and each of them and each pool runs half of the generations.
    """
    began = time.perf_counter()
    outcome = Outcome(name, variant)
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        enter("stock")
        expected = run_stock(Path(folder), outcome)
        if expected:
            enter("streamed")
            run_streamed(Path(folder), outcome, expected, in_turns)
    outcome.seconds = time.perf_counter() - began
    return outcome


def run_stock(directory: Path, outcome: Outcome) -> list[Any]:
    """Return the trace of stock mlx-lm; empty when it cannot run, or when its logits prove nothing."""
    try:
        save(directory, configuration(outcome.name), VARIANTS[outcome.variant])
        expected = trace(stock(directory))
        outcome.reason = find_flaw(expected[0])
    except UnfitError as error:
        outcome.reason = one_line(error)
    except (Exception, SystemExit) as error:  # one model exits when a package is missing
        outcome.status, outcome.reason = "cannot", one_line(error)
    return [] if outcome.reason else expected


def run_streamed(directory: Path, outcome: Outcome, expected: list[Any], in_turns: bool) -> None:
    """Run a model streamed and note differences and streamed layers."""
    turns = TURNS if in_turns else (EVERY, EVERY)
    tile_rows = 3 * configuration(outcome.name)["vocab_size"] // 5  # two tiles of different size
    try:
        with streamed_whole(directory, tile_rows=tile_rows) as model:
            model.plan = replace(model.plan, prefill_step_size=LONGEST_CALL)  # longer calls are cut
            describe(model, outcome)
            num_cuts = len(model.layout.finer)
            got = trace(model)
            closed = trace(model.close(), GENERATIONS[-1:])
        outcome.reason = judge(directory, outcome, expected, got, closed)
        first_cut = max(1, num_cuts) if in_turns else 1
        for i, cut in enumerate([*range(first_cut, num_cuts + 1), "tiles"]):
            outcome.reason = outcome.reason or find_difference_of_cut(directory, cut, expected, turns[i % 2])
            outcome.num_cuts += not outcome.reason
        if outcome.num_stacks and not outcome.reason:
            outcome.reason = find_difference_of_pools(directory, num_cuts, expected, outcome, in_turns)
    except Exception as error:
        outcome.reason = one_line(error)
    outcome.status = "failed" if outcome.reason else "ok"


def find_difference_of_cut(directory: Path, cut: int | str, expected: list[Any], numbers: Sequence[int]) -> str:
    """Return the difference that smaller units make, or an empty text."""
    with streamed_whole(directory, num_slots=3, tile_rows=64, cut=cut) as model:
        difference = difference_in(model, expected, numbers)
    return f"cut {cut}: {difference}" if difference else ""


def find_difference_of_pools(
    directory: Path, finest: int, expected: list[Any], outcome: Outcome, in_turns: bool
) -> str:
    """Return the difference that an expert pool makes, or an empty text.

    Three sizes of the pool, exact rows and inexact ones as on GPUs, whole layers and the smallest units: every pair of
    these settings is tested. In turns each of them is, but for the pool of all experts: it evicts none.
    """
    num_slots, num_experts = 0, 0
    for i in range(2 if in_turns else 3):
        for exact_rows in (i % 2 == 0,) if in_turns else (True, False):
            cut = finest if i % 2 == exact_rows or (in_turns and i == 1) else 0
            with streamed_whole(directory, cut=cut, pool_slots=num_slots, exact_rows=exact_rows) as model:
                assert model.plan.pool is not None and model.engine is not None and model.engine.experts is not None
                least, num_experts = model.plan.pool.num_slots, model.plan.pool.num_experts
                difference = difference_in(model, expected, TURNS[i % 2] if in_turns else EVERY)
                num_calls = model.engine.experts.pool.stats.num_calls
            if difference or not num_calls:
                how = f"pool of {least} of {num_experts}, rows {'' if exact_rows else 'not '}exact, cut {cut}"
                return f"{how}: {difference or 'no expert was called'}"
            outcome.num_pools += 1
        num_slots = (least + num_experts) // 2 if i == 0 else num_experts
    return ""


def difference_in(model: FlashLLM, expected: list[Any], numbers: Sequence[int] = EVERY) -> str:
    """Return where a streamed model first differs in some generations, or an empty text."""
    model.plan = replace(model.plan, prefill_step_size=LONGEST_CALL)  # longer calls are cut
    return find_difference(only(numbers, expected), trace(model, numbers=numbers))


def judge(directory: Path, outcome: Outcome, expected: list[Any], got: list[Any], closed: list[Any]) -> str:
    """Return the first fault, or an empty text."""
    if difference := find_difference(expected, got):
        again = find_difference(expected, trace(stock(directory)))
        return f"stock differs from itself: {again}" if again else difference
    if difference := find_difference(expected[-len(closed) :], closed):
        return f"after close(): {difference}"
    return "" if outcome.num_streamed else "no layer was streamed"


def trace(model: Any, generations: Sequence[Any] = GENERATIONS, *, numbers: Sequence[int] = EVERY) -> list[Any]:
    """Return the logits of every call and the state of every cache after each generation that runs, with labels."""
    found: list[Any] = prompt_in_parts(model) if generations is GENERATIONS and IN_PARTS in numbers else []
    found += side_by_side(model) if generations is GENERATIONS and SIDE_BY_SIDE in numbers else []
    for i, calls in enumerate(generations, len(GENERATIONS) - len(generations)):
        if i not in numbers:
            continue
        cache = make_prompt_cache(model)
        for j, rows in enumerate(calls):
            change_loans(model, i + j)
            logits = model(mx.array(rows), cache=cache)
            mx.eval(logits, [leaf for _, leaf in states(cache) if isinstance(leaf, mx.array)])
            found.append((f"logits of call {j} of generation {i}", logits))
        found += [(f"cache {path} after generation {i}", leaf) for path, leaf in states(cache)]
    return found


def only(numbers: Sequence[int], traced: list[Any]) -> list[Any]:
    """Return the part of a trace that belongs to some generations."""
    others = {IN_PARTS: "prompt in parts", SIDE_BY_SIDE: "side by side"}
    ends = tuple(others.get(number, f"generation {number}") for number in numbers)
    return [(label, leaf) for label, leaf in traced if label.endswith(ends)]


def prompt_in_parts(model: Any) -> list[Any]:
    """Return the last logits of a prompt that is computed in parts, and its cache. A streamed model shares a pass."""
    cache, tokens = make_prompt_cache(model), mx.array([LONG_PROMPT[: PART * 3]])
    if isinstance(model, FlashLLM) and model.engine is not None:
        logits = computed(model, tokens, cache, PART)
    else:
        logits = alone(model, tokens, cache)
    mx.eval(logits, [leaf for _, leaf in states(cache) if isinstance(leaf, mx.array)])
    return [
        ("logits of a prompt in parts", logits),
        *((f"cache {path} of a prompt in parts", leaf) for path, leaf in states(cache)),
    ]


def side_by_side(model: Any) -> list[Any]:
    """Return the logits of sequences, and their caches. Those of a streamed model share passes; others run alone."""
    caches = [make_prompt_cache(model) for _ in SEQUENCES]
    tokens = [mx.array([sequence]) for sequence in SEQUENCES]
    found: list[Any] = []
    for number in range(NUM_TOKENS + 1):
        if isinstance(model, FlashLLM) and model.engine is not None:
            rows = [model.row(new, cache, PART) for new, cache in zip(tokens, caches, strict=True)]
            while not all(row.is_done for row in rows):
                model.advance(rows)
            errors = [row.error for row in rows if row.error is not None]
            if errors:
                raise errors[0]
            logits = [row.outputs[-1] for row in rows]
        else:
            logits = [alone(model, new, cache) for new, cache in zip(tokens, caches, strict=True)]
        tokens = [mx.argmax(one, -1) for one in logits]
        mx.eval(logits, tokens)
        found += [(f"logits of token {number} of sequence {i} side by side", one) for i, one in enumerate(logits)]
    for i, cache in enumerate(caches):
        found += [(f"cache {path} of sequence {i} side by side", leaf) for path, leaf in states(cache)]
    return found


def alone(model: Any, tokens: mx.array, cache: Any) -> mx.array:
    """Return the last logits of a call in parts."""
    for start in range(0, tokens.shape[1] - 1, PART):
        model(tokens[:, start : min(start + PART, tokens.shape[1] - 1)], cache=cache)
        mx.eval([leaf for _, leaf in states(cache) if isinstance(leaf, mx.array)])
    return model(tokens[:, -1:], cache=cache)


def change_loans(model: Any, number: int) -> None:
    """Lend memory to some weights and experts, to all of them, or to none, by the number of the call."""
    if isinstance(model, FlashLLM) and model.engine is not None:
        lending = model.engine.lending
        lending.recall(1 << 40)
        lending.lend((0, model.plan.streaming.read_bytes // 2, 1 << 40)[number % 3])


def states(cache: list[Any]) -> list[tuple[str, Any]]:
    """Return every array and number of a prompt cache, with its path; of keys and values only the tokens."""
    flat: list[tuple[str, Any]] = tree_flatten([_state(entry) for entry in cache])
    return flat


def _state(entry: Any) -> Any:
    if not isinstance(entry, KVCache | QuantizedKVCache):
        return entry.state
    return tree_map(lambda leaf: leaf[..., : entry.offset, :] if isinstance(leaf, mx.array) else leaf, entry.state)


def find_flaw(first: tuple[str, mx.array]) -> str:
    """Return why logits prove nothing, or an empty text. (A model may mask tokens, with minus infinity.)"""
    logits = first[1].astype(mx.float32)
    usable = mx.isfinite(logits) | (logits == -mx.inf)
    if not bool(usable.all()) or not bool(mx.isfinite(logits).any()):
        return "stock logits are not finite"
    lowest = mx.where(mx.isfinite(logits), logits, mx.inf).min(axis=-1)
    spread = float((logits.max(axis=-1) - lowest).min())
    if spread < 1e-2:
        return f"stock logits are all alike: they spread over {spread:.3g}"
    return ""


def find_difference(expected: list[Any], got: list[Any]) -> str:
    """Return where two traces first differ, or an empty text."""
    if [label for label, _ in expected] != [label for label, _ in got]:
        return "caches of different shape"
    for (label, left), (_, right) in zip(expected, got, strict=True):
        if not same(left, right):
            return f"{label}: {how_different(left, right)}"
    return ""


def same(left: Any, right: Any) -> bool:
    """Return True when two leaves are equal, arrays bit for bit."""
    if not isinstance(left, mx.array) or not isinstance(right, mx.array):
        return type(left) is type(right) and bool(left == right)
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype in (mx.bool_, mx.complex64) or not left.size:
        return bool(mx.array_equal(left, right))
    unsigned = UNSIGNED[left.dtype.size]
    return bool(mx.array_equal(mx.contiguous(left).view(unsigned), mx.contiguous(right).view(unsigned)))


def how_different(left: Any, right: Any) -> str:
    """Describe a leaf in a few words."""
    if not isinstance(left, mx.array) or not isinstance(right, mx.array):
        return f"{left!r} became {right!r}"[:200]
    if left.dtype != right.dtype or left.shape != right.shape:
        return f"{left.dtype} {left.shape} became {right.dtype} {right.shape}"
    if not bool(mx.isfinite(right).all()):
        return "not finite"
    return f"off by {float(mx.abs(left.astype(mx.float32) - right.astype(mx.float32)).max()):.3g}"


def describe(model: FlashLLM, outcome: Outcome) -> None:
    """Note the streamed layers and their bytes."""
    layout, engine = model.layout, model.engine
    assert engine is not None
    parameters = [p for unit in layout.units for p in [*unit.large, *unit.small]] + layout.resident
    outcome.nbytes = sum(p.nbytes for p in parameters)
    outcome.streamed_bytes = sum(p.nbytes for p in parameters if engine.is_streamed(p.container, p.key))
    layers = {id(layer): layer for layer in model.layers if layer is not None}.values()
    outcome.num_layers, outcome.num_stacks = len(layers), len(layout.experts)
    outcome.num_streamed = sum(
        any(engine.is_streamed(module, key) for module in layer.modules() for key in module) for layer in layers
    )


def one_line(error: BaseException) -> str:
    """Return an exception in one line, with its innermost frame outside the zoo."""
    text = " ".join(str(error).split())
    frames = []
    trace_back = error.__traceback__
    while trace_back is not None:
        code = trace_back.tb_frame.f_code
        frames.append(f"{Path(code.co_filename).name}:{trace_back.tb_lineno}")
        trace_back = trace_back.tb_next
    return f"{type(error).__name__}: {text[:240]} ({frames[-1]})"
