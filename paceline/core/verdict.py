"""What a pass decided for one request."""

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
    """What a pass decided for one request. Nobody changes it."""

    accepted: tuple[int, ...]  # nodes of the draft on the target's path, from the root down
    # their tokens and the bonus token, or without it if the last of them ends the request; empty for a
    # chunk that ends inside a prompt
    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] = ()  # one per token, if asked
    error: Exception | None = None  # the request cannot go on


NOTHING = Verdict((), ())
