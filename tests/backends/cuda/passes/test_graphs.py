"""Captured graphs."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from paceline.backends.cuda.passes.compiling import compile_only
from paceline.backends.cuda.passes.graphs import TIMED, Graphs, device_seconds


@pytest.mark.skipif(not torch.cuda.is_available(), reason="nothing is captured without a GPU")
def test_graphs_that_are_garbage_are_not_freed_during_a_capture(device: torch.device) -> None:
    """As when a head is replaced while requests run: the old one's graphs are in reference cycles."""
    total = torch.zeros(1, device=device)
    replaced = [Graphs(device)]

    def add() -> None:
        total.add_(1)

    def add_and_make_garbage() -> None:
        add()
        capturing = torch.cuda.is_current_stream_capturing()
        for _ in range(100):
            cycle: list[Any] = [replaced.pop()] if replaced and capturing else []
            cycle.append(cycle)

    replaced[0].run("add", add)
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        graphs = Graphs(device)
        for _ in range(3):
            graphs.run("add", add_and_make_garbage)
    finally:
        gc.set_threshold(*thresholds)
    assert not replaced
    assert total.item() == 4


def test_only_work_on_a_gpu_is_timed_and_not_while_kernels_are_compiled(device: torch.device) -> None:
    runs: list[int] = []
    seconds = device_seconds(device, lambda: runs.append(0))
    assert (seconds is None) == (device.type != "cuda")
    assert len(runs) == (0 if seconds is None else TIMED)
    with compile_only(device):
        assert device_seconds(device, lambda: runs.append(1)) is None
    assert 1 not in runs
