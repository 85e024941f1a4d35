"""paceline: exact speculative decoding. The public names."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError
from paceline.version import __version__

if TYPE_CHECKING:
    from paceline.async_llm import AsyncLLM
    from paceline.core.params import SamplingParams
    from paceline.core.structured_outputs import StructuredOutputsParams
    from paceline.engine.outputs import CompletionOutput, RequestOutput
    from paceline.llm import LLM

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "PacelineError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_HOMES = {
    "LLM": "paceline.llm",
    "AsyncLLM": "paceline.async_llm",
    "SamplingParams": "paceline.core.params",
    "StructuredOutputsParams": "paceline.core.structured_outputs",
    "RequestOutput": "paceline.engine.outputs",
    "CompletionOutput": "paceline.engine.outputs",
}

if isa := os.environ.get("PACELINE_ISA"):  # before numba is imported, which reads its target once
    from paceline.machine import force_isa

    force_isa(isa)


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that small commands start fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
