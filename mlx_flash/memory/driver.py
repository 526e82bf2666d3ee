"""Copies to a GPU's memory that CUDA's driver makes, instead of the processor.

CUDA's managed memory lies where it was used last. When the processor writes to it, its pages move to the host, and back
when the GPU computes. The driver's copies leave them with the GPU.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from functools import cache
from typing import Any

import mlx.core as mx

from mlx_flash.compat.arrays import address_of, memory_of
from mlx_flash.errors import FlashError

_LIBRARY = "libcuda.so.1"
_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_ZERO_BYTES = 4 << 20


class DriverError(FlashError):
    """A call of CUDA's driver failed."""


class _Lane:
    """A stream and page-locked memory of the host, with which one thread copies."""

    def __init__(self, driver: Any, context: ctypes.c_void_p, nbytes: int) -> None:
        _check(driver.cuCtxSetCurrent(context))
        self.host = mmap.mmap(-1, nbytes)
        self.stream = ctypes.c_void_p()
        self._driver, self._address = driver, address_of(memoryview(self.host))
        _check(driver.cuStreamCreate(ctypes.byref(self.stream), _NON_BLOCKING))
        _check(driver.cuMemHostRegister_v2(ctypes.c_void_p(self._address), ctypes.c_size_t(nbytes), 0))

    def close(self) -> None:
        self._driver.cuMemHostUnregister(ctypes.c_void_p(self._address))
        self._driver.cuStreamDestroy_v2(self.stream)


class DriverCopies:
    """Copies of any threads, each with a stream and a bounce buffer of its own.

    Args:
        nbytes: size of a bounce buffer.

    Raises:
        DriverError: MLX's memory is not that of a CUDA device.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._driver = load_driver()
        array = mx.zeros(1)
        mx.eval(array)
        ordinal = ctypes.c_int()
        at = ctypes.c_uint64(address_of(memory_of(array)))
        _check(self._driver.cuPointerGetAttribute(ctypes.byref(ordinal), _DEVICE_ORDINAL, at))
        self._ordinal = ordinal.value
        self._context = ctypes.c_void_p()
        _check(self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), self._ordinal))
        self._local = threading.local()
        self._lock = threading.Lock()
        self._lanes: list[_Lane] = []

    @property
    def bounce_buffer(self) -> memoryview:
        """This thread's bounce buffer."""
        return memoryview(self._lane.host)

    @property
    def _lane(self) -> _Lane:
        lane: _Lane | None = getattr(self._local, "lane", None)
        if lane is None:
            lane = self._local.lane = _Lane(self._driver, self._context, self._nbytes)
            with self._lock:
                self._lanes.append(lane)
        return lane

    def start(self, source: memoryview, target: memoryview) -> None:
        """Start to copy a part of the bounce buffer to MLX's memory.

        Raises:
            DriverError: the driver refused.
        """
        to, at = ctypes.c_uint64(address_of(target)), ctypes.c_void_p(address_of(source))
        _check(self._driver.cuMemcpyHtoDAsync_v2(to, at, ctypes.c_size_t(len(source)), self._lane.stream))

    def finish(self) -> None:
        """Wait until this thread's copies have arrived.

        Raises:
            DriverError: one of them failed.
        """
        _check(self._driver.cuStreamSynchronize(self._lane.stream))

    def close(self) -> None:
        """Give the bounce buffers back. No thread may copy any more; another call does nothing."""
        lanes, self._lanes = self._lanes, []
        if self._context:
            self._driver.cuCtxSetCurrent(self._context)
            for lane in lanes:
                lane.close()
            self._driver.cuDevicePrimaryCtxRelease_v2(self._ordinal)
            self._context = ctypes.c_void_p()


def has_own_memory() -> bool:
    """Return whether MLX computes on a GPU that has memory of its own, apart from the processor's."""
    return mx.default_device() == mx.gpu and mx.cuda.is_available()


def write_zeros(memory: memoryview) -> None:
    """Fill MLX's memory with zeros, as reads fill it that the driver copies. Raises: DriverError."""
    copies = DriverCopies(min(len(memory), _ZERO_BYTES))
    try:
        zeros = copies.bounce_buffer
        for start in range(0, len(memory), len(zeros)):
            part = memory[start : start + len(zeros)]
            copies.start(zeros[: len(part)], part)
        copies.finish()
    finally:
        copies.close()


def clear(memory: memoryview) -> None:
    """Fill managed memory with zeros. Pages that have no place yet get one on the GPU. Raises: DriverError."""
    driver, context = load_driver(), ctypes.c_void_p()
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    try:
        _check(driver.cuCtxSetCurrent(context))
        _check(
            driver.cuMemsetD8_v2(ctypes.c_uint64(address_of(memory)), ctypes.c_ubyte(0), ctypes.c_size_t(len(memory)))
        )
        _check(driver.cuCtxSynchronize())
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(0)


@cache
def load_driver() -> Any:
    """Return CUDA's driver, whose functions return 0 for success. Raises: DriverError."""
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise DriverError(str(error)) from error


def _check(code: int) -> None:
    if code:
        raise DriverError(f"CUDA error {code}")
