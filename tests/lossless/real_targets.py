"""Small worlds whose target goes the engine's own way from logits to distributions."""

from __future__ import annotations

from functools import cache

import numpy as np

from paceline.core.params import SamplingParams
from paceline.core.sampling import SamplingState
from paceline.core.trees import Draws
from paceline.verify.classic import reachable_draft
from paceline.verify.sampling import Sampler
from paceline.verify.verdict import Case
from tests.lossless.enumeration import Grow, Oracle, Path, Shape, World, grow, path_to, random_world
from tests.verify.reference_rules import Drafted

ENDING = 1


@cache
def logits_after(vocab: int, path: Path) -> np.ndarray:
    rng = np.random.default_rng([vocab, *path, len(path)])
    return (rng.normal(size=vocab) * 1.5).astype(np.float32)


def new_state(options: dict[str, object]) -> SamplingState:
    params = SamplingParams(**{name: value for name, value in options.items() if name != "bad_tokens"})
    bad_words = options.get("bad_tokens", ())
    return SamplingState(params, seed=0, prompt=[0], ending_ids=[ENDING], bad_words=bad_words)


def sampled_world(vocab: int, seed: int, options: dict[str, object]) -> World:
    """A world whose target has options, and whose texts end with token 1."""
    sampler = Sampler(vocab)

    @cache
    def target(path: Path) -> np.ndarray:
        state = new_state(options).branch(path)
        return sampler.probabilities(state, logits_after(vocab, path), len(path))

    return World(vocab, target, random_world(vocab, seed).draft, ENDING)


def grow_through_samplers(options: dict[str, object], ending: int = ENDING) -> Grow:
    """Drafts that continue below endings, pruned and given distributions by the engine's own code."""

    def grow_case(world: World, shape: Shape, oracle: Oracle) -> Drafted:
        whole = grow(World(world.vocab, world.target, world.draft), shape, oracle)
        paths = [path_to(whole, node) for node in range(-1, len(whole.tokens))]
        case = Case(
            np.array([logits_after(world.vocab, path) for path in paths]),
            whole.tokens,
            whole.parents,
            draws=Draws(whole.draft_probs, np.array(whole.draft_rows, dtype=np.int32)),
            sampling=new_state(options),
            position=1,
            num_output=0,
            is_last=lambda token, _: token == ending,
            num_logprobs=None,
        )
        target_probs = np.full((len(paths), world.vocab), np.nan)  # what is not open must not be looked at
        reachable = reachable_draft(case, target_probs, Sampler(world.vocab))
        return Drafted(
            target_probs[: 1 + len(reachable.nodes)],
            [whole.tokens[node] for node in reachable.nodes],
            reachable.parents,
            whole.draft_probs,
            [whole.draft_rows[node] for node in reachable.nodes],
        )

    return grow_case
