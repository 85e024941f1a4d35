"""Compiles the kernels of a warm-up in parallel, on all CPU cores.

Triton compiles a kernel at its first launch, one kernel after the other: with an empty cache, a server would
start a minute later. So the warm-up passes first run in a mode in which launches only submit their kernels to
compiler threads, which mostly release the GIL. Nothing runs on the device then, and outputs are meaningless.
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

_mode = threading.local()  # .threads: the thread pool, while launches of this thread only compile
_patching = threading.RLock()
_compiled: dict[Hashable, Future[Any]] = {}  # CUDA C++ kernels; Triton keeps its own


def compiles_only() -> bool:
    """Whether launches of this thread only compile: do not capture, time, or use results then."""
    return _pool() is not None


def _pool() -> ThreadPoolExecutor | None:
    return getattr(_mode, "threads", None)


@contextmanager
def compile_only(device: torch.device) -> Iterator[None]:
    """Within the context, compile the kernels that this thread launches, without running them.

    Waits for all of them at the end. Other threads, such as another engine's, launch as always. A kernel that
    does not compile raises its error at its next launch.
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
    """The result of `make`, computed once per key; None while launches only compile: a thread computes it."""
    if (threads := _pool()) is not None:
        if key not in _compiled:
            _compiled[key] = threads.submit(make)
        return None
    made = _compiled.get(key)
    if made is None or made.exception() is not None:
        made = Future()
        made.set_result(make())
        _compiled[key] = made  # only with its result: an unfinished Future would be waited for
    result: T = made.result()
    return result


def cached_kernel(find: Callable[P, T]) -> Callable[P, T]:
    """Caches the results of `find`, except while launches only compile: those are not real kernels."""
    cached = lru_cache(find)

    @wraps(find)
    def found(*args: P.args, **options: P.kwargs) -> T:
        return find(*args, **options) if compiles_only() else cached(*args, **options)  # type: ignore[arg-type]

    return found
