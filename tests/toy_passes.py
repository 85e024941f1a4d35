"""Toy backends whose passes wait, or fail."""

from __future__ import annotations

import threading

from paceline.core.forward import ForwardBatch, ForwardOutput
from tests.toy import ToyBackend


class OneByOne(ToyBackend):
    """Each pass waits for `turn`."""

    def __init__(self) -> None:
        super().__init__(max_rows=64)
        self.turn = threading.Semaphore(0)
        self.passes = 0

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        self.turn.acquire()
        self.passes += 1
        return super().forward(batch)


class BreakingToy(ToyBackend):
    """Fails in one pass, with a message that no client may see, and then continues normally."""

    def __init__(self, breaking_pass: int) -> None:
        super().__init__(max_rows=64)
        self.passes_left = breaking_pass

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        self.passes_left -= 1
        if self.passes_left == 0:
            raise MemoryError("no room for the pass, at 0xdeadbeef in /home/someone/secret")
        return super().forward(batch)
