"""Trials: a generation that an event disturbs, and what must be right after it."""

from __future__ import annotations

import copy
import errno
import gc
import itertools
import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import can_trim_prompt_cache, load_prompt_cache, save_prompt_cache, trim_prompt_cache

import mlx_flash
from differential.runs import Falls, Run
from differential.scripts import (
    Output,
    Script,
    can_be_put_back,
    cut,
    is_quantized,
    make_cache,
    offsets,
    tokens_of,
)
from differential.signals import Reads, is_ours, struck
from differential.stock import PLAIN_TOKENIZER, Stock, Told
from differential.table import Row, Subject, Zoo
from interrupt_points import Tracer
from mlx_flash import BudgetError, CacheError, ClosedError, FlashManager, ReadError, WriteError
from mlx_flash.generation import batches
from oracle import Oracle, on_a_machine
from streamed import wait_for_reads


class Wrong(AssertionError):
    """Output, a cache, or an error that differs from what it must be."""


class Boom(Exception):
    """An error of the caller's own functions."""


class Trial:
    """One generation with a row's model, which an event disturbs."""

    def __init__(self, subject: Subject, stock: Stock, event: str, seed: str) -> None:
        self.subject, self.stock, self.event = subject, stock, event
        self.dice = random.Random(seed)
        self.errors: list[BaseException] = []  # that surfaced
        self.allowed: tuple[type[BaseException], ...] = ()  # errors that the event may raise
        self.counts: Counter[str] = Counter()  # what came of it, by kind
        self.falls = Falls()
        row = subject.row
        # in a large budget, mlx-lm's own loop checks several guesses of a draft model in one call, with other bits
        self.ways = tuple(way for way in subject.ways if way != "draft" or event != "budget")
        ways = self.ways[row.place == "quantized" or event in CALLBACKS :]
        prompt = tokens_of(self.dice.randrange(6), self.dice.choice((1, 2, 5, 13, 18, 25)))
        steps = (4, 8, 16)
        if row.place == "prefixes":  # which has pages of 256 tokens
            ways, prompt, steps = ("ours",), tokens_of(self.dice.randrange(2), 256) + prompt, (16, 32)
        way = self.dice.choice(ways)
        script = Script(
            folder=str(subject.folder),
            place=row.place,
            num_before=row.num_before,
            prompt=prompt,
            step=min(self.dice.choice(steps), subject.step),
            num_tokens=self.dice.randint(2, 6),
            way="calls" if way == "calls" else "steps",
            seed=self.dice.randrange(4) if way != "calls" and event not in ("sampler", "nested") else 0,
        )
        self.cache = subject.cache()
        self.run = Run(subject.model, script, way, self.cache, self.falls, subject.draft)
        subject.texts[prompt] = [token for token, _ in self.told.outputs]

    def __str__(self) -> str:
        script = self.run.script
        return (
            f"{self.subject.row} {self.event} by {self.run.way}: {len(script.prompt)} tokens in steps of {script.step},"
            f" {script.num_tokens} more"
        )

    @property
    def script(self) -> Script:
        """The generation."""
        return self.run.script

    @property
    def told(self) -> Told:
        """What mlx-lm computes for it."""
        return self.stock.told(self.script)

    def attempt(self, operation: Callable[[], None]) -> None:
        """Run an operation, and keep its error."""
        try:
            operation()
        except BaseException as error:
            self.errors.append(error)

    def stop_early(self) -> int:
        """Generate some of the tokens. Return how many."""
        number = self.dice.randint(1, self.script.num_tokens)
        self.run.generate(number)
        return number

    @property
    def num_passes(self) -> float:
        """About how many passes the generation takes."""
        return len(self.script.prompt) / self.script.step + self.script.num_tokens + 1

    def seconds(self) -> float:
        """Return about how long the generation takes."""
        return self.subject.seconds.get(self.run.way, 0.004) * self.num_passes

    # What must be right

    def check(self, is_complete: bool = True) -> None:
        """Compare errors, tokens and logits."""
        for error in self.errors:
            if not isinstance(error, self.allowed):
                raise Wrong(f"{type(error).__name__} surfaced: {error}") from error
        found = self.run.outputs
        self.counts["smaller steps"] += bool(self.script.parts)
        if is_complete and len(found) < self.script.num_tokens:
            raise Wrong(f"{len(found)} tokens instead of {self.script.num_tokens}")
        self.compare(found, self.told.outputs[: len(found)], "the generation")
        for number, (length, lengths) in enumerate(zip(self.told.at_yield, self.run.lengths, strict=False)):
            if not lengths <= {length}:
                raise Wrong(f"the cache said {lengths}, not {length}, when token {number} was handed out")

    def compare(self, found: Sequence[Output], expected: Sequence[Output], what: str) -> None:
        """Compare tokens and logits."""
        if [token for token, _ in found] != [token for token, _ in expected]:
            raise Wrong(f"tokens of {what} {[t for t, _ in found]}, not {[t for t, _ in expected]}")
        if list(found) != list(expected):
            number = next(i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
            raise Wrong(f"logits of {what} differ at token {number}")

    def check_fresh(self) -> None:
        """Generate two tokens with a new cache."""
        model = self.subject.model
        run = Run(model, fresh_script(self.subject.folder), "calls", make_cache(model, ""), self.falls)
        run.generate()
        self.compare(run.outputs, self.stock.told(run.script).outputs, f"a fresh call of {self.subject.row}")

    def check_cache(self, cache: list[Any] | None = None, lengths: Sequence[int] = (), num_trimmed: int = 0) -> None:
        """Continue a cache, or the trial's, from which tokens were dropped, and compare with mlx-lm's from there on.

        ``lengths`` are those that it may have; without any, those between two calls.
        """
        cache = self.cache if cache is None else cache
        way = self.dice.choice(self.ways[self.script.place == "quantized" :])
        steps = "calls" if way == "calls" else "steps"
        prompt = tokens_of(7, self.dice.choice((1, 3)))
        script = Script(self.script.folder, self.script.place, 0, prompt, 4, 2, steps)
        run = Run(self.subject.model, script, way, cache, self.falls, self.subject.draft)
        forms, can_go_on = is_quantized(cache), can_be_put_back(cache)
        try:
            run.generate()
        except CacheError as error:
            self._refuse(error, can_go_on)
            return
        ends = offsets(cache)
        if len(ends) > 1:
            raise Wrong(f"uneven: layers at {[getattr(entry, 'offset', None) for entry in cache]}")
        allowed = list(lengths) or self.told.lengths
        begins = {end - script.num_added + num_trimmed for end in ends}
        candidates = [length for length in allowed if length in begins or not begins]
        if not candidates:
            raise Wrong(f"the cache was at {begins}, not at any of {allowed}")
        expected: Any = None
        for length in candidates:
            number = self.told.lengths.index(length)
            expected = self.stock.ask("continued", self.script, number, forms, num_trimmed, run.script)
            if run.outputs == expected:
                return
        self.compare(run.outputs, expected, f"the cache that goes on from {candidates} by {way}")
        raise Wrong("the cache that goes on")

    def carry_out(self) -> Counter[str]:
        """Carry the trial out. Return what came of it: ``right``, ``struck``, ``refused``. Raises: Wrong: a fault."""
        with self.falls.heard():
            EVENTS[self.event](self)
        self.counts["struck"] += bool(self.errors)
        self.counts["right"] += 1
        return self.counts

    def finish(self, is_complete: bool = True, lengths: Sequence[int] = ()) -> None:
        """Check what every event leaves: the output up to now, the model, and the cache, which is used in some way.

        ``lengths`` are those that the cache may have, as for :meth:`check_cache`: it has no reason to refuse then.
        """
        self.check(is_complete)
        use = self.dice.choice(("goes on", "fresh first", "look", "copy", "save", "trim"))
        if use == "fresh first":
            self.check_fresh()
        try:
            self._use(use, lengths)
        except CacheError as error:
            self._refuse(error, bool(lengths) or can_be_put_back(self.cache))
        if use != "fresh first":
            self.check_fresh()

    def _use(self, use: str, lengths: Sequence[int]) -> None:
        """Use the cache as callers do, and then continue it."""
        if use == "look":
            self.length()
        elif use == "copy":
            self.check_cache(copy.deepcopy(self.cache), lengths)
        elif use == "save":
            self.check_cache(self.saved(), lengths)
        elif use == "trim" and can_trim_prompt_cache(self.cache):
            self.check_cache(lengths=lengths, num_trimmed=self.trimmed(self.length()))
            return
        self.check_cache(lengths=lengths)

    def length(self) -> int:
        """Return the length of the cache, which all layers have, unless it can only refuse what comes next."""
        found = offsets(self.cache)
        if len(found) > 1 and can_be_put_back(self.cache):
            raise Wrong(f"uneven: layers at {[getattr(entry, 'offset', None) for entry in self.cache]} before a use")
        return found.pop() if len(found) == 1 else self.script.num_before

    def trimmed(self, length: int) -> int:
        """Drop some tokens. Return how many."""
        wanted = self.dice.randint(0, min(length - self.script.num_before, 9))
        found: int = trim_prompt_cache(self.cache, wanted) if wanted else 0
        if found != wanted:
            raise Wrong(f"{found} tokens trimmed, not {wanted}")
        return found

    def saved(self) -> list[Any]:
        """Save the cache, and return what is loaded."""
        with tempfile.TemporaryDirectory() as folder:
            save_prompt_cache(f"{folder}/cache.safetensors", self.cache)
            loaded: list[Any] = load_prompt_cache(f"{folder}/cache.safetensors")
            mx.eval([entry.state for entry in loaded if not entry.empty()])
        return loaded

    def _refuse(self, error: CacheError, can_go_on: bool) -> None:
        """Accept that a cache refuses, if it could not be put back."""
        if can_go_on and not any(isinstance(each, ReadError | WriteError) for each in self.errors):
            raise Wrong(f"a cache of keys and values refuses: {error}") from error
        self.counts["refused"] += 1


def fresh_script(folder: Path) -> Script:
    """Return a short generation."""
    return Script(str(folder), "", 0, tokens_of(2, 4), 4, 2, "calls")


# Events


def none(trial: Trial) -> None:
    """Nothing happens, and the cache has mlx-lm's length."""
    began = time.perf_counter()
    trial.run.generate()
    trial.subject.seconds[trial.run.way] = (time.perf_counter() - began) / trial.num_passes
    trial.check()
    trial.check_cache(lengths=trial.told.lengths[-1:])


def _gaps(dice: random.Random) -> list[float]:
    longest = dice.choice((1e-4, 5e-4, 1.5e-3))
    return [dice.uniform(1e-5, longest) for _ in range(dice.randint(1, 5))]


def _strike(kind: type[BaseException], is_burst: bool, trial: Trial) -> None:
    gaps = _gaps(trial.dice) if is_burst else []
    trial.errors += struck(trial.run.generate, kind, [trial.dice.uniform(1e-5, trial.seconds()), *gaps])
    _check_ours(trial.errors)
    trial.allowed = (KeyboardInterrupt, TimeoutError)
    trial.finish(is_complete=not trial.errors)


def traced(trial: Trial) -> None:
    """An interrupt comes at an instruction of the thread that waits for passes."""
    if Tracer(_point(trial.dice)).strike(trial.run.generate):
        trial.errors, trial.allowed = [KeyboardInterrupt()], (KeyboardInterrupt,)
    trial.finish(is_complete=not trial.errors)


def _point(dice: random.Random) -> int:
    return int(10 ** dice.uniform(0, 3.3))


def _check_ours(errors: list[BaseException]) -> None:
    for error in errors:
        if not is_ours(error):
            raise Wrong(f"{type(error).__name__} instead of the handler's own error: {error}") from error


def read_fails(trial: Trial) -> None:
    """Reads of weights fail, or of keys and values, and later ones do not."""
    of_kv = trial.script.num_before and trial.dice.random() < 0.5
    reads = Reads(trial.subject.kv_folder, "*/*.kv") if of_kv else Reads(trial.subject.folder)
    kind, count = trial.dice.choice(reads.KINDS), trial.dice.choice((1, 3, 1 << 30))
    with reads.watched(kind, trial.dice.randrange(1, 60), count):
        trial.attempt(trial.run.generate)
    trial.counts["failed reads"] += bool(reads.num_failed)
    trial.allowed = (ReadError,)
    if trial.errors and kind == "part":
        raise Wrong(f"a read that gives part of the bytes is an error: {trial.errors[0]}") from trial.errors[0]
    try:
        trial.check_fresh()
    except ReadError:  # of a read ahead that had failed
        trial.counts["late errors"] += 1
    trial.finish(is_complete=not trial.errors)


def write_fails(trial: Trial) -> None:
    """Keys and values cannot be written, from some write on. What was lost stays lost, for the caches that had it."""
    if not trial.script.num_before:
        return
    first, real = trial.dice.randrange(12), os.pwrite
    numbers = itertools.count()

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        if next(numbers) >= first:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    os.pwrite = pwrite
    try:
        trial.attempt(trial.run.generate)
    finally:
        os.pwrite = real
    trial.allowed = (WriteError,)
    trial.counts["failed writes"] += bool(trial.errors)
    trial.check(is_complete=not trial.errors)
    trial.check_fresh()
    try:
        trial.check_cache()
    except WriteError:
        trial.counts["lost"] += 1


def _callback(name: str, result: Callable[..., Any], trial: Trial) -> None:
    """A function of the caller's raises an error at a random call."""
    calls = iter(range(1 << 30))
    last = trial.dice.randrange(trial.script.num_tokens + 2)

    def function(*arguments: Any) -> Any:
        if next(calls) == last:
            raise Boom
        return result(*arguments)

    trial.allowed = (Boom,)
    option: Any = [function] if name == "logits_processors" else function
    trial.attempt(lambda: trial.run.generate(**{name: option}))
    trial.finish(is_complete=not trial.errors)


def sampler_calls(trial: Trial) -> None:
    """A sampler calls the model with another cache, which works or is refused."""
    other, results = make_cache(trial.subject.model, ""), list[mx.array]()

    def sampler(logits: mx.array) -> mx.array:
        if not results:
            found = trial.subject.model(mx.array([[5, 6]]), cache=other)
            mx.eval(found)
            results.append(found)
        return mx.argmax(logits, axis=-1)

    trial.attempt(lambda: trial.run.generate(sampler=sampler))
    trial.finish(is_complete=not trial.errors)


def reads(trial: Trial) -> None:
    """Nothing happens, and tokens read what the plan says."""
    subject = trial.subject
    plan, cache = subject.model.plan, subject.cache()
    if plan.pool is not None:
        return  # it keeps some
    for _ in range(2):
        mx.eval(subject.model(mx.array([[1]]), cache=cache))
    wait_for_reads(subject.model)
    watched, number = Reads(subject.folder), trial.dice.randint(1, 3)
    with watched.watched():
        for _ in range(number):
            mx.eval(subject.model(mx.array([[1]]), cache=cache))
        wait_for_reads(subject.model)
    most = plan.streaming.read_bytes + EMBEDDING_BYTES + (subject.row.budget == "min") * (watched.num_reads << 13)
    if not plan.streaming.read_bytes <= watched.nbytes / number <= most:
        raise Wrong(f"{watched.nbytes / number} bytes a token, not {plan.streaming.read_bytes}")
    trial.counts["reads as planned"] += 1


EMBEDDING_BYTES = 512
"""At most so many bytes of an embedding table are read for a token."""


def loading(trial: Trial) -> None:
    """A model is loaded, with an interrupt or a burst, and then again."""
    subject, dice = trial.subject, trial.dice
    trial.cache = trial.run.cache = []
    subject.close_model()
    gaps = _gaps(dice) if dice.random() < 0.5 else []
    errors = struck(subject.reopen, KeyboardInterrupt, [dice.uniform(1e-4, 0.12), *gaps])
    _check_ours(errors)
    trial.counts["loads interrupted"] += bool(errors)
    if errors:
        del errors
        gc.collect()
        for model in [*FlashManager.of_process().running, *FlashManager.of_process().waiting]:
            model.close()  # which was loaded when the interrupt came
        subject.reopen()
    trial.check_fresh()


def stop(trial: Trial) -> None:
    """The caller closes the generator early, and the cache has mlx-lm's length."""
    number = trial.stop_early()
    trial.finish(is_complete=False, lengths=[trial.told.at_yield[number - 1]])


def copies(trial: Trial) -> None:
    """The cache is copied while its generator is open. Both go on."""
    made: Any = trial.run.generator()
    number = trial.dice.randint(1, trial.script.num_tokens)
    trial.run.take(made, number)
    second = copy.deepcopy(trial.cache)
    made.close()
    trial.check(is_complete=False)
    both = [trial.cache, second]
    trial.dice.shuffle(both)
    for cache in both:
        trial.check_cache(cache, [trial.told.at_yield[number - 1]])


def budget(trial: Trial) -> None:
    """The budget changes between two tokens, or from another thread."""
    manager, plan = FlashManager.of_process(), trial.subject.model.plan
    trial.subject.keeps_budget = False
    before, least = plan.budget_bytes, plan.minimum_bytes
    choices = [least, int(least + 5e5), int(least + 2e6), int(least + 2e7), int(2e9)]

    def change() -> None:
        try:
            manager.set_ram_budget(trial.dice.choice(choices) / 1e9)
        except BudgetError:
            trial.counts["refused budgets"] += 1

    errors: list[BaseException] = []
    if trial.dice.random() < 0.5:
        when = trial.dice.uniform(0, trial.seconds())
        thread = threading.Thread(target=lambda: (time.sleep(when), _kept(change, errors)))
        thread.start()
        trial.attempt(trial.run.generate)
        thread.join()
    else:
        made = trial.run.generator()
        trial.run.take(made, trial.dice.randint(1, trial.script.num_tokens))
        change()
        trial.run.take(made)
    trial.errors += errors
    trial.finish()
    manager.set_ram_budget(before / 1e9)
    trial.check_fresh()


def _kept(function: Callable[[], None], errors: list[BaseException]) -> None:
    try:
        function()
    except BaseException as error:
        errors.append(error)


def closes(trial: Trial) -> None:
    """The model is closed between two tokens, or by another thread. mlx-lm's model that is left is right."""
    model, errors = trial.subject.model, list[BaseException]()
    trial.subject.keeps_budget = False  # the plain model has none
    trial.allowed = (ClosedError, CacheError)
    if trial.dice.random() < 0.5:
        when = trial.dice.uniform(0, trial.seconds())
        thread = threading.Thread(target=lambda: (time.sleep(when), _kept(lambda: model.close() and None, errors)))
        thread.start()
        trial.attempt(trial.run.generate)
        thread.join()
    else:
        made: Any = trial.run.generator()
        trial.attempt(lambda: trial.run.take(made, 2))
        model.close()
        trial.attempt(made.close)
    trial.errors += errors
    trial.check(is_complete=False)
    plain = model.close()
    trial.subject.model = plain
    left = Run(plain, fresh_script(trial.subject.folder), "calls", make_cache(plain, ""), Falls())
    left.generate()
    trial.cache = trial.run.cache = []
    trial.subject.reopen()
    trial.compare(left.outputs, trial.stock.told(left.script).outputs, "the plain model that is left")
    trial.check_fresh()


def thread(trial: Trial) -> None:
    """Another thread generates, and the main thread goes on."""
    made = threading.Thread(target=lambda: trial.attempt(trial.run.generate))
    made.start()
    made.join()
    trial.finish()


def threads(trial: Trial) -> None:
    """Two threads generate at once."""
    other = Trial(trial.subject, trial.stock, "none", f"{trial.dice.random()}")
    if trial.script.seed or other.script.seed:
        return  # they would share the random numbers
    other.falls = trial.falls
    both = [threading.Thread(target=lambda it=it: it.attempt(it.run.generate)) for it in (trial, other)]
    for each in both:
        each.start()
    for each in both:
        each.join()
    if trial.falls.found:
        return  # nobody knows whose they are
    other.finish()
    trial.finish()


def turns(trial: Trial) -> None:
    """Two generators are open, and the caller takes tokens of them by turns."""
    other = Trial(trial.subject, trial.stock, "none", f"{trial.dice.random()}")
    if trial.script.seed or other.script.seed:
        return  # they would share the random numbers
    other.falls = trial.falls
    pairs = [(it.run, it.run.generator(), it.script.num_tokens) for it in (trial, other)]
    while unfinished := [pair for pair in pairs if len(pair[0].outputs) < pair[2]]:
        run, made, _ = trial.dice.choice(unfinished)
        run.take(made, len(run.outputs) + 1)
    for _, made, _ in pairs:
        made.close()  # type: ignore[attr-defined]
    if trial.falls.found:
        return  # nobody knows whose they are
    other.finish()
    trial.finish()


def _batch(kinds: Sequence[str], trial: Trial) -> None:
    subject, dice = trial.subject, trial.dice
    what = dice.choice(kinds)
    scripts = [replace(trial.script, way="steps", seed=0)]
    for _ in range(dice.randint(1, 3)):
        prompt = tokens_of(dice.randrange(6), dice.choice((1, 2, 5, 13, 18, 25)))
        scripts.append(replace(scripts[0], prompt=prompt, num_tokens=dice.randint(1, 5)))
    given = [subject.cache() for _ in scripts] if trial.script.num_before or dice.random() < 0.3 else None
    found: list[Any] = []

    def operation() -> None:
        found.append(
            mlx_flash.batch_generate(
                subject.model,
                PLAIN_TOKENIZER,
                [list(script.prompt) for script in scripts],
                given,
                max_tokens=[script.num_tokens for script in scripts],
                return_token_ids=True,
                return_logprobs=True,
                prefill_step_size=scripts[0].step,
            )
        )

    seconds = subject.seconds.get("ours", 0.004) * (10 + 4 * len(scripts))
    if what == "none":
        trial.attempt(operation)
    elif what == "traced":
        trial.errors += [KeyboardInterrupt()] * Tracer(_point(dice)).strike(operation)
        trial.allowed = (KeyboardInterrupt,)
    elif what == "read":
        with Reads(subject.folder).watched(dice.choice(("error", "end")), dice.randrange(1, 60), 3):
            trial.attempt(operation)
        trial.allowed = (ReadError,)
    else:
        gaps = _gaps(dice) if what == "burst" else []
        trial.errors += struck(operation, KeyboardInterrupt, [dice.uniform(1e-5, seconds), *gaps])
        trial.allowed = (KeyboardInterrupt,)
    for error in trial.errors:
        if not isinstance(error, trial.allowed):
            raise Wrong(f"{what} in a batch: {type(error).__name__}: {error}") from error
    if found:
        _check_batch(trial, scripts, found[0])
    trial.check_fresh()
    for cache in given or ():
        if not trial.script.num_before and any(offsets(cache)):
            raise Wrong(f"a given cache was changed: {offsets(cache)}")
        trial.check_cache(cache, [trial.script.num_before])


def _check_batch(trial: Trial, scripts: list[Script], found: Any) -> None:
    """Compare with each sequence alone, or in memory with mlx-lm's own batch."""
    in_memory = trial.subject.model.plan.streaming.num_units == 0
    if in_memory and (found.token_ids, found.logprobs) == trial.stock.ask("batched", tuple(scripts)):
        return
    for number, script in enumerate(scripts):
        total = len(script.prompt) - 1  # nobody knows whose step became smaller
        parts = [(), *(cut(total, script.step, [fall]) for fall in trial.falls.found if fall[0] < total)]
        alone = [trial.stock.told(replace(script, parts=each)).outputs for each in parts]
        expected = [([token for token, _ in each], [_logit(bits, token) for token, bits in each]) for each in alone]
        if (found.token_ids[number], found.logprobs[number]) not in expected:
            tokens = found.token_ids[number]
            raise Wrong(f"sequence {number} of a batch: {tokens}, not {expected[0][0]}; or log probabilities")


def _logit(logits: Any, token: int) -> float:
    kind = getattr(mx, logits[0].removeprefix("mlx.core."))
    return float(mx.array(np.frombuffer(logits[2], np.uint8)).view(kind)[token].item())


EVENTS: dict[str, Callable[[Trial], None]] = {
    "none": none,
    "interrupt": partial(_strike, KeyboardInterrupt, False),  # Ctrl-C at a random moment
    "burst": partial(_strike, KeyboardInterrupt, True),  # two to six times within milliseconds
    "alarm": partial(_strike, TimeoutError, False),  # by a handler of SIGALRM
    "read": read_fails,
    "write": write_fails,
    "reads": reads,
    "loading": loading,
    "sampler": partial(_callback, "sampler", partial(mx.argmax, axis=-1)),
    "processor": partial(_callback, "logits_processors", lambda tokens, logits: logits),
    "progress": partial(_callback, "prompt_progress_callback", lambda done, total: None),
    "nested": sampler_calls,
    "stop": stop,
    "copy": copies,
    "budget": budget,
    "close": closes,
    "thread": thread,
    "threads": threads,
    "turns": turns,
    "batch": partial(_batch, ("none", "read")),
    "traced": traced,
    "batch traced": partial(_batch, ("traced",)),
    "batch struck": partial(_batch, ("interrupt", "burst")),
}

CALLBACKS = {"sampler", "processor", "progress", "nested"}
"""Events of functions that only ``generate_step`` calls."""

SIGNALS = {"loading", "interrupt", "burst", "alarm", "batch struck"}
"""Events of signals at random moments."""


def events_of(row: Any) -> list[str]:
    """Return the events that a row can have."""
    left_out = {"batch", "batch struck", "batch traced"} if row.place not in ("memory", "disk") else set[str]()
    if row.place == "prefixes":
        left_out |= {"threads", "turns", "reads"}
    if row.budget in ("small", "memory"):  # where more is in memory than the plan says
        left_out.add("reads")
    if row.architecture == "own head":  # whose plan is not the planner's
        left_out |= {"loading", "budget"}
    if row.budget == "memory":  # mlx-lm's own calls, which a signal cuts in two
        left_out |= (SIGNALS | {"traced", "batch traced"}) - {"loading"}
    return [event for event in EVENTS if event not in left_out]


def try_row(row: Row, events: Sequence[str], zoo: Zoo, stock: Stock, seed: str) -> Counter[str]:
    """Run trials of a row with one model, which ends with nothing left behind. Return what came of them, by kind.

    The note of an error says how to repeat it.
    """
    with pytest.MonkeyPatch.context() as patch:
        on_a_machine(patch, 1.0, 0.16)  # on which guesses pay
        return _try_row(row, events, zoo, stock, seed, patch)


def _try_row(
    row: Row, events: Sequence[str], zoo: Zoo, stock: Stock, seed: str, patch: pytest.MonkeyPatch
) -> Counter[str]:
    subject, counts = Subject(row, zoo), Counter[str]()
    patch.setattr(batches, "Lookup", lambda prompt: Oracle(subject.texts.get(tuple(prompt), [])))
    try:
        for number, event in enumerate(["none", *events]):
            trial = Trial(subject, stock, event, f"{seed} {row} {number}")
            try:
                counts += trial.carry_out()
            except Exception as error:
                error.add_note(f"in {trial}, with the seed {seed!r}")
                raise
            del trial
    except BaseException:
        subject.close()
        raise
    if left := subject.close():
        raise Wrong(f"left behind by {row}: {left}")
    return counts
