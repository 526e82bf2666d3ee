"""Cost of the KV caches: memory and latency of their forms, and speed of layers on disk.

    python benchmarks/kv.py forms    # memory over the sequence, and the slowest tokens, against mlx-lm's cache
    python benchmarks/kv.py disk     # tokens/s, bytes on disk and peak memory at some lengths of the context
    python benchmarks/kv.py shared   # memory of conversations with one system prompt, in mlx-lm's prompt cache
    python benchmarks/kv.py growth   # a whole model: no cache, one that concatenates, one that grows, one of full size

Only caches and attention run, on random keys and values, because the rest of a model is the same for all caches;
``growth`` runs a small Llama of random weights. Every measurement is a process of its own. The outputs of attention, or
the logits of the model, are compared with those of mlx-lm's cache, bit for bit, but for those without a cache.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from harness import describe, describe_cold, run_worker, write_json
from mlx_lm.models.cache import ConcatenateKVCache, KVCache, LRUPromptCache
from mlx_lm.models.llama import Model, ModelArgs

from mlx_flash.kv.diskcache import make_caches
from mlx_flash.kv.kvpool import KVPool
from mlx_flash.kv.options import KVOptions
from mlx_flash.memory.footprint import footprint, peak_footprint

MB = 1e6
DTYPE = mx.float16


def random_rows(seed: int, num_tokens: int, heads: int, width: int) -> mx.array:
    return mx.random.normal((1, heads, num_tokens, width), key=mx.random.key(seed)).astype(DTYPE)


def pass_through(caches: list[Any], seed: int, num_tokens: int, args: argparse.Namespace) -> mx.array:
    """Run new tokens through all layers, each on the output of the one before, as in a model."""
    hidden = random_rows(seed, num_tokens, args.heads, args.width)
    mask = "causal" if num_tokens > 1 else None
    for cache in caches:
        hidden = attend(cache, hidden, mask, args.width**-0.5)
    return hidden


def attend(cache: Any, hidden: mx.array, mask: str | None, scale: float) -> mx.array:
    """Run one layer. As in a model, nothing refers to its keys and values when it returns."""
    keys, values = cache.update_and_fetch(hidden, hidden * 0.5)
    return hidden + mx.fast.scaled_dot_product_attention(hidden, keys, values, scale=scale, mask=mask)


def fill(caches: list[Any], length: int, args: argparse.Namespace) -> None:
    """Add a prompt's keys and values, without attention, which would take most of the time."""
    for start in range(0, length, args.prefill_step_size):
        num_tokens = min(args.prefill_step_size, length - start)
        rows = random_rows(start, num_tokens, args.heads, args.width)
        for cache in caches:
            mx.eval(cache.update_and_fetch(rows, rows * 0.5))
            del cache


def measure_form(args: argparse.Namespace) -> dict[str, Any]:
    caches = [KVCache() for _ in range(args.layers)]
    if args.form != "stock":
        reserve = {} if args.form == "step" else {"max_context_length": args.length}
        caches = make_caches(caches, KVOptions(form=args.form, **reserve))
    mx.eval(pass_through([KVCache()], 0, 1, args))
    base, seconds, memory, digest = footprint(), [], [], hashlib.sha256()
    for position in range(args.length):
        began = time.perf_counter()
        out = pass_through(caches, position, 1, args)
        mx.eval(out)
        seconds.append(time.perf_counter() - began)
        digest.update(bytes(memoryview(out)))  # type: ignore[arg-type]
        if position % 256 == 255:
            memory.append(footprint() - base)
    borders = [seconds[i] for i in range(256, args.length, 256)]
    between = [s for i, s in enumerate(seconds) if i % 256 not in (0, 1) and i > 256]
    return {
        "form": args.form,
        "first_ms": seconds[0] * 1e3,
        "median_ms": statistics.median(seconds) * 1e3,
        "border_median_ms": statistics.median(borders) * 1e3,
        "border_worst_ms": max(borders) * 1e3,
        "between_worst_ms": max(between) * 1e3,
        "border_ms": [round(s * 1e3, 2) for s in borders],
        "between_ms": [
            round(statistics.median(seconds[i + 2 : i + 256]) * 1e3, 2) for i in range(256, args.length, 256)
        ],
        "memory_mb": [round(nbytes / MB, 1) for nbytes in memory],
        "peak_mb": (peak_footprint() - base) / MB,
        "digest": digest.hexdigest(),
    }


def measure_disk(args: argparse.Namespace) -> dict[str, Any]:
    caches = [KVCache() for _ in range(args.layers)]
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        kv_bytes = args.length * args.layers * args.heads * args.width * DTYPE.size * 2
        budget = None
        if args.form != "stock":
            options = KVOptions(
                form="preallocated", max_context_length=args.length + 256, directory=Path(folder), step=args.step
            )
            least = options.least_bytes([kv_bytes // args.length // args.layers] * args.layers, args.length + 256)
            budget = max(least, int(kv_bytes * args.share))
            options = replace(options, budget_bytes=budget)
            caches = make_caches(caches, options)
        mx.eval(pass_through([KVCache()], 0, 1, args))
        base, began = footprint(), time.perf_counter()
        fill(caches, args.length, args)
        filled, digest = time.perf_counter() - began, hashlib.sha256()
        mx.eval(pass_through(caches, 10**6, 1, args))
        read, seconds = sum(pool.note().read_bytes for pool in {c.pool for c in caches if args.form != "stock"}), []
        waited = sum(pool.stats.wait_seconds for pool in {c.pool for c in caches if args.form != "stock"})
        for i in range(args.tokens):
            began = time.perf_counter()
            out = pass_through(caches, 10**6 + 1 + i, 1, args)
            mx.eval(out)
            seconds.append(time.perf_counter() - began)
            digest.update(bytes(memoryview(out)))  # type: ignore[arg-type]
        result = {
            "form": args.form,
            "share": args.share,
            "length": args.length,
            "kv_mb": kv_bytes / MB,
            "fill_s": filled,
            "tokens_per_s": 1 / statistics.median(seconds),
            "peak_mb": (peak_footprint() - base) / MB,
            "digest": digest.hexdigest(),
        }
        if args.form != "stock":
            pool = caches[0].pool
            result |= {
                "budget_mb": None if budget is None else budget / MB,
                "memory_mb": pool.memory_bytes / MB,
                "disk_mb": pool.note().disk_bytes / MB,
                "written_mb": pool.note().written_bytes / MB,
                "read_mb_per_token": (pool.note().read_bytes - read) / args.tokens / MB,
                "wait_ms_per_token": (pool.stats.wait_seconds - waited) / args.tokens * 1e3,
                "layers_on_disk": sum(cache.is_on_disk for cache in caches),
            }
            pool.close()
        return result


def measure_shared(args: argparse.Namespace) -> dict[str, Any]:
    """Measure conversations as mlx-lm's server keeps them: each starts from a trimmed copy of another one."""
    mx.set_cache_limit(0)  # as a streamed model has it on the CPU back end
    pool = KVPool(KVOptions())

    def new() -> list[Any]:
        plain = [KVCache() for _ in range(args.layers)]
        return plain if args.form == "stock" else make_caches(plain, pool.options, pool)

    warm = new()
    fill(warm, 512, args)
    del warm
    cache, fetched, begun, digest = LRUPromptCache(), [], [], hashlib.sha256()
    base = footprint()
    for number in range(args.conversations):
        prompt = [*range(args.length), *range(-args.own * (number + 1), -args.own * number)]
        began = time.perf_counter()
        caches, rest = cache.fetch_nearest_cache("model", prompt)
        fetched.append(time.perf_counter() - began)
        caches = caches or new()
        began = time.perf_counter()
        fill(caches, len(rest), args)
        begun.append(time.perf_counter() - began)
        out = pass_through(caches, number, 1, args)
        mx.eval(out)
        digest.update(bytes(memoryview(out)))  # type: ignore[arg-type]
        cache.insert_cache("model", [*prompt, 0], caches)
        del caches
    gc.collect()
    running = footprint() - base
    fill(new(), 1, args)  # a conversation that shares nothing, and is dropped
    gc.collect()
    return {
        "form": args.form,
        "digest": digest.hexdigest(),
        "conversations": args.conversations,
        "one_mb": 2 * args.layers * args.heads * args.width * DTYPE.size * len(prompt) / MB,
        "one_computed_mb": running / MB,
        "all_idle_mb": (footprint() - base) / MB,
        "copy_ms": statistics.median(fetched[1:]) * 1e3,
        "begin_ms": statistics.median(begun[1:]) * 1e3,
    }


def measure_growth(args: argparse.Namespace) -> dict[str, Any]:
    """Measure a prompt in mlx-lm's steps, and tokens after it. Without a cache each call computes all tokens again."""
    mx.random.seed(0)
    heads = {"num_attention_heads": args.heads, "num_key_value_heads": args.heads}
    sizes = {"hidden_size": args.heads * args.width, "intermediate_size": 4 * args.heads * args.width}
    model = Model(
        ModelArgs("llama", num_hidden_layers=args.layers, **sizes, **heads, rms_norm_eps=1e-5, vocab_size=1000)
    )
    model.set_dtype(DTYPE)
    mx.eval(model.parameters())
    caches = _caches_of(args)
    tokens = [1 + 7 * i % 997 for i in range(args.length)]
    copied, digest, began = 0, hashlib.sha256(), time.perf_counter()
    step = args.length if caches is None else args.prefill_step_size
    for start in range(0, args.length, step):
        logits, more = _call(model, caches, tokens[start : start + step], keep=args.form == "concatenate")
        copied += more
    first = time.perf_counter() - began
    prompt_copied, seconds = copied, []
    for _ in range(args.tokens):
        digest.update(bytes(memoryview(logits)))  # type: ignore[arg-type]
        tokens.append(int(logits.argmax()))
        began = time.perf_counter()
        logits, more = _call(model, caches, tokens if caches is None else tokens[-1:], keep=args.form == "concatenate")
        seconds.append(time.perf_counter() - began)
        copied += more
    return {
        "form": args.form,
        "length": args.length,
        "first_token_s": first,
        "prefill_tokens_per_s": args.length / first,
        "token_ms": statistics.median(seconds) * 1e3,
        "copied_in_prompt_mb": prompt_copied / MB,
        "copied_after_mb": (copied - prompt_copied) / MB,
        "peak_mb": peak_footprint() / MB,
        "digest": "" if caches is None else digest.hexdigest(),
    }


def _caches_of(args: argparse.Namespace) -> list[Any] | None:
    if args.form == "none":
        return None
    if args.form == "concatenate":
        return [ConcatenateKVCache() for _ in range(args.layers)]
    caches: list[Any] = [KVCache() for _ in range(args.layers)]
    if args.form == "stock":
        return caches
    return make_caches(caches, KVOptions(form=args.form, max_context_length=args.length + args.tokens))


def _call(model: Model, caches: list[Any] | None, tokens: list[int], keep: bool) -> tuple[mx.array, int]:
    """Return the last logits in fp32, and the bytes of keys and values that new buffers took from old ones.

    Args:
        model: what is called.
        caches: of its layers.
        tokens: of the call.
        keep: whether buffers hold the tokens alone, so that each call makes new ones.
    """
    before = [] if caches is None else [_buffer(cache) for cache in caches]
    logits = model(mx.array([tokens]), cache=caches)[:, -1].astype(mx.float32)
    mx.eval(logits, [] if caches is None else [cache.state for cache in caches])
    after = [] if caches is None else [_buffer(cache) for cache in caches]
    return logits, sum(old[1] for old, new in zip(before, after, strict=True) if keep or old[0] != new[0])


def _buffer(cache: Any) -> tuple[int, int]:
    """Return the tokens that the buffers of a cache have room for, and the bytes of keys and values in them."""
    if cache.keys is None:
        return 0, 0
    room = cache.keys.shape[2]
    return room, 2 * cache.keys.nbytes // room * cache.offset


def in_own_process(args: argparse.Namespace, **settings: Any) -> dict[str, Any]:
    not_passed_on = {"command", "one", "plot", "json", "lengths", "shares"}
    values = {name: value for name, value in (vars(args) | settings).items() if name not in not_passed_on}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]
    return run_worker(__file__, [args.command, "--one", *words], label=f"{args.command} {settings}")


def table(columns: list[str], results: list[dict[str, Any]]) -> str:
    rows = [[_cell(result.get(column)) for column in columns] for result in results]
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def check_equal(results: list[dict[str, Any]]) -> None:
    digests = {(result.get("length"), result["digest"]) for result in results if result["digest"]}
    lengths = {length for length, _ in digests}
    if len(digests) != len(lengths):
        raise SystemExit("attention gave other bits than with mlx-lm's cache")


def plot(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib  # an extra: plots

    matplotlib.use("agg")
    from matplotlib import pyplot

    _, (memory, latency) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for result in results:
        tokens = [256 * (i + 1) for i in range(len(result["memory_mb"]))]
        (line,) = memory.plot(tokens, result["memory_mb"], label=result["form"])
        latency.plot(tokens[:-1], result["border_ms"], "o-", color=line.get_color(), label=result["form"])
        latency.plot(tokens[:-1], result["between_ms"], ":", color=line.get_color())
    memory.set(xlabel="tokens", ylabel="committed memory, MB")
    latency.set(xlabel="tokens", ylabel="ms", title="the first token of 256 (dots), the others' median (dotted)")
    latency.set_ylim(bottom=0)
    memory.legend()
    pyplot.savefig(path)


def forms(args: argparse.Namespace) -> list[dict[str, Any]]:
    results = [in_own_process(args, form=form) for form in ("stock", "step", "preallocated")]
    for result in results:
        memory = result["memory_mb"]
        result["at_quarter_mb"], result["at_end_mb"] = memory[len(memory) // 4 - 1], memory[-1]
    if args.plot:
        plot(results, args.plot)
    timings = ["first_ms", "median_ms", "border_median_ms", "border_worst_ms", "between_worst_ms"]
    print(table(["form", *timings, "at_quarter_mb", "at_end_mb", "peak_mb"], results))
    return results


def disk(args: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    for length in args.lengths:
        results.append(in_own_process(args, form="stock", length=length, share=None))
        for share in args.shares:
            results.append(in_own_process(args, form="preallocated", length=length, share=share))
    columns = [
        "length",
        "form",
        "kv_mb",
        "budget_mb",
        "layers_on_disk",
        "tokens_per_s",
        "fill_s",
        "memory_mb",
        "peak_mb",
    ]
    print(table([*columns, "disk_mb", "written_mb", "read_mb_per_token", "wait_ms_per_token"], results))
    return results


def shared(args: argparse.Namespace) -> list[dict[str, Any]]:
    results = [in_own_process(args, form=form) for form in ("stock", "step")]
    columns = ["form", "conversations", "one_mb", "one_computed_mb", "all_idle_mb", "copy_ms", "begin_ms"]
    print(table(columns, results))
    return results


def growth(args: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    for length in args.lengths:
        results += [in_own_process(args, form=form, length=length) for form in GROWTH_FORMS]
    columns = ["length", "form", "first_token_s", "prefill_tokens_per_s", "token_ms"]
    print(table([*columns, "copied_in_prompt_mb", "copied_after_mb", "peak_mb"], results))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=[*COMMANDS])
    parser.add_argument("--one", action="store_true", help="one measurement, in this process")
    parser.add_argument("--form", default="stock")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--length", type=int, default=4096, help="tokens")
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 8192, 32768])
    parser.add_argument("--share", type=float, help="of the cache that may be in memory")
    parser.add_argument("--shares", type=float, nargs="*", default=[1.2, 0.6, 0.3])
    parser.add_argument("--step", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=8, help="tokens that are timed")
    parser.add_argument("--prefill-step-size", type=int, default=2048)
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--own", type=int, default=200, help="tokens of a conversation after the shared prefix")
    parser.add_argument("--directory", type=Path, help="folder for the files")
    parser.add_argument("--plot", type=Path, help="a picture of memory and latency over tokens")
    parser.add_argument("--json", type=Path, help="a file for all numbers")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(COMMANDS[args.command][0](args)))
        return
    results = COMMANDS[args.command][1](args)
    check_equal(results)
    folder = args.directory or Path(tempfile.gettempdir())
    cold = describe_cold(None, is_direct=True if args.command == "disk" else None)  # each run writes its own files
    write_json(args.json, {**describe(folder, cold), "results": results})


GROWTH_FORMS = ("none", "concatenate", "stock", "preallocated")

COMMANDS = {
    "forms": (measure_form, forms),
    "disk": (measure_disk, disk),
    "shared": (measure_shared, shared),
    "growth": (measure_growth, growth),
}
"""For each command: the function that measures one case in this process, and the one that measures and prints all."""

if __name__ == "__main__":
    main()
