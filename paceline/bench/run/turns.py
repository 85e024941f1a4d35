"""Answers and their times, from an engine here or a server elsewhere."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, TypeVar

from paceline.bench.traffic.profiles import Profile
from paceline.core.request import SpeculativeCounts


class WorkloadRequest(Protocol):
    """A request of a workload, in the form that its runner takes."""

    @property
    def id(self) -> str: ...

    @property
    def segment(self) -> str: ...


Task_contra = TypeVar("Task_contra", bound=WorkloadRequest, contravariant=True)


@dataclass(frozen=True)
class Answer:
    """The answer to one request. Times are seconds since its arrival or, if sooner, its due time."""

    token_ids: list[int]  # empty: the server reports only text
    num_tokens: int
    times: tuple[float, ...]  # arrival of each piece: one per pass, or per text of a stream
    e2e_seconds: float
    text: str = ""
    gains: tuple[int, ...] = ()  # tokens per pass; empty: unknown
    speculative: SpeculativeCounts = field(default_factory=SpeculativeCounts)
    failed_drafters: tuple[str, ...] = ()
    finished: bool = True  # the model ended it, not max_tokens
    valid: bool | None = None  # whether it conforms to its schema; None: it has none
    error: str | None = None  # why there is no complete answer
    answered_by: str | None = None  # the model that a route led to; None: no route did

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.times[0]

    @property
    def decode_seconds(self) -> float:
        """From the first token to the end."""
        return self.e2e_seconds - self.times[0]

    @property
    def tpot(self) -> float | None:
        """Time per token after the first; None if there is only one."""
        return self.decode_seconds / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between successive pieces."""
        return [after - before for before, after in pairwise(self.times)]

    def same_as(self, other: Answer) -> bool:
        """Whether both have the same tokens, or the same text if tokens are unknown."""
        return (self.token_ids, self.text) == (other.token_ids, other.text)


@dataclass(frozen=True)
class Acceptance:
    """What a server's counters report about drafting during a turn."""

    steps: float = 0  # drafts
    drafted: float = 0  # tokens
    accepted: float = 0
    accepted_per_position: tuple[float, ...] = ()  # [d] drafts whose token at depth d + 1 was accepted
    length: float | None = None  # mean acceptance length, from a server without counters
    rate: float | None = None


@dataclass(frozen=True)
class Turn:
    """One group of requests, run together."""

    seconds: float  # from the first arrival to the last end
    answers: list[Answer]
    acceptance: Acceptance | None = None  # if the answers do not have it
    # by segment, if the server reports it
    acceptance_of: Mapping[str, Acceptance] = field(default_factory=dict)
    lost_seconds: float = 0.0  # lost to other programs and virtual machines; not in `seconds`

    @property
    def decode_seconds(self) -> float:
        return sum(answer.decode_seconds for answer in self.answers if answer.error is None)


Slices = Generator[None, None, Turn]  # a turn: at each yield, others may run a slice of theirs


class Runner(Protocol[Task_contra]):
    """Answers groups of requests."""

    def slices(self, group: Sequence[Task_contra], profile: Profile) -> Slices:
        """The answers of all requests, which arrive by the profile."""
        ...

    def warm_up(self, group: Sequence[Task_contra], profile: Profile) -> None:
        """Answer briefly, untimed."""
        ...

    def close(self) -> None:
        """Release resources."""
        ...
