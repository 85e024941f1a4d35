"""Constrained requests under the classic rules: the distribution is that of the target along its grammar.

The drafter knows nothing of the grammar; what it drew and chose goes through the engine's own pruning.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from paceline.constrain.pruning import Draft, fit_draft
from paceline.core.params import SamplingParams
from paceline.core.sampling import SamplingState
from paceline.core.trees import Draws
from paceline.verify.classic import reachable_draft
from paceline.verify.sampling import Sampler
from paceline.verify.verdict import Case
from tests.constrain.tables import Path, TableConstraint
from tests.lossless.enumeration import (
    World,
    continued,
    depth_of,
    drawn_chain,
    grow,
    path_to,
    random_world,
    step_law,
    text_law,
)
from tests.lossless.real_targets import logits_after
from tests.lossless.test_distribution import CHAINS, DRAWN_TREES, EXACT, MIXED_TREES
from tests.verify.reference_rules import Drafted, block, rejection, traversal

VOCAB = 3
PARAMS = SamplingParams(temperature=5.0)  # so that no token is almost certain


def pairs(path: Path) -> set[int]:
    """Two of three tokens, others after every path; one alone after token 2."""
    return {0} if path and path[-1] == 2 else {len(path) % 3, (len(path) + 1 + sum(path)) % 3}


def one_or_all(path: Path) -> set[int]:
    return {1} if len(path) % 2 else {0, 1, 2}


GRAMMARS = {"pairs": pairs, "one or all": one_or_all, "never token 0": lambda path: {1, 2}}


def state_of(allowed) -> SamplingState:
    return SamplingState(PARAMS, 0, [0], [], TableConstraint(VOCAB, allowed))


def constrained_world(allowed, seed: int) -> World:
    @cache
    def target(path: Path) -> np.ndarray:
        followed = state_of(allowed).branch(path)
        return Sampler(VOCAB).probabilities(followed, logits_after(VOCAB, path), len(path))

    def law(path: Path) -> np.ndarray:  # below what is forbidden nothing is asked
        return (
            target(path) if all(path[at] in allowed(path[:at]) for at in range(len(path))) else np.ones(3) / 3
        )

    return World(VOCAB, law, random_world(VOCAB, seed).draft)


def grow_along(allowed, fit=fit_draft, room: int = 2):
    """Drafts as an engine verifies them: pruned, extended by forced tokens, cut by the engine's code."""

    def grown(world: World, shape, oracle) -> Drafted:
        drawn = grow(world, shape, oracle)
        budget = len(drawn.tokens) + room
        levels = depth_of(shape) + 1
        constraint = TableConstraint(VOCAB, allowed)
        draft = fit(Draft(drawn.tokens, drawn.parents, drawn.draft_rows), constraint, (), budget, levels)
        whole = Drafted(drawn.target_probs, draft.tokens, draft.parents, drawn.draft_probs, draft.rows)
        paths = [path_to(whole, node) for node in range(-1, len(draft.tokens))]
        case = Case(
            np.array([logits_after(VOCAB, path) for path in paths]),
            draft.tokens,
            draft.parents,
            draws=Draws(drawn.draft_probs, np.array(draft.rows, dtype=np.int32)),
            sampling=state_of(allowed),
            position=1,
            num_output=0,
            is_last=lambda *_: False,
            num_logprobs=None,
        )
        target_probs = np.full((len(paths), VOCAB), np.nan)
        reachable = reachable_draft(case, target_probs, Sampler(VOCAB))
        return Drafted(
            target_probs[: 1 + len(reachable.nodes)],
            [draft.tokens[node] for node in reachable.nodes],
            reachable.parents,
            drawn.draft_probs,
            [draft.rows[node] for node in reachable.nodes],
        )

    return grown


def error(world: World, shape, rule, grown) -> float:
    """The largest difference between the law of a step's text, continued by the target, and the target's."""
    length = depth_of(shape) + 2  # a draft may be continued by one level, and the last token comes on top
    ours = continued(world, step_law(world, shape, rule, grown), length)
    theirs = text_law(world, length)
    return max(abs(ours.get(path, 0.0) - theirs.get(path, 0.0)) for path in ours.keys() | theirs.keys())


def shapes_of(rule) -> list:
    chains = [shape for shape in CHAINS.values() if len(shape) < 4]
    trees = [shape for shape in (DRAWN_TREES | MIXED_TREES).values() if len(shape) < 5]
    return chains if rule is block else [*chains, *trees]


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("rule", [rejection, block, traversal])
def test_the_text_has_the_distribution_of_the_constrained_target(rule, grammar):
    allowed = GRAMMARS[grammar]
    for shape in shapes_of(rule):
        world = constrained_world(allowed, seed=len(shape))
        assert error(world, shape, rule, grow_along(allowed)) < EXACT


@pytest.mark.parametrize("rule", [rejection, block, traversal])
def test_taking_away_forbidden_nodes_that_were_drawn_would_be_seen(rule):
    """The rule would then draw from the target instead of what the refused node has left of it."""

    def fit_all(draft: Draft, *rest) -> Draft:
        kept = fit_draft(Draft(draft.tokens, draft.parents, [-1] * len(draft.tokens)), *rest)
        return Draft(kept.tokens, kept.parents, [0] * len(kept.tokens))

    allowed = GRAMMARS["never token 0"]
    errors = [
        error(constrained_world(allowed, seed), drawn_chain(1), rule, grow_along(allowed, fit_all, room=0))
        for seed in range(5)
    ]
    assert max(errors) > 0.05
