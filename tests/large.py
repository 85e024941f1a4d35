"""What only repeats: `make test-large` runs it too, `make test` does not."""

from __future__ import annotations

import os
from typing import Any

import pytest

LARGE = os.environ.get("PACELINE_TEST_LARGE") == "1"


def repeated(*values: Any) -> list[Any]:
    """Parameters that try again, with other values, what a test has already tried."""
    reason = "repeats what others try: run it with `make test-large`"
    return [pytest.param(value, marks=pytest.mark.skipif(not LARGE, reason=reason)) for value in values]
