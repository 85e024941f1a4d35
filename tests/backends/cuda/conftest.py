"""Kernels run on a GPU if there is one, else in Triton's interpreter, on tiny shapes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.large import LARGE


@pytest.fixture(scope="session", autouse=True)
def interpreter_is_quick() -> Iterator[None]:
    """Save most of the interpreter's time. It looks for overflows of integers in `make test-large` alone.

    Shapes of tests are far from those, and compiled kernels have no such check. Buffers are at first for
    contexts of two blocks instead of many, of which each would have a program of attention without work, and
    noise is made for half a block of ids at once, as for few ids it takes as long.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from paceline.backends.cuda.heads import block_runner, head_runner
    from paceline.backends.cuda.kernels.sampling import gumbel
    from paceline.backends.cuda.passes import host_passes
    from tests.backends.cuda.quick_interpreter import make_quick

    with pytest.MonkeyPatch.context() as patches:
        make_quick(patches, sanitize_overflow=LARGE)
        for module in (host_passes, head_runner, block_runner):
            patches.setattr(module, "FIRST_LONGEST", 128)
        patches.setattr(gumbel, "PART", gumbel.BLOCK // 2)
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def dtype() -> torch.dtype:
    """bfloat16 on a GPU, unless PACELINE_TEST_DTYPE says float16; the interpreter knows no bfloat16."""
    usual = "bfloat16" if torch.cuda.is_available() else "float16"
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}[os.getenv("PACELINE_TEST_DTYPE", usual)]
