"""All outcomes of a speculative step with their exact probabilities, on worlds of a few tokens.

A process asks an Oracle for every random choice. `outcomes` runs it again and again until every
answer was given to every question, so that a sum over the outcomes is the exact law of the result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from tests.verify.reference_rules import Drafted, ReferenceRule

Path = tuple[int, ...]
Law = Callable[[Path], np.ndarray]  # the distribution of the token after a path


class Oracle:
    """Answers random choices from a script, and notes the answers that are still to be tried."""

    def __init__(self, script: list[int], untried: list[list[int]]) -> None:
        self.script = script
        self.untried = untried
        self.asked = 0
        self.probability = 1.0

    def choose(self, probs: Sequence[float] | np.ndarray) -> int:
        """An index of positive probability."""
        if self.asked == len(self.script):
            options = np.flatnonzero(probs).tolist()
            self.untried.extend([*self.script, option] for option in options[1:])
            self.script = [*self.script, options[0]]
        answer = self.script[self.asked]
        self.asked += 1
        self.probability *= probs[answer]
        return answer

    def accept(self, node: int, chance: float) -> bool:
        """The coin of a node."""
        chance = min(max(chance, 0.0), 1.0)
        return self.choose([1.0 - chance, chance]) == 1


def outcomes(process: Callable[[Oracle], Any]) -> Iterator[tuple[float, Any]]:
    """Every outcome of a process, with its probability."""
    untried: list[list[int]] = [[]]
    while untried:
        oracle = Oracle(untried.pop(), untried)
        result = process(oracle)
        yield oracle.probability, result


@dataclass(frozen=True)
class World:
    """A target and a drafter over a few tokens."""

    vocab: int
    target: Law
    draft: Law
    ending: int = -1  # the token that ends a text, if there is one

    def ends(self, path: Path) -> bool:
        return self.ending in path


def random_world(vocab: int, seed: int, sharpness: float = 1.0, ending: int = -1) -> World:
    """Unrelated random laws, different after every path."""

    def law(salt: int) -> Law:
        @cache
        def probs(path: Path) -> np.ndarray:
            rng = np.random.default_rng([seed, salt, *path, len(path)])
            return rng.dirichlet(np.full(vocab, 1.0 / sharpness))

        return probs

    return World(vocab, law(0), law(1), ending)


def opposed(world: World) -> World:
    """The drafter's likeliest tokens are the target's least likely ones."""

    def draft(path: Path) -> np.ndarray:
        probs = world.target(path)
        turned = np.empty_like(probs)
        turned[np.argsort(probs)] = np.sort(probs)[::-1]
        return turned

    return replace(world, draft=draft)


def agreeing(world: World) -> World:
    """The drafter is the target."""
    return replace(world, draft=world.target)


def thinned(world: World, target: Sequence[int], draft: Sequence[int]) -> World:
    """The target never takes some tokens, and the drafter never takes some others."""

    def without(law: Law, tokens: Sequence[int]) -> Law:
        def probs(path: Path) -> np.ndarray:
            left = law(path).copy()
            left[list(tokens)] = 0.0
            return left / left.sum()

        return probs

    return replace(world, target=without(world.target, target), draft=without(world.draft, draft))


WORLDS = {
    "random": random_world(3, 1),
    "sharp": random_world(3, 2, sharpness=4.0),
    "flat": random_world(3, 3, sharpness=0.2),
    "drafter likes what the target does not": opposed(random_world(3, 4, sharpness=3.0)),
    "drafter is the target": agreeing(random_world(3, 5)),
    "each has a token that the other has not": thinned(random_world(3, 6), target=[0], draft=[1]),
    "disjoint": thinned(random_world(3, 7), target=[0], draft=[1, 2]),
    "certain target": thinned(random_world(3, 8), target=[0, 2], draft=[]),
    "certain drafter": thinned(random_world(3, 9), target=[], draft=[0, 2]),
    "texts that end": random_world(3, 10, ending=1),
}  # what every rule is tried on

# A shape is a tuple of nodes in order: (parent, "drawn" or "chosen").
Shape = tuple[tuple[int, str], ...]


def drawn_chain(length: int) -> Shape:
    return tuple((node - 1, "drawn") for node in range(length))


def grow(world: World, shape: Shape, oracle: Oracle) -> Drafted:
    """A draft of this shape: drawn tokens without replacement among siblings, chosen ones the best left.

    A node is left out where its parent is, where nothing is left to draw, and below an ending.
    """
    tokens: list[int] = []
    parents: list[int] = []
    rows: list[int] = []
    paths: list[Path] = [()]  # of the root, then of each node
    draft_probs = []
    places = {-1: -1}
    for node, (parent, how) in enumerate(shape):
        if parent not in places or world.ends(paths[places[parent] + 1]):
            continue
        above = places[parent]
        path = paths[above + 1]
        left = world.draft(path).copy()
        left[[token for token, other in zip(tokens, parents, strict=True) if other == above]] = 0.0
        if not left.any():
            continue
        token = oracle.choose(left / left.sum()) if how == "drawn" else int(np.argmax(left))
        places[node] = len(tokens)
        tokens.append(token)
        parents.append(above)
        rows.append(len(draft_probs) if how == "drawn" else -1)
        draft_probs.append(world.draft(path))
        paths.append((*path, token))
    target_probs = np.array([world.target(path) for path in paths])
    return Drafted(target_probs, tokens, parents, np.array(draft_probs), rows)


def path_to(draft: Drafted, node: int) -> Path:
    """The tokens from the root down to a node."""
    path: Path = ()
    while node >= 0:
        path = (draft.tokens[node], *path)
        node = draft.parents[node]
    return path


Grow = Callable[[World, Shape, Oracle], Drafted]


def step_law(world: World, shape: Shape, rule: ReferenceRule, grow: Grow = grow) -> dict[Path, float]:
    """The probability of every text that one step can give."""

    def step(oracle: Oracle) -> tuple[Path, np.ndarray | None]:
        draft = grow(world, shape, oracle)
        end, last = rule(draft, oracle.accept)
        path = path_to(draft, end)
        return path, None if path and path[-1] == world.ending else last

    law: dict[Path, float] = defaultdict(float)
    for probability, (path, last) in outcomes(step):
        if last is None:
            law[path] += probability
        else:
            for token, share in enumerate(last):
                law[(*path, token)] += probability * share
    return law


def text_law(world: World, length: int) -> dict[Path, float]:
    """The target's probability of every text of this length, or shorter where it ends."""
    law: dict[Path, float] = {(): 1.0}
    for _ in range(length):
        longer: dict[Path, float] = defaultdict(float)
        for path, probability in law.items():
            if world.ends(path):
                longer[path] += probability
            else:
                for token, share in enumerate(world.target(path)):
                    longer[(*path, token)] += probability * share
        law = longer
    return law


def continued(world: World, law: dict[Path, float], length: int) -> dict[Path, float]:
    """The law of texts of this length when the target continues where a step has ended."""
    whole: dict[Path, float] = defaultdict(float)
    for start, probability in law.items():
        if len(start) == length or world.ends(start):
            whole[start] += probability
            continue
        for rest in product(range(world.vocab), repeat=length - len(start)):
            path, share = start, probability
            for token in rest:
                if not world.ends(path):
                    share *= world.target(path)[token]
                    path = (*path, token)
                elif token:
                    share = 0.0  # one way to continue after an ending
            whole[path] += share
    return whole


def depth_of(shape: Shape) -> int:
    depths: list[int] = []
    for parent, _ in shape:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


def error(world: World, shape: Shape, rule: ReferenceRule, grow: Grow = grow) -> float:
    """The largest difference between the law of a step's text, continued by the target, and the target's."""
    length = depth_of(shape) + 1
    ours = continued(world, step_law(world, shape, rule, grow), length)
    theirs = text_law(world, length)
    worst = 0.0
    for path in ours.keys() | theirs.keys():
        difference = abs(ours.get(path, 0.0) - theirs.get(path, 0.0))
        worst = max(
            worst, difference if difference == difference else float("inf")
        )  # NaN is as wrong as can be
    return worst


def mean_accepted(world: World, shape: Shape, rule: ReferenceRule) -> float:
    """The expected number of accepted nodes of a step."""

    def step(oracle: Oracle) -> int:
        draft = grow(world, shape, oracle)
        end, _ = rule(draft, oracle.accept)
        return len(path_to(draft, end))

    return sum(probability * accepted for probability, accepted in outcomes(step))
