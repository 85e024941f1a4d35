"""What requests got and when, whoever answered them: an engine here or a server elsewhere."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, TypeVar

from paceline.bench.traffic.profiles import Profile
from paceline.core.request import SpeculativeCounts


class Asked(Protocol):
    """A request of a workload, in whatever form its runner takes it."""

    @property
    def id(self) -> str: ...

    @property
    def segment(self) -> str: ...


Task_contra = TypeVar("Task_contra", bound=Asked, contravariant=True)


@dataclass(frozen=True)
class Answer:
    """What one request got. Times are seconds since it came, or was due if that was sooner."""

    token_ids: list[int]  # empty: a server that tells only the text
    num_tokens: int
    times: tuple[float, ...]  # when each piece of it came: one for each pass, or for each text of a stream
    e2e_seconds: float
    text: str = ""
    gains: tuple[int, ...] = ()  # tokens of each pass that gave it some; empty: nobody tells
    speculative: SpeculativeCounts = field(default_factory=SpeculativeCounts)
    failed_drafters: tuple[str, ...] = ()
    finished: bool = True  # it came to its end, it was not cut
    valid: bool | None = None  # whether it fits its schema; None: it has none
    error: str | None = None  # why there is no whole answer

    @property
    def ttft(self) -> float:
        """Until its first token."""
        return self.times[0]

    @property
    def decode_seconds(self) -> float:
        """From its first token to its end."""
        return self.e2e_seconds - self.times[0]

    @property
    def tpot(self) -> float | None:
        """Time per token after the first; None if there is only one."""
        return self.decode_seconds / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """From each piece to the next."""
        return [after - before for before, after in pairwise(self.times)]

    def same_as(self, other: Answer) -> bool:
        """Whether both are, token for token, or text for text where nothing else is known, the same."""
        return (self.token_ids, self.text) == (other.token_ids, other.text)


@dataclass(frozen=True)
class Acceptance:
    """What a server's counters say that drafting did during a turn."""

    steps: float = 0  # drafts
    drafted: float = 0  # tokens
    accepted: float = 0
    accepted_per_position: tuple[float, ...] = ()  # [d] drafts whose token at depth d + 1 was accepted
    length: float | None = None  # mean acceptance length, from a server that tells no counts
    rate: float | None = None


@dataclass(frozen=True)
class Turn:
    """One group of requests, run together."""

    seconds: float  # from the first arrival to the end of the last
    answers: list[Answer]
    acceptance: Acceptance | None = None  # where answers themselves do not tell
    acceptance_of: Mapping[str, Acceptance] = field(default_factory=dict)  # by segment, if a server tells it
    lost_seconds: float = 0.0  # to other programs and guests of the machine; `seconds` has none of them

    @property
    def decode_seconds(self) -> float:
        return sum(answer.decode_seconds for answer in self.answers if answer.error is None)


Slices = Generator[None, None, Turn]  # a turn: where it yields, others may do some of theirs


class Runner(Protocol[Task_contra]):
    """Somebody who answers groups of requests."""

    def slices(self, group: Sequence[Task_contra], profile: Profile) -> Slices:
        """What all of them got, arriving as the profile says."""
        ...

    def warm_up(self, group: Sequence[Task_contra], profile: Profile) -> None:
        """Answer briefly and uncounted."""
        ...

    def close(self) -> None:
        """Let go of what is held."""
        ...
