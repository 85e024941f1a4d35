"""Fast kernels of this process that a slower one replaces, because they failed to compile or to start."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

_replaced: dict[str, str] = {}


def record_fallback(kernel: str, by: str, why: object) -> None:
    """Log that `by` runs instead of a fast kernel, and keep it for /metrics and `paceline check`."""
    logger.warning("%s instead of the kernel %s, which is faster: %s", by, kernel, why)
    _replaced[kernel] = by


def fallbacks() -> dict[str, str]:
    """What runs instead of each fast kernel that failed."""
    return dict(_replaced)
