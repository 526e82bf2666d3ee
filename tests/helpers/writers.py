"""Every part of the program that writes files, as one small write that can be repeated, looked at and checked."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache

from fused import SMALL, sanitize, save_fused
from mlx_flash import DiskKVCache
from mlx_flash.convert import derived
from mlx_flash.convert.derived import adopt_derived, list_copies
from mlx_flash.convert.pack import NOTE_NAME, pack
from mlx_flash.files import HeldLock, read_json_object
from mlx_flash.kv.disk import WriteGovernor
from mlx_flash.layout.load import LoadedModel, load_lazily
from mlx_flash.prefixes.store import Blob, PrefixStore
from mlx_flash.storage import probe
from mlx_flash.storage.probe import DiskProfile
from mlx_flash.storage.safetensors import read_checkpoint
from mlx_flash.telemetry import Publisher, find
from models import PREFILL_AND_DECODE, run, same_bits, stock

TINY = {**SMALL, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 64}


def make_source(folder: Path) -> Path:
    """Write the model that the writers read."""
    return save_fused(folder, TINY)


def tensors_of(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all tensors of a checkpoint."""
    records = read_checkpoint(folder).tensors.values()
    return {r.name: r.path.read_bytes()[r.offset : r.end] for r in records}


class Writer(ABC):
    """A part of the program that writes files to a folder."""

    raises = False
    """A failure ends with an error; otherwise it costs a log line."""

    def __init__(self, folder: Path, source: Path) -> None:
        self.folder, self.source = folder, source

    @abstractmethod
    def write(self) -> None:
        """Write everything once."""

    def look(self) -> bool:
        """Return whether what another process finds at this moment is right, or nothing yet."""
        return True

    @abstractmethod
    def check(self) -> bool:
        """Return whether everything that was written is there, and right."""

    def let_go(self) -> None:
        """Forget what :meth:`write` left in this object."""
        self.__dict__ = {"folder": self.folder, "source": self.source}
        gc.collect()


class Pack(Writer):
    raises = True

    @property
    def _packed(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("packed-*") if not path.suffix)

    def write(self) -> None:
        pack(self.source, self.folder / f"packed-{len(self._packed)}")

    def look(self) -> bool:
        return all(tensors_of(path) == tensors_of(self.source) for path in self._packed[-1:])

    def check(self) -> bool:
        return bool(self._packed) and self.look()


class DerivedCopy(Writer):
    raises = True

    def write(self) -> None:
        if any(copy.is_complete for copy in list_copies()):
            os.utime(self.source / "model.safetensors")  # so that the next copy is another one
        checkpoint = read_checkpoint(self.source)

        def load() -> LoadedModel:
            return load_lazily(self.source, checkpoint)

        self.loaded = load()
        adopt_derived(self.loaded, load, checkpoint, self.source)

    def look(self) -> bool:
        return all(map(self._is_whole, [copy.folder for copy in list_copies() if copy.is_complete]))

    def _is_whole(self, folder: Path) -> bool:
        try:
            lock = HeldLock(folder, shared=True, required=False)
        except FileNotFoundError:
            return True  # another one has replaced it
        with lock:
            files = read_json_object(folder / NOTE_NAME, 1 << 20).get("files", {})
            return all(
                (folder / name).stat().st_size == size and tensors_of(folder) for name, (size, _) in files.items()
            )

    def check(self) -> bool:
        copies = [copy for copy in list_copies() if copy.is_complete]
        outputs = run(self.loaded.model, PREFILL_AND_DECODE[3:4])
        return len(copies) == 1 and same_bits(outputs, run(stock(self.source), PREFILL_AND_DECODE[3:4]))


class Prefixes(Writer):
    def write(self) -> None:
        self.first = time.time_ns() % 10**9
        with closing(self._store()) as store:
            for number in range(2):
                store.put(self._tokens(self.first), number, {"k": self._blob(self.first)}, (16, 32))

    def look(self) -> bool:
        """Read every page: each holds what belongs to its name."""
        with closing(self._store()) as store:
            for path in store.folder.glob("*.page"):
                page = store.read(path.stem)
                if page is not None and len(set(bytes(page["k"].data))) != 1:
                    return False
            return not store.telemetry()["damaged"]

    def check(self) -> bool:
        with closing(self._store()) as store:
            found = store.find(self._tokens(self.first), (16, 32))
            page = store.read(found.pages[1]) if len(found.pages) == 2 else None
            return page is not None and page["k"].data == self._blob(self.first).data

    def _store(self) -> PrefixStore:
        governor, limits = WriteGovernor(), {"limit_bytes": 1 << 30, "queue_bytes": 1 << 20}
        store = PrefixStore(self.folder, model="m", settings="s", governor=governor, **limits)
        store._free_floor = 0
        return store

    def _tokens(self, first: int) -> range:
        return range(first, first + 32)

    def _blob(self, first: int) -> Blob:
        return Blob(bytes([first % 256]) * 5000, "uint8", (5000,))


class KVFiles(Writer):
    raises = True

    def write(self) -> None:
        rows = [mx.random.normal((1, 2, 300, 32), key=mx.random.key(i)) for i in range(2)]
        cache, expected = DiskKVCache(directory=self.folder), KVCache()
        for _ in range(2):
            cache.update_and_fetch(*rows)
            expected.update_and_fetch(*rows)
        self.is_right = same_bits(
            [cache.keys, cache.values], [expected.keys[..., :600, :], expected.values[..., :600, :]]
        )
        cache.pool.close()

    def check(self) -> bool:
        return self.is_right


class Probe(Writer):
    def write(self) -> None:
        probe.PROFILES.save("disk", asdict(DiskProfile(1e9, 4096, 2, True)))

    def look(self) -> bool:
        return not probe.PROFILES.file.exists() or self.check()

    def check(self) -> bool:
        return probe.PROFILES.load()["disk"]["read_size"] == 4096


class SelfTestFile(Writer):
    """The file that the self-test reads, as a file in the system's folder if the cache folder fails."""

    raises = True

    def write(self) -> None:
        tempfile.tempdir = str(self.folder)
        with probe._file_of_words() as file:
            self.is_right = file.read_bytes() == b"".join(
                probe._words(start, probe._CHUNK_BYTES).tobytes()
                for start in range(0, probe.NUM_FILE_BYTES, probe._CHUNK_BYTES)
            )

    def check(self) -> bool:
        return self.is_right


class ProbeSample(Writer):
    raises = True

    def write(self) -> None:
        with probe.sample_in(self.folder / "samples") as file:
            self.nbytes = file.stat().st_size

    def check(self) -> bool:
        return self.nbytes == 2 * probe.SAMPLE_BYTES


class Telemetry(Writer):
    def write(self) -> None:
        publisher = Publisher(lambda: {"tokens": 3}, interval_seconds=0.001)
        publisher.start()
        while publisher.path is not None and not publisher.path.exists() and publisher._thread.is_alive():
            time.sleep(0.001)
        self.seen = [published.state for published in find() if published.pid == os.getpid()]
        publisher.close()
        if publisher._thread.ident:
            publisher._thread.join()

    def look(self) -> bool:
        found = [published for published in find() if published.path.is_relative_to(self.folder)]
        return all(published.state == {"tokens": 3} for published in found)

    def check(self) -> bool:
        return {"tokens": 3} in self.seen


WRITERS = (Pack, DerivedCopy, Prefixes, KVFiles, Probe, ProbeSample, SelfTestFile, Telemetry)


@contextmanager
def tiny_models() -> Iterator[None]:
    """While it lasts, mlx-lm computes parameters of :func:`make_source`'s model, and all files are small."""
    with (
        patch.object(llama.Model, "sanitize", sanitize),
        patch.object(derived, "LEAST_BYTES", 1),
        patch.object(probe, "SAMPLE_BYTES", 1 << 20),
        patch.object(probe, "NUM_FILE_BYTES", 2 << 20),
        patch.object(tempfile, "tempdir", tempfile.tempdir),
    ):
        yield
