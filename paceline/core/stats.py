"""StepStats: the statistics of one step, for the controller, the metrics and the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paceline.core.trees import DraftPlan

DraftKind = tuple[str, int, int, int]  # of a draft: drafter, nodes, depth and accepted nodes


@dataclass(slots=True)  # not frozen: there is one for each draft of every host pass
class DraftStats:
    """One request's draft in one step, and how much of it was accepted. Immutable by convention.

    In a device pass it stands for all `count` drafts of a segment with the same drafter, length and
    acceptance, without names of requests. A chain has no path there.
    """

    request_id: str
    segment: str
    drafter: str
    nodes: int
    depth: int  # levels of the draft that were verified: none below a token that ended the request
    accepted: int  # nodes on the accepted path
    child: int = 0  # which of the n outputs of request_id
    path: tuple[int, ...] = ()  # the accepted nodes of the verified tree
    forced: int = 0  # nodes whose token a grammar forces
    accepted_forced: int = 0  # forced nodes on the accepted path
    count: int = 1  # drafts that it stands for

    @property
    def kind(self) -> DraftKind:
        return self.drafter, self.nodes, self.depth, self.accepted


@dataclass(frozen=True, slots=True)
class DraftCall:
    """One call of a drafter."""

    drafter: str
    requests: int  # that it drafted for
    levels: int  # that it computed: of its deepest draft, plus one if that ended before its plan
    nodes: int  # of all its drafts, even if another drafter's replaced them
    seconds: float


@dataclass(frozen=True, slots=True)
class ShadowStats:
    """How often shadow drafts were right: drafts beside plain passes, compared with the sampled tokens."""

    drafter: str
    tries: tuple[int, ...]  # [depth] tokens compared there: all tokens before them were right
    hits: tuple[int, ...]  # [depth] those of them that were right


@dataclass(frozen=True, slots=True)
class ControlStats:
    """The controller's decision for a step, and its measured gain."""

    reason: str  # of the plan, see docs/design/control.md
    regret: float  # seconds since the start that exploration has cost
    gain: float | None  # speed relative to plain decoding, measured under this load; None: not measured yet
    poor_segments: frozenset[str]  # segments that gain little


class TrainerActivity(Protocol):
    """A trainer on the same machine, as an engine sees it."""

    def is_working(self, seconds: float) -> bool:
        """Whether it has computed at any time in the last `seconds`."""
        ...


@dataclass(slots=True)
class StepStats:
    """The statistics of one step. Times are in seconds."""

    requests: int = 0  # requests in the pass
    failed: bool = False  # the pass raised: its requests have ended with the error
    overlapped: bool = False  # the pass was launched before the previous one was read
    disturbed: bool = False  # a trainer computed beside it, so its times say nothing about its plan
    plan: DraftPlan | None = None  # of all requests of a device pass; None: a host pass
    rows: int = 0  # rows of the pass
    attended: int = 0  # keys of committed tokens that its rows read, summed over the rows
    prefill_tokens: int = 0  # rows of known tokens, without the last of each request
    new_tokens: int = 0  # output tokens of all requests
    drafted: int = 0  # draft nodes in the pass
    accepted: int = 0  # draft nodes on accepted paths
    drafts: tuple[DraftStats, ...] = ()  # of a host pass, one per request with a draft
    # (request_id, child) of a host pass's requests with a draft plan; a drafter may have proposed nothing
    asked: frozenset[tuple[str, int]] = frozenset()
    draft_calls: tuple[DraftCall, ...] = ()
    shadow: ShadowStats | None = None  # of a plain pass on the device
    draft_failures: int = 0  # drafters that raised
    control: ControlStats | None = None  # None: the controller had nothing to decide
    running: int = 0
    waiting: int = 0
    preemptions: int = 0  # in this step
    kv_usage: float = 0.0  # fraction of pages held by sequences
    prefix_queries: int = 0  # tokens looked up, since the start
    prefix_hits: int = 0  # tokens found, since the start
    between_time: float = 0.0  # from the previous pass's commit to this step, while passes were in flight
    plan_time: float = 0.0  # controller and scheduler
    draft_time: float = 0.0
    build_time: float = 0.0  # making the batch
    forward_time: float = 0.0
    verify_time: float = 0.0
    commit_time: float = 0.0  # commit, detokenization, observers

    @property
    def total_time(self) -> float:
        """Seconds of the whole step."""
        return self.overhead + self.draft_time + self.forward_time

    @property
    def period(self) -> float:
        """Seconds since the previous pass was committed: the time per pass where passes overlap."""
        return self.between_time + self.total_time

    @property
    def overhead(self) -> float:
        """Seconds of the step outside the forward pass and the drafters."""
        return self.plan_time + self.build_time + self.verify_time + self.commit_time
