"""`/stats` of `paceline chat`: speed, acceptance and drafters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from paceline.core.request import Request
from paceline.core.stats import DraftKind


@dataclass
class ChatStats:
    """The statistics of one or several answers."""

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0  # after the first tokens
    first_token_seconds: float = 0.0
    drafts: Counter[DraftKind] = field(default_factory=Counter)

    def end(self, request: Request) -> None:
        """Count an answer, complete or stopped."""
        self.drafts.update(request.speculative.drafts)
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
        line = f"{self.tokens:,} tokens, {speed}, first token after {first:,.0f} ms"
        drafters = dict.fromkeys(drafter for drafter, *_ in self.drafts)
        return [line, *([self._drafted(name) for name in drafters] or ["nothing was drafted"])]

    def _drafted(self, name: str) -> str:
        counts = [
            (count, nodes * count, accepted * count)
            for (drafter, nodes, _, accepted), count in self.drafts.items()
            if drafter == name
        ]
        steps, tokens, accepted = map(sum, zip(*counts, strict=True))
        return (
            f"{name}: {accepted / max(1, tokens):.0%} of {tokens:,} drafted tokens accepted, "
            f"{1 + accepted / steps:.2f} tokens per drafted pass"
        )
