"""Drafted nodes of a batch, and what a request may draft in a step.

A chain is the degenerate tree and an empty tree is plain decoding, so nothing downstream asks which
of the three it got.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What the controller allows a request this step. Budget 0 is plain decoding."""

    drafter: str | None = None  # a name of the engine's drafters
    budget: int = 0  # most nodes of the tree
    branching: int = 1  # most children of a node; 1 is a chain
    depth: int | None = None  # most levels of the tree; None: as many as the budget has nodes
    forced: int = 0  # nodes of the budget that are kept for tokens that a constraint forces
    prefix: tuple[int, ...] = ()  # tokens that are sure to come first: what is drafted follows them

    @property
    def levels(self) -> int:
        """Most levels that the tree can have."""
        return self.budget if self.depth is None else min(self.depth, self.budget)

    def shrunk(self, budget: int) -> DraftPlan:
        """This plan with at most `budget` nodes; the plain plan when none are left."""
        if budget >= self.budget:
            return self
        return replace(self, budget=budget) if budget > 0 else PLAIN

    def __post_init__(self) -> None:
        assert (self.budget > 0) == (self.drafter is not None), "a budget belongs to a drafter"


PLAIN = DraftPlan()


@dataclass(frozen=True, slots=True)
class Draws:
    """Where nodes that were drawn at random come from."""

    draft_probs: Float64Array  # [distributions, vocab] each sums to 1
    rows: Int32Array  # [nodes] the distribution a node was drawn from, -1: it was chosen

    def check(self, tokens: Int32Array, vocab_size: int) -> None:
        """Nothing, if these tokens can have been drawn so; ValueError names what is not sound."""
        shape = self.draft_probs.shape
        if len(shape) != 2 or shape[1] != vocab_size or self.draft_probs.dtype != np.float64:
            raise ValueError(f"draft_probs must be float64 [distributions, {vocab_size}], got {shape}")
        if len(self.rows) != len(tokens) or (self.rows >= shape[0]).any():
            raise ValueError(f"rows must name one of {shape[0]} distributions or -1 for each node")
        drawn = np.flatnonzero(self.rows >= 0)
        if not (self.draft_probs[self.rows[drawn], tokens[drawn]] > 0).all():
            raise ValueError("a node's token has probability 0 in the distribution it was drawn from")


@dataclass(frozen=True, slots=True)
class DraftTrees:
    """The drafted nodes of several requests, flat.

    A node's parent is a node before it of the same request, or -1: the request's last token.

    A node may have been chosen (a copy, the likeliest token, shared noise) or drawn at random from
    a distribution of the drafter's. Rules other than pathwise must know which, and the distribution.
    Siblings drawn from one distribution are drawn without replacement, in order: the second from
    what is left of it when the tokens of all earlier siblings, drawn or chosen, are taken out.
    """

    tokens: Int32Array  # [nodes]
    parents: Int32Array  # [nodes] local to the request, -1 for the root's children
    offsets: Int32Array  # [requests + 1] nodes of request i are offsets[i]:offsets[i + 1]
    draws: Draws | None = None  # None: every node was chosen

    @property
    def num_requests(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_nodes(self) -> int:
        return len(self.tokens)

    def tree(self, request: int) -> tuple[Int32Array, Int32Array]:
        """Tokens and parents of one request's nodes."""
        start, end = self.offsets[request], self.offsets[request + 1]
        return self.tokens[start:end], self.parents[start:end]

    def tree_lists(self, request: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of one request's nodes, as lists: quicker to walk."""
        tokens, parents = self.tree(request)
        return tokens.tolist(), parents.tolist()

    def draws_of(self, request: int) -> Draws | None:
        """Where one request's nodes were drawn from; None if all of them were chosen."""
        if self.draws is None:
            return None
        rows = self.draws.rows[self.offsets[request] : self.offsets[request + 1]]
        return Draws(self.draws.draft_probs, rows) if (rows >= 0).any() else None

    @staticmethod
    def from_lists(trees: Sequence[tuple[Sequence[int], Sequence[int]]]) -> DraftTrees:
        """The trees given as one (tokens, parents) pair per request. All nodes were chosen."""
        tokens: list[int] = []
        parents: list[int] = []
        offsets = [0]
        for tree_tokens, tree_parents in trees:
            tokens += tree_tokens
            parents += tree_parents
            offsets.append(len(tokens))
        return DraftTrees(
            np.array(tokens, dtype=np.int32),
            np.array(parents, dtype=np.int32),
            np.array(offsets, dtype=np.int32),
        )

    @staticmethod
    def chains(chains: Sequence[Sequence[int]]) -> DraftTrees:
        """One chain of tokens per request."""
        return DraftTrees.from_lists([(chain, range(-1, len(chain) - 1)) for chain in chains])

    @staticmethod
    def merged(num_requests: int, groups: Sequence[tuple[Sequence[int], DraftTrees]]) -> DraftTrees:
        """The trees of several drafters as one: each group's trees belong to the requests it names."""
        trees: list[tuple[Sequence[int], Sequence[int]]] = [NO_TREE] * num_requests
        rows: list[Sequence[int]] = [()] * num_requests
        distributions: list[Float64Array] = []
        first = 0
        for requests, proposed in groups:
            for number, request in enumerate(requests):
                trees[request] = proposed.tree_lists(number)
                draws = proposed.draws_of(number)
                known = [-1] * len(trees[request][0]) if draws is None else draws.rows.tolist()
                rows[request] = [row + first if row >= 0 else -1 for row in known]
            if proposed.draws is not None:
                distributions.append(proposed.draws.draft_probs)
                first += len(proposed.draws.draft_probs)
        merged = DraftTrees.from_lists(trees)
        if not distributions:
            return merged
        flat = np.array([row for own in rows for row in own], dtype=np.int32)
        return replace(merged, draws=Draws(np.concatenate(distributions), flat))

    def check(self, plans: Sequence[DraftPlan], vocab_size: int) -> None:
        """Nothing, if these are sound trees within the plans; ValueError names what is not.

        Drafters are plug-ins: a node out of order or a repeated sibling would corrupt the output
        or waste the pass, so their trees are checked before they are used.
        """
        if self.num_requests != len(plans):
            raise ValueError(f"expected trees for {len(plans)} requests, got {self.num_requests}")
        for request, plan in enumerate(plans):
            tokens, parents = self.tree_lists(request)  # lists: for a few nodes they are quicker than arrays
            if len(tokens) > plan.budget:
                raise ValueError(f"tree {request} has {len(tokens)} nodes, its budget is {plan.budget}")
            if len(parents) != len(tokens):
                raise ValueError(f"tree {request} has {len(tokens)} tokens but {len(parents)} parents")
            if not all(-1 <= parent < node for node, parent in enumerate(parents)):
                raise ValueError(f"tree {request} is not in topological order: parents {parents}")
            if not all(0 <= token < vocab_size for token in tokens):
                raise ValueError(f"tree {request} has a token outside 0..{vocab_size - 1}: {tokens}")
            if len(set(zip(parents, tokens, strict=True))) != len(tokens):
                raise ValueError(f"tree {request} repeats a token among siblings: {tokens}")
            if plan.branching == 1 and len(set(parents)) != len(parents):
                raise ValueError(f"tree {request} branches, its plan is a chain: parents {parents}")
        if self.draws is not None:
            self.draws.check(self.tokens, vocab_size)


NO_TREE: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
