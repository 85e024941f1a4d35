"""Truncation options for property tests of host and device: values that keep all, few, one, and the edges."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from paceline.core.truncation import OPTIONS, Truncation

VALUES: dict[str, st.SearchStrategy[int] | st.SearchStrategy[float]] = {
    "top_k": st.one_of(st.sampled_from([0, 1, 2, 5, 50, 1000]), st.integers(1, 20), st.integers(1, 305)),
    "top_p": st.one_of(st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01, 1e-9, 1 - 1e-9]), st.floats(0.001, 1.0)),
    "min_p": st.one_of(st.sampled_from([0.0, 0.05, 0.5, 1.0]), st.floats(0.0, 1.0)),
}
TRUNCATIONS = st.builds(Truncation, **VALUES)
EXAMPLES = (  # for tests that are too slow for many
    Truncation(),
    Truncation(top_k=50),
    Truncation(top_p=0.9),
    Truncation(min_p=0.01),
    Truncation(top_k=9, top_p=0.5),
)


def truncation_of(row: Sequence[float]) -> Truncation:
    """The record of a row of the array form."""
    return Truncation(*(option.kind(value) for option, value in zip(OPTIONS.values(), row, strict=True)))  # type: ignore[arg-type]
