"""Mirrors the package. Without a GPU Triton interprets kernels, which it must know when it is imported."""

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
