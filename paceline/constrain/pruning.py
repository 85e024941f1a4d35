"""Fitting a draft to a grammar: forbidden nodes are removed, forced tokens are added."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.sampling import TokenConstraint
from paceline.errors import GrammarError

ROOT = -1


@dataclass(frozen=True)
class Draft:
    """One request's draft. All sequences have one entry per node."""

    tokens: Sequence[int]
    parents: Sequence[int]  # ROOT for the first level
    rows: Sequence[int]  # the distribution that a node was drawn from, -1: it was chosen
    chances: Sequence[float] | None = None  # that the path is accepted; NaN, or None for all: unknown
    forced: Sequence[bool] = ()  # whether the grammar leaves no other token


NOTHING = Draft((), (), ())


@dataclass
class _Fitted:
    """The draft being built, and its limits."""

    budget: int
    levels: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

    def add(self, token: int, parent: int, row: int, chance: float, forced: bool = False) -> int:
        """The number of the new node."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.rows.append(row)
        self.chances.append(chance)
        self.forced.append(forced)
        self.depths.append(self.depth(parent) + 1)
        return len(self.tokens) - 1

    def depth(self, node: int) -> int:
        return 0 if node == ROOT else self.depths[node]

    def extend(self, node: int, forced: Sequence[int]) -> int:
        """The last node of a run of forced tokens added below a node, as far as there is room."""
        room = min(self.budget - len(self.tokens), self.levels - self.depth(node))
        chance = 1.0 if node == ROOT else self.chances[node]
        for token in forced[: max(room, 0)]:
            node = self.add(token, node, -1, chance, forced=True)
        return node

    def finished(self, with_chances: bool) -> Draft:
        chances = self.chances if with_chances else None
        return Draft(self.tokens, self.parents, self.rows, chances, self.forced)


def fit_draft(
    draft: Draft, constraint: TokenConstraint, forced: Sequence[int], budget: int, levels: int
) -> Draft:
    """The draft after `forced`, without nodes that the grammar forbids, its paths extended by forced tokens.

    At most `budget` nodes and `levels` levels. The nodes of the draft keep their order; extensions come after
    them. `constraint` is at the request's last token, and is not changed.

    A drawn node and its siblings stay even if they are forbidden: rejection sampling must see every draw, or
    the output no longer has the target's distribution. Nothing stays below a forbidden node.
    """
    fitted = _Fitted(budget, levels)
    stem = fitted.extend(ROOT, forced)
    if not draft.tokens:
        return fitted.finished(draft.chances is not None)
    start: TokenConstraint | None = constraint
    for token in fitted.tokens:
        start = start and _followed(start, token)
    if start is None:  # a limit of the library
        return NOTHING
    states = {stem: start}  # fitted node: the grammar's state after it, if it is allowed
    fitted_nodes = {ROOT: stem}  # node of the draft: its node in the fitted draft
    drawn = {parent for parent, row in zip(draft.parents, draft.rows, strict=True) if row >= 0}
    chances = [math.nan] * len(draft.tokens) if draft.chances is None else draft.chances
    nodes = zip(draft.tokens, draft.parents, draft.rows, chances, strict=True)
    for node, (token, parent, row, chance) in enumerate(nodes):
        above = fitted_nodes.get(parent)
        if above is None or above not in states:
            continue
        following = _followed(states[above], token)
        if following is not None or parent in drawn:
            fitted_nodes[node] = fitted.add(token, above, row, chance)
        if following is not None:
            states[fitted_nodes[node]] = following
    with_children = set(fitted.parents)
    for node, state in states.items():
        if node not in with_children:
            fitted.extend(node, state.forced())
    return fitted.finished(draft.chances is not None)


def _followed(state: TokenConstraint, token: int) -> TokenConstraint | None:
    """The state after a token; None if the token may not come next."""
    try:
        if state.allows(token):
            following = state.branch()
            following.advance(token)
            return following
    except GrammarError:  # a limit of the library, on a path that the output may not take
        pass
    return None
