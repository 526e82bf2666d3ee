"""A stand-in for CUDA's driver, whose copies into ordinary memory happen as late as they may."""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from typing import Any

_Copy = tuple[int, int, int]
"""Target, source and length."""


class FakeDriver:
    """Functions of the driver's names. A stream's copies happen when it is synchronized; some may be lost."""

    def __init__(self, lose_every: int = 0, failing: str = "") -> None:
        self.lose_every, self.failing = lose_every, failing
        self.num_copies = self.num_streams = self.num_contexts = 0
        self.registered: set[int] = set()
        self.in_flight: dict[int, list[_Copy]] = defaultdict(list)  # by stream
        self._lock = threading.Lock()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu") and name == self.failing:
            return lambda *_: 700
        return super().__getattribute__(name)

    def cuPointerGetAttribute(self, found: Any, attribute: int, address: ctypes.c_uint64) -> int:  # noqa: N802
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, ordinal: int) -> int:  # noqa: N802
        context._obj.value = 1
        self.num_contexts += 1
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, ordinal: int) -> int:  # noqa: N802
        self.num_contexts -= 1
        return 0

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:  # noqa: N802
        return 0

    def cuStreamCreate(self, stream: Any, flags: int) -> int:  # noqa: N802
        with self._lock:
            self.num_streams += 1
            stream._obj.value = threading.get_ident()
        return 0

    def cuStreamDestroy_v2(self, stream: ctypes.c_void_p) -> int:  # noqa: N802
        self.num_streams -= 1
        return 0

    def cuMemHostRegister_v2(self, address: ctypes.c_void_p, nbytes: ctypes.c_size_t, flags: int) -> int:  # noqa: N802
        self.registered.add(address.value or 0)
        return 0

    def cuMemHostUnregister(self, address: ctypes.c_void_p) -> int:  # noqa: N802
        self.registered.remove(address.value or 0)
        return 0

    def cuMemcpyHtoDAsync_v2(  # noqa: N802
        self, target: int, source: int, nbytes: int, stream: ctypes.c_void_p
    ) -> int:
        self.in_flight[stream.value or 0].append((target, source, nbytes))
        return 0

    def cuStreamSynchronize(self, stream: ctypes.c_void_p) -> int:  # noqa: N802
        for target, source, nbytes in self.in_flight.pop(stream.value or 0, []):
            with self._lock:
                self.num_copies += 1
                is_lost = self.lose_every and self.num_copies % self.lose_every == 0
            if not is_lost:
                ctypes.memmove(target, source, nbytes)
        return 0
