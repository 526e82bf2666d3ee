"""CUDA's driver: copies to a GPU's memory that it makes instead of the processor, and the memory that it takes itself.

CUDA's managed memory lies where it was used last. When the processor writes to it, its pages move to the host, and back
when the GPU computes. The driver's copies leave them with the GPU.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterable
from functools import cache
from typing import Any

import mlx.core as mx

from mlx_flash.compat.arrays import address_of, memory_of
from mlx_flash.errors import FlashError

_LIBRARY = "libcuda.so.1"
_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING

_MANAGEMENT_LIBRARY = "libnvidia-ml.so.1"
_INSUFFICIENT_SIZE = 7  # NVML_ERROR_INSUFFICIENT_SIZE
_USED_NOW = 7  # CU_MEMPOOL_ATTR_USED_MEM_CURRENT

_CONTEXT_BYTES = 700_000_000
"""CUDA's own memory where the driver does not tell, as in some containers. Seen: 0.55 to 0.73 GB."""


class DriverError(FlashError):
    """A call of CUDA's driver failed."""


class _Channel:
    """A stream and page-locked memory of the host, with which one thread copies."""

    def __init__(self, driver: Any, context: ctypes.c_void_p, nbytes: int) -> None:
        _check(driver.cuCtxSetCurrent(context))
        self.host = memoryview(mmap.mmap(-1, nbytes))
        self.stream = ctypes.c_void_p()
        self._driver, self.address = driver, address_of(self.host)
        _check(driver.cuStreamCreate(ctypes.byref(self.stream), _NON_BLOCKING))
        _check(driver.cuMemHostRegister_v2(ctypes.c_void_p(self.address), ctypes.c_size_t(nbytes), 0))

    def close(self) -> None:
        self._driver.cuMemHostUnregister(ctypes.c_void_p(self.address))
        self._driver.cuStreamDestroy_v2(self.stream)


class DriverCopies:
    """Copies of any threads, each with a stream and a bounce buffer of its own. Methods raise DriverError."""

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
        self._channels: list[_Channel] = []

    @property
    def bounce_buffer(self) -> memoryview:
        return self._channel.host

    @property
    def _channel(self) -> _Channel:
        channel: _Channel | None = getattr(self._local, "channel", None)
        if channel is None:
            channel = self._local.channel = _Channel(self._driver, self._context, self._nbytes)
            with self._lock:
                self._channels.append(channel)
        return channel

    def copy(self, copies: Iterable[tuple[int, memoryview]]) -> None:
        """Copy what starts at offsets of this thread's bounce buffer to MLX's memory, and wait for it."""
        channel, start = self._channel, self._driver.cuMemcpyHtoDAsync_v2
        try:
            for offset, target in copies:
                _check(start(address_of(target), channel.address + offset, len(target), channel.stream))
        finally:  # also after an error: others use the memory of what has started then
            code = self._driver.cuStreamSynchronize(channel.stream)
        _check(code)

    def close(self) -> None:
        """Give the bounce buffers back. No thread may copy any more; another call does nothing."""
        channels, self._channels = self._channels, []
        if self._context:
            self._driver.cuCtxSetCurrent(self._context)
            for channel in channels:
                channel.close()
            self._driver.cuDevicePrimaryCtxRelease_v2(self._ordinal)
            self._context = ctypes.c_void_p()


def has_own_memory() -> bool:
    """Return whether MLX computes on a GPU that has memory of its own, apart from the processor's."""
    return mx.default_device() == mx.gpu and mx.cuda.is_available()


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


def context_bytes() -> int:
    """Return the memory of a GPU of its own that CUDA takes beside MLX's arrays: context, kernels, gaps. Else 0."""
    if not has_own_memory():
        return 0
    used, of_pool = _used_by_this_process(), _used_of_pool()
    return _CONTEXT_BYTES if used is None or of_pool is None else max(0, used - of_pool)


class _Used(ctypes.Structure):
    """``nvmlProcessInfo_t`` of NVIDIA's <nvml.h>."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def _used_by_this_process() -> int | None:
    """Return the bytes of the GPU that NVML names for this process, managed memory aside; None where it names none."""
    found = _management()
    if found is None:
        return None
    library, device = found
    room = 16
    while True:
        number, processes = ctypes.c_uint(room), (_Used * room)()
        code = library.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(number), processes)
        if code != _INSUFFICIENT_SIZE:
            break
        room = 2 * number.value
    own = [int(process.used) for process in processes[: number.value] if process.pid == os.getpid()] if not code else []
    return own[0] if own and own[0] < 1 << 63 else None  # all bits are set where the system does not tell


@cache
def _management() -> tuple[Any, ctypes.c_void_p] | None:
    """Return NVML and its name of MLX's GPU; None where it is not there, or does not know this GPU."""
    try:
        library = ctypes.CDLL(_MANAGEMENT_LIBRARY)
    except OSError:
        return None
    device, uuid = ctypes.c_void_p(), str(mx.device_info().get("uuid", "")).encode()
    is_found = library.nvmlInit_v2() == 0 and library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(device)) == 0
    return (library, device) if is_found else None


def _used_of_pool() -> int | None:
    """Return the bytes of MLX's arrays that NVML names for this process, which are no managed memory.

    None where the GPU has no pool for them, and in a forked child.
    """
    driver, pool, nbytes = load_driver(), ctypes.c_void_p(), ctypes.c_uint64()
    code = driver.cuDeviceGetDefaultMemPool(ctypes.byref(pool), 0)
    code = code or driver.cuMemPoolGetAttribute(pool, _USED_NOW, ctypes.byref(nbytes))
    return None if code else nbytes.value


@cache
def load_driver() -> Any:
    """Return CUDA's driver, whose functions return 0 for success. Raises: DriverError."""
    try:
        driver = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise DriverError(str(error)) from error
    driver.cuMemcpyHtoDAsync_v2.argtypes = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    return driver


def _check(code: int) -> None:
    if code:
        raise DriverError(f"CUDA error {code}")
