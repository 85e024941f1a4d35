"""Team: the thread pool that runs a forward pass, in compiled code without the GIL.

The caller is thread 0. Workers wait for the next pass in compiled code: they spin for a few milliseconds,
because the next decode pass comes sooner than a sleeping thread could wake, then sleep on a semaphore. Within
a pass the threads meet at barriers and take tasks from shared counters, so that a thread on a slow or busy
core takes fewer tasks.

One compiled call starts and runs a whole pass, so that a Python signal (Ctrl-C) is handled before or after
it, never during it.

A target and its draft model share one team: with two, the waiting workers of one would spin on the cores that
the other's pass needs.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from numba import types

from paceline.backends.cpu.primitives.atomics import atomic_add, atomic_load, atomic_store, relax
from paceline.backends.cpu.primitives.compiled import compiled
from paceline.errors import BackendError

_yield_core = types.ExternalFunction("sched_yield", types.int32())
_sleep_on = types.ExternalFunction("sem_wait", types.int32(types.int64))
_wake = types.ExternalFunction("sem_post", types.int32(types.int64))

# The control block: offsets in bytes. Fields that different threads write are on different cache lines.
LINE = 64
GENERATION, STOP, ARRIVED, RELEASED = 0, 1 * LINE, 2 * LINE, 3 * LINE
JOB = GENERATION + 8  # address of the pass's job
WORKERS = 4 * LINE  # for each thread: a line with its sleeping flag, a line with its semaphore
_SLEEPS, _SEMAPHORE, _WORKER = 0, LINE, 2 * LINE

_SPINS_BEFORE_YIELD = 2000
_SPINS_BEFORE_SLEEP = 60000


@compiled
def barrier(control, threads):  # type: ignore[no-untyped-def]
    """Wait until all threads of the pass have arrived."""
    if threads > 1:
        phase = atomic_load(control + RELEASED)
        if atomic_add(control + ARRIVED, 1) == threads - 1:
            atomic_store(control + ARRIVED, 0)
            atomic_store(control + RELEASED, phase + 1)
        else:
            spins = 0
            while atomic_load(control + RELEASED) == phase:
                relax(0)
                spins += 1
                if spins > _SPINS_BEFORE_YIELD:
                    _yield_core()


@compiled
def start_pass(control, threads, job):  # type: ignore[no-untyped-def]
    """Let the workers start the pass of `job`."""
    atomic_store(control + JOB, job)
    atomic_add(control + GENERATION, 1)
    for index in range(1, threads):
        worker = control + WORKERS + _WORKER * index
        if atomic_load(worker + _SLEEPS) != 0:
            _wake(worker + _SEMAPHORE)


@compiled
def await_pass(control, index, seen):  # type: ignore[no-untyped-def]
    """Wait for the next pass after number `seen`; returns its number."""
    worker = control + WORKERS + _WORKER * index
    spins = 0
    while atomic_load(control + GENERATION) == seen:
        relax(0)
        spins += 1
        if spins > _SPINS_BEFORE_SLEEP:
            # The thread that starts a pass first raises the generation, then wakes sleepers. So either this
            # thread sees the new generation here, or it is seen and woken. A wake too many is harmless.
            atomic_store(worker + _SLEEPS, 1)
            if atomic_load(control + GENERATION) == seen:
                _sleep_on(worker + _SEMAPHORE)
            atomic_store(worker + _SLEEPS, 0)
            spins = 0
    return atomic_load(control + GENERATION)


class Team:
    """`threads - 1` workers that run `work(control, index, threads, 0)` until `close()`."""

    def __init__(self, threads: int, work: Callable[[int, int, int, int], None]) -> None:
        self.threads = threads
        block = np.zeros(WORKERS + _WORKER * threads + LINE, dtype=np.uint8)
        self.control = int(block.ctypes.data) + -int(block.ctypes.data) % LINE  # address
        for index in range(1, threads):
            semaphore = ctypes.c_void_p(self.control + WORKERS + _WORKER * index + _SEMAPHORE)
            if ctypes.CDLL(None, use_errno=True).sem_init(semaphore, 0, 0) != 0:
                reason = os.strerror(ctypes.get_errno())
                raise BackendError(f"This system has no semaphores for threads ({reason}); use threads=1.")
        workers = [
            threading.Thread(
                target=work,
                args=(self.control, index, threads, 0),
                name=f"paceline-cpu-{index}",
                daemon=True,
            )
            for index in range(1, threads)
        ]
        for worker in workers:
            worker.start()
        # Also on garbage collection and at exit: workers must not outlive the memory that they wait on.
        self.close = weakref.finalize(self, _end_workers, self.control, block, workers)

    @property
    def waiting(self) -> int:
        """The number of threads that are waiting at a barrier."""
        return int(ctypes.c_int64.from_address(self.control + ARRIVED).value)


def _end_workers(control: int, block: npt.NDArray[np.uint8], workers: Sequence[threading.Thread]) -> None:
    """Stop and join the workers. `block` is the memory of the control block."""
    ctypes.c_int64.from_address(control + STOP).value = 1
    _start_pass_from_python(control, len(workers) + 1)
    for worker in workers:
        worker.join()


@compiled(cached=True)
def _start_pass_from_python(control, threads):  # type: ignore[no-untyped-def]
    start_pass(control, threads, 0)
