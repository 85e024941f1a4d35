"""A team of threads that runs one forward pass together, without the GIL and without the kernel's scheduler.

The caller is thread 0. Workers wait in compiled code for the next pass, spinning for a few
milliseconds, because the next pass of a decode comes sooner than a sleeping thread could wake;
then they park in Python and cost nothing. Inside a pass the threads meet at barriers and take
tasks from shared counters, so a core that is slowed by a neighbour simply takes fewer tasks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from paceline.backends.cpu.compiled import compiled
from paceline.backends.cpu.simd import atomic_add, atomic_load, atomic_store, relax

_yield_core = types.ExternalFunction("sched_yield", types.int32())

# The control block, int64 words, each on its own cache line.
LINE = 8
GENERATION, STOP, ARRIVED, RELEASED, PARKED = 0, 1 * LINE, 2 * LINE, 3 * LINE, 4 * LINE

_SPINS_BEFORE_YIELD = 2000
_SPINS_BEFORE_PARK = 60000


@compiled(inline=True)
def barrier(control, threads):  # type: ignore[no-untyped-def]
    """Wait until all threads of the pass are here."""
    if threads > 1:
        phase = atomic_load(control + 8 * RELEASED)
        if atomic_add(control + 8 * ARRIVED, 1) == threads - 1:
            atomic_store(control + 8 * ARRIVED, 0)
            atomic_store(control + 8 * RELEASED, phase + 1)
        else:
            spins = 0
            while atomic_load(control + 8 * RELEASED) == phase:
                relax(0)
                spins += 1
                if spins > _SPINS_BEFORE_YIELD:
                    _yield_core()


@compiled(inline=True)
def await_generation(control, index, seen):  # type: ignore[no-untyped-def]
    """The number of the next pass; 0 if none came for a while and the worker is now marked as parked."""
    spins = 0
    while atomic_load(control + 8 * GENERATION) == seen:
        relax(0)
        spins += 1
        if spins > _SPINS_BEFORE_PARK:
            atomic_store(control + 8 * (PARKED + LINE * index), 1)
            # Whoever starts a pass raises the generation first and looks for parked workers second.
            if atomic_load(control + 8 * GENERATION) == seen:
                return 0
            atomic_store(control + 8 * (PARKED + LINE * index), 0)
    return atomic_load(control + 8 * GENERATION)


@compiled
def publish(control, threads):  # type: ignore[no-untyped-def]
    """Start the next pass; a bit mask of the workers that were parked and must be woken."""
    atomic_add(control + 8 * GENERATION, 1)
    parked = 0
    for index in range(1, threads):
        place = control + 8 * (PARKED + LINE * index)
        if atomic_load(place) != 0:
            atomic_store(place, 0)
            parked |= 1 << index
    return parked


class Team:
    """`threads` threads that run `job(control, index, threads, argument)` together."""

    def __init__(self, threads: int, work: Callable[[int, int, int, int, int], int], argument: int) -> None:
        self.threads = threads
        self._work = (
            work  # work(control, index, threads, argument, seen) -> last generation it ran, when parked
        )
        self._argument = argument
        self._control = np.zeros(PARKED + LINE * (threads + 1), dtype=np.int64)
        self._address = self._control.ctypes.data
        self._wake = [threading.Event() for _ in range(threads)]
        self._workers = [
            threading.Thread(target=self._serve, args=(index,), name=f"paceline-cpu-{index}", daemon=True)
            for index in range(1, threads)
        ]
        for worker in self._workers:
            worker.start()

    @property
    def control(self) -> int:
        """Address of the control block that the compiled code waits on."""
        return self._address

    def _serve(self, index: int) -> None:
        seen = 0
        while True:
            seen = self._work(self._address, index, self.threads, self._argument, seen)
            if self._control[STOP]:
                return
            self._wake[index].wait()
            self._wake[index].clear()

    def start(self) -> None:
        """Let the workers begin a pass; the caller then runs its own share as thread 0."""
        parked = publish(self._address, self.threads)
        if parked:
            for index in range(1, self.threads):
                if parked >> index & 1:
                    self._wake[index].set()

    def close(self) -> None:
        """End the workers."""
        self._control[STOP] = 1
        self.start()
        for worker in self._workers:
            worker.join()


def default_threads() -> int:
    """The cores this process may use."""
    import os

    available: Any = getattr(os, "sched_getaffinity", None)
    return len(available(0)) if available else (os.cpu_count() or 1)
