"""Truncation: which tokens of a row's distribution may be sampled. Host and device read this one record.

`SamplingParams` fills a `Truncation`, and everything between it and the code that samples passes it along
whole: verify/ as a tuple, a backend as a row of an array. The HTTP fields and the command-line flags are made
from `OPTIONS`. How to add an option: docs/extend/sampling_option.md.

Standard library only: the command line reads `OPTIONS` for `--help`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from paceline.errors import RequestError
from paceline.options import check_integer, check_number


class Truncation(NamedTuple):
    """The truncation options of a request. Each default keeps the whole distribution.

    An array of them is float64 [rows, NUM_FIELDS], in the order of the fields: np.array([truncation, ...]).
    Compiled code takes the tuple; its types are part of the compiled signature.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def keeps_all(self) -> bool:
        """Whether no option truncates."""
        return self == KEEPS_ALL


@dataclass(frozen=True)
class Option:
    """The allowed values of one field, and its help text."""

    kind: type[int] | type[float]
    low: int | float  # values below 0, where allowed, keep everything
    high: int | float | None  # None: no upper bound
    help: str  # of the command-line flag
    low_open: bool = False  # whether `low` itself is refused


OPTIONS: dict[str, Option] = {
    "top_k": Option(int, -1, None, "Keep the k likeliest tokens; 0 keeps all."),
    "top_p": Option(
        float, 0, 1, "Keep the likeliest tokens that together reach this probability.", low_open=True
    ),
    "min_p": Option(float, 0, 1, "Keep tokens with at least this share of the likeliest one's probability."),
}
assert tuple(OPTIONS) == Truncation._fields

KEEPS_ALL = Truncation()
NUM_FIELDS = len(Truncation._fields)


def check_truncation(name: str, value: object) -> int | float:
    """The value of an option, if it is in range; else RequestError."""
    option = OPTIONS[name]
    default: int | float = getattr(KEEPS_ALL, name)
    remedy = f"Use {default:g} to keep all."
    if option.kind is int:
        high = None if option.high is None else int(option.high)
        number: int | float = check_integer(RequestError, name, value, int(option.low), high, remedy)
    else:
        assert option.high is not None
        number = check_number(RequestError, name, value, option.low, option.high, option.low_open, remedy)
    return default if number < 0 else number
