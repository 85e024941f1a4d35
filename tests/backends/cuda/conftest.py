"""Kernels run on a GPU if there is one, else in Triton's interpreter, on tiny shapes."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def dtype() -> torch.dtype:
    """The interpreter knows no bfloat16."""
    return torch.bfloat16 if torch.cuda.is_available() else torch.float16
