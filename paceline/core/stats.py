"""StepStats: the only stream of facts about a step. The controller, metrics and bench read it."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.trees import DraftPlan


@dataclass(slots=True)  # not frozen: there is one for each draft of every step
class DraftFacts:
    """What became of one request's draft in one step. Nobody changes it."""

    request_id: str
    segment: str
    drafter: str
    nodes: int
    depth: int  # levels of the draft that could be tried: none below a token that ended the request
    accepted: int  # nodes on the accepted path
    child: int = 0  # which of the n outputs of request_id
    path: tuple[int, ...] = ()  # the accepted nodes, as they are numbered in the tree that was verified


@dataclass(frozen=True, slots=True)
class DraftCall:
    """One call of a drafter."""

    drafter: str
    requests: int  # that it was asked for
    levels: int  # that were looked at: those of the deepest of its drafts, and where it ended one more
    nodes: int  # of all of them, also of those that others were preferred to
    seconds: float


@dataclass(frozen=True, slots=True)
class ShadowFacts:
    """How shadow drafts fared: drafts beside plain passes that nobody verified."""

    drafter: str
    tries: tuple[int, ...]  # [depth] tokens that were compared there: all before were right
    hits: tuple[int, ...]  # [depth] those of them that were right


@dataclass(frozen=True, slots=True)
class ControlFacts:
    """What the controller decided for a step, and what it knows of its own success."""

    reason: str  # why it was planned as it was: see docs/control.md
    regret: float  # seconds that were spent since the start on trying what turned out worse
    gain: float  # times plain decoding, measured under this load; 1 while that is unknown
    poor_segments: frozenset[str]  # those that gain little


@dataclass(slots=True)
class StepStats:
    """One step. Times are seconds."""

    requests: int = 0  # requests in the pass
    failed: bool = False  # the pass raised: its requests have ended with the error
    overlapped: bool = False  # the pass began before the one before it was read
    plan: DraftPlan | None = None  # that all requests of a pass on the device had; None: a pass of the host
    rows: int = 0  # rows of the pass
    attended: int = 0  # keys of committed tokens that its rows read, summed over the rows
    prefill_tokens: int = 0  # rows that only compute known tokens, beyond each request's last
    new_tokens: int = 0  # tokens that requests gained
    drafted: int = 0  # draft nodes in the pass
    accepted: int = 0  # draft nodes on accepted paths
    drafts: tuple[DraftFacts, ...] = ()  # of the requests that were drafted for
    # (request_id, child) of those whose drafters were asked: rows may have left no room for some
    asked: frozenset[tuple[str, int]] = frozenset()
    draft_calls: tuple[DraftCall, ...] = ()
    shadow: ShadowFacts | None = None  # of a plain pass on the device
    draft_failures: int = 0  # drafters that raised
    control: ControlFacts | None = None  # None: there was nothing to decide
    running: int = 0
    waiting: int = 0
    preemptions: int = 0  # in this step
    kv_usage: float = 0.0  # share of pages held
    prefix_queries: int = 0  # tokens looked up, since the start
    prefix_hits: int = 0  # tokens found, since the start
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
    def overhead(self) -> float:
        """Seconds of the step outside the forward pass and the drafters."""
        return self.plan_time + self.build_time + self.verify_time + self.commit_time
