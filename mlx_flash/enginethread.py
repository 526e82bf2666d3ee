"""One thread of the process computes every pass of streamed models, starts them and changes their budget.

Python runs signal handlers in the main thread alone. So no Ctrl-C, and nothing that a handler raises, falls into what
is computed here. A caller hands its work in and waits. Interrupted, it asks for the end: the work ends where it calls
:func:`check`, puts back what it has changed, and only then does the caller go on. Callers of several threads queue.

The work is handed in within the ``try`` that asks for its end, and the wait for that is one call of C, in which no
signal handler runs. So further interrupts come once everything is put back, unless that takes too long.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from mlx_flash.compat.arrays import LoadingStreams
from mlx_flash.forks import THREAD_PREFIX, reported, wait_for_end_of_thread

T = TypeVar("T")

Tell = Callable[[], object]

Progress = Callable[[int, int], None]
"""Called with what is done and what there is to do: bytes of weights, or tokens of a prompt."""


class CallEndedError(Exception):
    """The caller does not wait for the result any more. Nobody but the work itself sees it."""


UNDONE_SECONDS = 5.0
"""The longest time that a second interrupt waits until everything is put back."""

_python = ctypes.CDLL(None)  # which releases Python's lock during a call
_python.PyThread_allocate_lock.restype = ctypes.c_void_p
_python.PyThread_acquire_lock_timed.argtypes = [ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int]
_python.PyThread_release_lock.argtypes = [ctypes.c_void_p]

_gates: list[int] = []
"""Locks of Python's C level that no call uses now. A call that was interrupted keeps its own."""


def _closed_gate() -> int:
    """Return a lock that is held."""
    try:
        gate = _gates.pop()
    except IndexError:
        gate = _python.PyThread_allocate_lock()
    _python.PyThread_acquire_lock_timed(gate, 0, 0)
    return gate


class _Call(Generic[T]):
    """Work that was handed in. Once it is in the queue it belongs to the engine thread."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.is_to_end = False  # the caller asks for that
        self.num_whole = 0  # blocks of :func:`whole` that it is in
        self.has_ended = False  # nothing of it runs any more
        self._work: Callable[[], T] | None = work
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._gate: int | None = None  # closed until the end, if somebody waits
        self.news: SimpleQueue[Tell | None] = SimpleQueue()

    def run(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        try:
            self._found.append(work())
        except BaseException as error:  # noqa: BLE001 the caller gets it
            self._error = error
        finally:
            del work
            if self._gate is not None:
                _python.PyThread_release_lock(self._gate)
            self.has_ended = True
            self.news.put(None)

    def hand_in(self, put: Callable[[_Call[Any]], object]) -> None:
        """Put it into the queue, run what the work tells, and wait for the end."""
        self._gate = gate = _closed_gate()
        settle = partial(_python.PyThread_acquire_lock_timed, gate, int(UNDONE_SECONDS * 1e6), 0)
        try:
            put(self)  # no signal handler runs before
            while not (self.has_ended and self.news.empty()):
                if (tell := self.news.get()) is not None:
                    tell()
        except BaseException:
            self.is_to_end = True
            settle()  # and none before the end of this
            while not self.has_ended:  # a second interrupt may leave here: then it ends without its caller
                self.news.get()
            raise
        _gates.append(gate)

    def result(self) -> T:
        if self._error is not None:
            if isinstance(self._error, CallEndedError):  # Python ends, and with it this thread, which is a daemon
                self.news.get()
            try:
                raise self._error
            finally:
                self._error = None  # its traceback refers to this
        return self._found.pop()


class _Here(threading.local):
    """The work that the present thread does: that of the engine thread; None in all others.

    Layers ask it for ``is_to_end`` themselves: a call of :func:`check` for each is felt in a token.
    """

    call: _Call[Any] | None = None


here = _Here()


class _EngineThread(threading.Thread):
    """The thread. It stays until the process ends: models come and go, and MLX never frees what a thread had."""

    def __init__(self) -> None:
        super().__init__(name=f"{THREAD_PREFIX}-engine", daemon=True)
        self.calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self.call: _Call[Any] | None = None  # under way
        self.has_ended = False  # of ``is_alive`` Python 3.11 makes False for good, if an interrupt ends it

    def run(self) -> None:
        try:
            with LoadingStreams().in_force():  # what is left to be computed may be computed by any thread
                while (call := self.calls.get()) is not None:
                    here.call = self.call = call
                    call.run()
                    here.call = self.call = None
                    del call  # its result belongs to its caller
        finally:
            self.has_ended = True

    def end(self) -> None:
        """End it, and a pass that nobody waits for any more, before Python ends."""
        if (call := self.call) is not None:
            call.is_to_end = True
        try:
            self.calls.put(None)
            self.join()
        finally:
            self.has_ended = True  # after an interrupt, too: a caller would wait behind the end for ever
        wait_for_end_of_thread(self.native_id)


_starting = threading.Lock()
_threads: list[_EngineThread] = []
"""The thread of this process, once there is one."""


def _forget() -> None:
    """Leave the thread to the parent: a forked child has none, and may have to make its own."""
    global _starting
    _starting = threading.Lock()
    _threads.clear()
    here.call = None


os.register_at_fork(after_in_child=_forget)


def _thread() -> _EngineThread:
    if not _threads:
        with _starting:
            if not _threads:
                thread = _EngineThread()
                try:
                    thread.start()
                    atexit.register(_end, os.getpid(), thread)
                    _threads.append(thread)
                except BaseException:  # it may have started before an interrupt came
                    if not _threads:
                        thread.calls.put(None)
                    raise
    return _threads[0]


def _end(pid: int, thread: _EngineThread) -> None:
    if os.getpid() == pid:
        thread.end()


def run(work: Callable[[], T]) -> T:
    """Return what some work returns that is done in the engine thread. Work of that thread itself is done at once.

    When the thread has ended with Python, the caller does it.

    What the work uses must be computed: MLX's streams belong to threads.

    Raises:
        BaseException: what the work raises; or what a signal handler, or a function that was told, raised here. Then
            the work has ended. After a second interrupt and :data:`UNDONE_SECONDS` it ends without its caller.
    """
    if here.call is not None:
        return work()
    call, thread = _Call(work), _thread()
    if not thread.has_ended:
        call.hand_in(thread.calls.put)
    else:  # Python ends: what a program does then is done here
        _do(call)
    return call.result()


def leave(work: Callable[[], object]) -> None:
    """Hand in work that nobody waits for."""
    call = _Call(partial(reported, work))
    try:
        thread = _thread()
    except RuntimeError:  # from 3.12 on Python starts no thread when it ends
        call.run()
        return
    if not thread.has_ended:
        thread.calls.put(call)
    else:
        _do(call)


def _do(call: _Call[Any]) -> None:
    here.call = call
    call.run()
    here.call = None


def check() -> bool:
    """Return whether this is the engine thread, at work. End the work if its caller asks for that.

    In :func:`whole`, nothing ends.
    """
    call = here.call
    if call is None:
        return False
    if call.is_to_end and not call.num_whole:
        raise CallEndedError
    return True


@contextmanager
def whole() -> Iterator[None]:
    """Go on to the end of a block: what it changes cannot be put back."""
    if (call := here.call) is None:
        yield
        return
    call.num_whole += 1
    try:
        yield
    finally:
        call.num_whole -= 1


def tell(news: Tell) -> None:
    """Have the caller's thread call a function of the program. The work goes on meanwhile. Elsewhere it is called now.

    What the function raises ends the work. It may use the model: such work is done after this one.
    """
    if here.call is None:
        news()
    else:
        here.call.news.put(news)
