"""grammar: drafts the tokens that the request's grammar forces, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.trees import DraftPlan, DraftTrees
from paceline.draft.base import Drafter

if TYPE_CHECKING:
    from paceline.core.request import Request


class GrammarDrafter(Drafter):
    """Drafts the forced tokens that come next, as a chain. They are always accepted."""

    name = "grammar"
    only_forced = True

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        """One chain per request; empty where the grammar leaves a choice."""
        constraints = [request.sampling.constraint for request in requests]
        chains = [
            () if constraint is None else constraint.forced()[: plan.levels]
            for constraint, plan in zip(constraints, plans, strict=True)
        ]
        trees = DraftTrees.chains(chains, [[1.0] * len(chain) for chain in chains])
        return replace(trees, forced=np.ones(trees.num_nodes, dtype=bool))
