from paceline.backends.cpu.backend import CpuBackend
from paceline.backends.cpu.heads.head_runner import CpuHeadRunner

__all__ = ["CpuBackend", "CpuHeadRunner"]
