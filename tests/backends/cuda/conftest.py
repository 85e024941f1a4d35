"""Kernels run on a GPU if there is one, else in Triton's interpreter, on tiny shapes."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def dtype() -> torch.dtype:
    """bfloat16 on a GPU, unless PACELINE_TEST_DTYPE says float16; the interpreter knows no bfloat16."""
    usual = "bfloat16" if torch.cuda.is_available() else "float16"
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}[os.getenv("PACELINE_TEST_DTYPE", usual)]
