"""The power of a GPU by its driver, and drivers that do not report it."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import power as gpu_power
from benchmarks.gpu.power import watched

CUDA = torch.device("cuda")


class Driver:
    """A fake NVML: a GPU whose power limit lowers its clock in every other sample."""

    def __init__(self, broken: str = "") -> None:
        self.broken, self.asked, self.joules = broken, 0, 0

    def __getattr__(self, name: str) -> Any:
        def answer(*arguments: Any) -> int:
            if name == "nvmlDeviceGetHandleByUUID":
                assert arguments[0] == b"GPU-abc"
            elif name != "nvmlInit_v2":
                arguments[-1]._obj.value = self.value(name)
            return 3 if name == self.broken else 0

        return answer

    def value(self, name: str) -> int:
        if name == "nvmlDeviceGetClockInfo":
            self.asked += 1
            return 1980 - 300 * (self.asked % 2)
        if name == "nvmlDeviceGetCurrentClocksThrottleReasons":
            return 4 * (self.asked % 2) + 8
        if name == "nvmlDeviceGetTotalEnergyConsumption":
            self.joules += 5
            return 1000 * self.joules
        return {"nvmlDeviceGetMaxClockInfo": 1980, "nvmlDeviceGetEnforcedPowerLimit": 700_000}[name]


@pytest.fixture
def with_driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(driver: Driver) -> None:
        gpu_power._card.cache_clear()
        monkeypatch.setattr(gpu_power, "_library", lambda: driver)
        monkeypatch.setattr(gpu_power, "SECONDS_BETWEEN", 0.001)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))

    yield use
    gpu_power._card.cache_clear()


def test_power_of_a_gpu(with_driver: Any) -> None:
    driver = Driver()
    with_driver(driver)

    def work() -> str:
        while driver.asked < 11:  # once ahead of it
            time.sleep(0.001)
        return "done"

    result, power = watched(CUDA, work)
    assert result == "done"
    assert power is not None
    assert power.joules == pytest.approx(5)
    assert power.watts == power.joules / power.seconds
    assert (power.fastest, power.limit) == (1980, 700)
    assert power.held_back == pytest.approx(0.5, abs=0.1)
    assert power.megahertz == pytest.approx(1980 - 300 * power.held_back)


@pytest.mark.parametrize("broken", ["nvmlInit_v2", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetClockInfo"])
def test_without_driver_data_power_is_none(with_driver: Any, broken: str) -> None:
    with_driver(Driver(broken))
    assert watched(CUDA, lambda: 5) == (5, None)


def test_failing_work_ends_the_sampling(with_driver: Any) -> None:
    with_driver(Driver())
    with pytest.raises(ZeroDivisionError):
        watched(CUDA, lambda: 1 // 0)


def test_without_a_gpu_or_library_power_is_none() -> None:
    assert watched(torch.device("cpu"), lambda: 5) == (5, None)
