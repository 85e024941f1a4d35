"""Power draw and clock of a GPU while it works, and whether the power limit throttles it, by the driver.

Two GPUs of one kind may differ by several percent when they are throttled, because one needs more power
for the same clock. A benchmark that ignores it would blame, or praise, the code.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
SM_CLOCK, POWER_LIMIT_REACHED = (
    1,
    4,
)  # the driver's numbers of the SM clock and of the throttle reason "power limit"
SECONDS_BETWEEN = 0.02


@dataclass(frozen=True)
class Power:
    """Energy and clock of a GPU during some work."""

    joules: float
    seconds: float
    megahertz: float  # of the SMs, mean
    fastest: float  # maximum clock of the SMs
    limit: float  # watts
    held_back: float  # fraction of the time in which the power limit lowered the clock

    @property
    def watts(self) -> float:
        return self.joules / self.seconds


def watched(device: torch.device, work: Callable[[], Result]) -> tuple[Result, Power | None]:
    """The result of `work`, and the GPU's power meanwhile; None if the driver does not report it."""
    card = _card(str(torch.cuda.get_device_properties(device).uuid)) if device.type == "cuda" else None
    if card is None:
        return work(), None
    samples: list[tuple[int, int]] = []  # clock, throttle reasons
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(SECONDS_BETWEEN):
            samples.append((card.clock(), card.reasons()))

    watcher = threading.Thread(target=sample, daemon=True)
    before, start = card.millijoules(), time.perf_counter()
    watcher.start()
    try:
        result = work()
    finally:
        ended.set()
        watcher.join()
    seconds, joules = time.perf_counter() - start, 1e-3 * (card.millijoules() - before)
    if not samples:
        return result, None  # too short to measure
    megahertz = sum(clock for clock, _ in samples) / len(samples)
    held_back = sum(bool(reasons & POWER_LIMIT_REACHED) for _, reasons in samples) / len(samples)
    return result, Power(joules, seconds, megahertz, card.fastest(), 1e-3 * card.milliwatts(), held_back)


class _Card:
    """One GPU in the driver's management library (NVML)."""

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    def _ask(self, name: str, answer: Any, *arguments: int) -> int:
        result = getattr(self._library, name)(self._handle, *arguments, ctypes.byref(answer))
        if result:
            raise OSError(f"{name}: error {result} of the driver")
        return int(answer.value)

    def clock(self) -> int:
        return self._ask("nvmlDeviceGetClockInfo", ctypes.c_uint(), SM_CLOCK)

    def fastest(self) -> int:
        return self._ask("nvmlDeviceGetMaxClockInfo", ctypes.c_uint(), SM_CLOCK)

    def reasons(self) -> int:
        return self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong())

    def milliwatts(self) -> int:
        """Its power limit."""
        return self._ask("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint())

    def millijoules(self) -> int:
        """Energy since the driver was loaded."""
        return self._ask("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong())


@lru_cache
def _card(uuid: str) -> _Card | None:
    """The GPU with this UUID, if the driver reports everything that is needed."""
    handle = ctypes.c_void_p()
    try:
        library = _library()
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(
            f"GPU-{uuid}".encode(), ctypes.byref(handle)
        ):
            return None
        card = _Card(library, handle)
        for ask in (card.clock, card.fastest, card.reasons, card.milliwatts, card.millijoules):
            ask()
    except (OSError, AttributeError):  # no such library, function or value
        return None
    return card


def _library() -> Any:
    return ctypes.CDLL("libnvidia-ml.so.1")
