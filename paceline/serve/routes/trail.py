"""Trail: how a request went through virtual models, for its headers, its log line and the metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.serve.openai.generation import Generation


@dataclass
class Visit:
    """One virtual model that the request went through."""

    route: str
    attempts: list[tuple[str, Generation]] = field(default_factory=list)  # by real models; the last is sent
    escalations: int = 0  # answers of a cascade that were not good enough
    fallbacks: int = 0  # models that had no room


@dataclass
class Trail:
    """The way from the name that the client asked for to the model that answers."""

    visits: list[Visit] = field(default_factory=list)  # empty: it asked for a real model
    model: str | None = None  # the real model whose answer is sent; None: not known yet

    @property
    def is_routed(self) -> bool:
        """Whether a virtual model has led to an answer."""
        return bool(self.visits) and self.model is not None

    @property
    def routes(self) -> list[str]:
        """The virtual models, in the order in which they decided."""
        return [visit.route for visit in self.visits]

    @property
    def escalations(self) -> int:
        return sum(visit.escalations for visit in self.visits)

    @property
    def fallbacks(self) -> int:
        return sum(visit.fallbacks for visit in self.visits)
