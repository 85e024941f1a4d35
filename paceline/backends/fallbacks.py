"""The record of kernel fallbacks in this process: fast kernels that failed to compile or to start."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

_replaced: dict[str, str] = {}


def record_fallback(kernel: str, by: str, why: object) -> None:
    """Log that `by` replaces a fast kernel, and record it for /metrics and `paceline check`."""
    logger.warning("%s instead of the kernel %s, which is faster: %s", by, kernel, why)
    _replaced[kernel] = by


def fallbacks() -> dict[str, str]:
    """{kernel that failed: what runs instead}."""
    return dict(_replaced)
