"""`/stats` of `paceline chat`: speed, acceptance and drafters."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.request import Request
from paceline.core.stats import StepStats


@dataclass
class Drafts:
    """What one drafter drafted."""

    steps: int = 0
    tokens: int = 0
    accepted: int = 0


@dataclass
class ChatStats:
    """The statistics of one or several answers."""

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0  # after the first tokens
    first_token_seconds: float = 0.0
    drafts: dict[str, Drafts] = field(default_factory=dict)  # by drafter

    def step(self, stats: StepStats) -> None:
        """Count a step's drafts."""
        for draft in stats.drafts:
            drafts = self.drafts.setdefault(draft.drafter, Drafts())
            drafts.steps += draft.count
            drafts.tokens += draft.count * draft.nodes
            drafts.accepted += draft.count * draft.accepted

    def end(self, request: Request) -> None:
        """Count an answer, complete or stopped."""
        if request.first_token_time is None or request.finished_time is None:
            return
        self.answers += 1
        self.tokens += request.num_output
        self.seconds += request.finished_time - request.first_token_time
        self.first_token_seconds += request.first_token_time - request.arrival_time

    def lines(self) -> list[str]:
        """The statistics in words."""
        if not self.answers:
            return ["there is no answer yet"]
        later = self.tokens - self.answers
        speed = f"{later / self.seconds:,.1f} tokens/s" if self.seconds > 0 else "-"
        first = 1e3 * self.first_token_seconds / self.answers
        return [f"{self.tokens:,} tokens, {speed}, first token after {first:,.0f} ms", *self._drafters()]

    def _drafters(self) -> list[str]:
        if not self.drafts:
            return ["nothing was drafted"]
        return [
            f"{name}: {drafts.accepted / max(1, drafts.tokens):.0%} of {drafts.tokens:,} drafted tokens "
            f"accepted, {1 + drafts.accepted / drafts.steps:.2f} tokens per drafted pass"
            for name, drafts in self.drafts.items()
        ]
