from paceline.backends.cpu.backend import CpuBackend
from paceline.backends.cpu.head_runner import CpuHeadRunner

__all__ = ["CpuBackend", "CpuHeadRunner"]
