"""Compile the kernels of a warm-up on all CPU cores, before its passes run.

A kernel is compiled when it is first launched, one after the other: with an empty cache, a minute and more
until a server is ready. So the passes of a warm-up run once to compile only: launches submit their kernels to
threads, which mostly release the GIL, and launch nothing. Buffers hold zeros or old values then,
and outputs mean nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
import triton

from paceline.machine import usable_cores

P = ParamSpec("P")
T = TypeVar("T")

_mode = threading.local()  # .threads: the pool while passes of this thread only compile; others run theirs
_patching = threading.RLock()
_compiled: dict[Hashable, Future[Any]] = {}  # CUDA C++ kernels; Triton keeps its own


def compiles_only() -> bool:
    """Whether launches of this thread only compile: nothing may be captured, timed or decided by results."""
    return _pool() is not None


def _pool() -> ThreadPoolExecutor | None:
    return getattr(_mode, "threads", None)


@contextmanager
def compile_only(device: torch.device) -> Iterator[None]:
    """Compile what this thread launches meanwhile instead of running it; wait for it at the end.

    Other threads, such as that of another engine, launch as always. A kernel that does not compile raises its
    error when it is launched again.
    """

    def compile_kernel(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *args, grid=grid, warmup=warmup or compiles_only(), **options)

    def use_device() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)

    with _patching, ThreadPoolExecutor(usable_cores(), initializer=use_device) as threads:
        run = triton.JITFunction.run
        _mode.threads, triton.JITFunction.run = threads, compile_kernel
        try:
            with triton.AsyncCompileMode(threads, ignore_errors=True):
                yield
        finally:
            _mode.threads, triton.JITFunction.run = None, run


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Make a GPU the current one of this thread, with a CUDA context, which the driver's functions need.

    `torch.cuda.device` alone gives a new thread no context if the GPU is the first one, its default.
    """
    with torch.cuda.device(device):
        torch.cuda.set_device(torch.cuda.current_device())
        yield


def compiled(key: Hashable, make: Callable[[], T]) -> T | None:
    """What `make` gives, made once for each key; None while passes only compile: a thread makes it."""
    if (threads := _pool()) is not None:
        if key not in _compiled:
            _compiled[key] = threads.submit(make)
        return None
    made = _compiled.get(key)
    if made is None or made.exception() is not None:
        made = Future()
        made.set_result(make())
        _compiled[key] = made  # only when it is made: a Future that never ends would be waited for
    result: T = made.result()
    return result


def cached_kernel(find: Callable[P, T]) -> Callable[P, T]:
    """`find`, whose results are kept, unless passes only compile: those are not the kernels to run."""
    cached = lru_cache(find)

    @wraps(find)
    def found(*args: P.args, **options: P.kwargs) -> T:
        return find(*args, **options) if compiles_only() else cached(*args, **options)  # type: ignore[arg-type]

    return found
