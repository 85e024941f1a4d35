"""Verdict: the accepted path of a request's draft, and its new tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability and its rank, 1 being the likeliest."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)  # not frozen: there is one for each request of every pass
class Verdict:
    """The result of verification for one request of a pass. Immutable by convention."""

    accepted: tuple[int, ...]  # accepted nodes of the draft, from the root down
    # their tokens and the bonus token, or without it if the last of them ends the request; empty for a
    # prefill chunk that ends inside the prompt
    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] = ()  # one per token, if asked
    error: Exception | None = None  # the request ends with it


NOTHING = Verdict((), ())
