"""The arithmetic of speculation: what chains gain if every drafted token has the same acceptance.

Costs are in units of a one-row pass of the target. Drafting one more token costs `draft_cost`, and
verifying it (one more row of the pass) `row_cost`.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.options import check_integer, check_number

MAX_DRAFT_TOKENS = 64  # per step


@dataclass(frozen=True)
class Length:
    """The gain of chains of one length."""

    num_speculative_tokens: int
    tokens_per_pass: float
    cost: float  # of a step
    speedup: float
    break_even_alpha: float | None  # below this acceptance plain decoding is faster; None: it always is


@dataclass(frozen=True)
class Arithmetic:
    """A row for each length up to the requested one, and the best length."""

    alpha: float
    draft_cost: float  # of drafting a token, in one-row passes of the target
    row_cost: float  # of verifying it
    lengths: tuple[Length, ...]
    best: Length  # length 0 if nothing beats plain decoding


def arithmetic(alpha: float, gamma: int, draft_cost: float = 0.1, row_cost: float = 0.05) -> Arithmetic:
    """The gain of up to `gamma` drafted tokens at acceptance `alpha`, and the best length. ConfigError if a
    value is out of range."""
    check_number(ConfigError, "alpha", alpha, 0.0, 1.0)
    check_integer(ConfigError, "gamma", gamma, 1, MAX_DRAFT_TOKENS)
    for name, cost in (("draft_cost", draft_cost), ("row_cost", row_cost)):
        check_number(ConfigError, name, cost, 0.0, 1000.0, remedy="1 is a pass of the target over one row.")
    price = draft_cost + row_cost
    every = [_length(alpha, tokens, price) for tokens in range(MAX_DRAFT_TOKENS + 1)]
    best = max(every, key=lambda length: length.speedup)
    return Arithmetic(alpha, draft_cost, row_cost, tuple(every[1 : gamma + 1]), best)


def tokens_per_pass(alpha: float, gamma: int) -> float:
    """Expected tokens per step: the accepted ones and the bonus token."""
    return sum(alpha**depth for depth in range(gamma + 1))


def _length(alpha: float, gamma: int, price: float) -> Length:
    tokens, cost = tokens_per_pass(alpha, gamma), 1.0 + gamma * price
    return Length(gamma, tokens, cost, tokens / cost, _break_even(gamma, cost))


def _break_even(gamma: int, cost: float) -> float | None:
    """The acceptance at which a step gives as many tokens as it costs one-row passes."""
    if cost > gamma + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_pass(middle, gamma) < cost else (low, middle)
    return high
