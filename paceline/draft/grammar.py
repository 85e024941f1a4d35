"""grammar: drafts what the request's grammar leaves no choice about, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.trees import DraftPlan, DraftTrees
from paceline.draft.base import Drafter, Target
from paceline.errors import ConfigError
from paceline.options import refuse_unknown

if TYPE_CHECKING:
    from paceline.core.request import Request


class GrammarDrafter(Drafter):
    """The forced tokens that come next, as a chain. They are always accepted."""

    name = "grammar"
    only_forced = True

    @refuse_unknown(ConfigError)
    @dataclass(frozen=True)
    class Options:
        """It has none."""

    @classmethod
    def load(cls, options: Options, target: Target) -> GrammarDrafter:
        """The drafter; it keeps nothing."""
        return cls()

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        """One chain per request; none where there is a choice."""
        constraints = [request.sampler.constraint for request in requests]
        chains = [
            () if constraint is None else constraint.forced()[: plan.levels]
            for constraint, plan in zip(constraints, plans, strict=True)
        ]
        return DraftTrees.chains(chains, [[1.0] * len(chain) for chain in chains])
