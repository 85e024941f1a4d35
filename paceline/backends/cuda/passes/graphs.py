"""CUDA graphs: a pass is captured once and replayed as one launch, and timed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch

from paceline.backends.cuda.passes.compiling import compiles_only

STEP, LARGE_STEP = 128, 256  # rows between bucket sizes, up to MANY rows and beyond
MANY = 512  # rows
TIMED = 5  # runs per measurement


def bucket(count: int) -> int:
    """The bucket (padded size) of a pass with `count` rows: powers of two, then multiples of 128 or 256."""
    if count <= STEP:
        return 1 << (count - 1).bit_length()
    step = STEP if count <= MANY else LARGE_STEP
    return -(-count // step) * step


def buckets(most: int) -> list[int]:
    """The buckets of passes with up to `most` rows; the largest is cut to `most`."""
    return sorted({min(bucket(count), most) for count in range(1, most + 1)})


def device_seconds(device: torch.device, run: Callable[[], object]) -> float | None:
    """Seconds of a run on the device: the fastest of TIMED runs, because others may have waited for the host.

    None without a GPU."""
    if device.type != "cuda" or compiles_only():
        return None
    events = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED + 1)]  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
    torch.cuda.synchronize(device)
    milliseconds = [float(start.elapsed_time(end)) for start, end in pairwise(events)]
    return min(milliseconds) * 1e-3


class Graphs:
    """Captured CUDA graphs by key. Without a GPU, or while launches only compile, work runs directly."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._captured: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def run(self, name: Hashable, work: Callable[[], None]) -> None:
        """Run the work: replay its graph, or run it once and capture it.

        Work with the same name must use the same buffers every time.
        """
        if self._device.type != "cuda" or compiles_only():
            work()
            return
        graph = self._captured.get(name)
        if graph is None:
            torch.cuda.synchronize(self._device)  # like a replay, it must run after all earlier work
            work()  # computes this call's result, and compiles kernels, which is impossible during a capture
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            # other threads may allocate during the capture: one loads the next head while requests run
            with _no_collection(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                work()
            self._captured[name] = graph
            return
        graph.replay()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection: freeing an old graph during a capture invalidates the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
