"""DraftShape and StepPlan: the rows of a decode step with a static draft tree.

    nodes     0 is the root, the last known token; others are drafted, parents before children
    passes    0   the target over all nodes
              1   the drafter catches up on accepted tokens, and drafts the root's children
              2.. the drafter over the nodes of one level that have children; if its rows read masks and not
                  drafted tokens (P-EAGLE), one pass over those of all levels

A chain is a tree in which every node has one child; without drafted nodes a step is plain decoding and
consists of the target's pass. Every row follows from the request's length and these tables, so one small
kernel at the end of a step writes all rows of the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.core.arrays import Int32Array
from paceline.core.tree_shapes import ROOT, static_shape

# Fields of the tables that kernels/step_rows.py reads.
# Of a row: rows before its pass, rows of its pass, its index among them, node, depth, length of its path's
# contiguous prefix, whether its pass catches up (1: and ends at the root, 2: at the token before it), rows of
# the pass before, the parent's among them, tile.
# Of a tile: tiles before its pass, tiles of its pass, its index among them, first row, rows of its pass.


@dataclass(frozen=True)
class DraftShape:
    """A draft tree."""

    parents: tuple[int, ...]  # [nodes] -1 for node 0, the root

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def depths(self) -> list[int]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths

    @property
    def levels(self) -> int:
        """The depth of the tree: the most drafted tokens of a path."""
        return max(self.depths)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    def path(self, node: int) -> list[int]:
        """The nodes from the root to a node."""
        path = [node]
        while path[0] > 0:
            path.insert(0, self.parents[path[0]])
        return path

    @property
    def first_path(self) -> list[int]:
        """The root, its first child, the first child of that, ..."""
        path = [0]
        while children := self.children(path[-1]):
            path.append(children[0])
        return path

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def inner(self, depth: int) -> list[int]:
        """The nodes of a level that have children."""
        return [
            node
            for node, node_depth in enumerate(self.depths)
            if node_depth == depth and node in self.parents
        ]

    @property
    def most_children(self) -> int:
        return max((len(self.children(node)) for node in range(len(self))), default=0)


def chain_shape(length: int) -> DraftShape:
    """A chain of `length` drafted tokens; 0: plain decoding."""
    return DraftShape(tuple(range(-1, length)))


def tree_shape(nodes: int, branching: int, levels: int) -> DraftShape:
    """A tree of `nodes` nodes, the root included: those most likely to be reached, judged by rank alone."""
    parents = [-1] * nodes
    for parent, children in static_shape(nodes - 1, branching, levels).items():
        for child in children:
            parents[child + 1] = 0 if parent == ROOT else parent + 1
    return DraftShape(tuple(parents))


@dataclass(frozen=True)
class PassRows:
    """A request's rows of one pass."""

    nodes: Sequence[int]  # in a catch-up pass: 0, 1, ... in the order of positions
    height: int  # rows of an attention tile

    @property
    def tiles(self) -> int:
        return -(-len(self.nodes) // self.height)


@dataclass(frozen=True)
class StepPlan:
    """A request's rows and tiles of all passes of a step."""

    passes: tuple[PassRows, ...]
    rows: Int32Array  # [10, rows]
    tiles: Int32Array  # [5, tiles]
    paths: Int32Array  # [rows, levels] nodes of a path from the first non-contiguous one on
    drafted: int  # levels of the tree that the drafter drafts
    children: tuple[Int32Array, ...]  # of every pass of the drafter: see kernels/drafting/draft_sampling.py

    def first_row(self, number: int) -> int:
        """The number of a request's rows before those of a pass."""
        return sum(len(pass_rows.nodes) for pass_rows in self.passes[:number])

    def first_tile(self, number: int) -> int:
        return sum(pass_rows.tiles for pass_rows in self.passes[:number])


def plan_step(
    shape: DraftShape,
    target_height: int,
    catch_up_rows: int,
    draft_height: int,
    draft_levels: int | None = None,
    ends_before_root: bool = False,
    at_once: bool = False,
) -> StepPlan:
    """The plan of a step in which the drafter catches up on at most `catch_up_rows` tokens; 0: no drafter.

    draft_levels        levels of the tree that it drafts; None: all
    ends_before_root    catching up ends at the token before the root, not at the root
    at_once             one pass drafts all levels of a chain after the first
    """
    drafted = shape.levels if draft_levels is None else min(draft_levels, shape.levels)
    levels = [shape.inner(depth) for depth in range(1, drafted)]
    if at_once:
        assert shape.is_chain, "trees are drafted level by level"
        levels = [list(range(1, drafted))] if levels else []
    passes = [PassRows(range(len(shape)), target_height)]
    if catch_up_rows:
        passes.append(PassRows(range(catch_up_rows), draft_height))
        passes += [PassRows(nodes, draft_height) for nodes in levels]
    rows, tiles, paths = [], [], []
    row_first = tile_first = 0
    for number, pass_rows in enumerate(passes):
        before = passes[number - 1].nodes if number > 2 else []
        for local, node in enumerate(pass_rows.nodes):
            path = shape.path(node) if number != 1 else list(range(node + 1))
            kept = next((depth for depth, at in enumerate(path) if depth != at), len(path))
            source = list(before).index(shape.parents[node]) if number > 2 else -1
            tile = tile_first + local // pass_rows.height
            catches_up = 1 + ends_before_root if number == 1 else 0
            fields = (node, len(path) - 1, kept, catches_up, len(before), source, tile)
            rows.append((row_first, len(pass_rows.nodes), local, *fields))
            rest = path[kept:]
            paths.append(rest + [0] * (max(shape.levels, 1) - len(rest)))
        for local in range(pass_rows.tiles):
            tiles.append((tile_first, pass_rows.tiles, local, local * pass_rows.height, len(pass_rows.nodes)))
        row_first += len(pass_rows.nodes)
        tile_first += pass_rows.tiles
    plan = StepPlan(
        tuple(passes),
        np.array(rows, np.int32).T.copy(),
        np.array(tiles, np.int32).T.copy(),
        np.array(paths, np.int32),
        drafted if catch_up_rows else 0,
        (),
    )
    return replace(plan, children=tuple(_children(shape, plan)))


def _children(shape: DraftShape, plan: StepPlan) -> list[Int32Array]:
    """Where the tokens drafted by each pass go: [rows, most children, 2, 3]."""
    tables = []
    for number in range(1, len(plan.passes)):
        parents = [0] if number == 1 else list(plan.passes[number].nodes)
        table = np.full((len(parents), shape.most_children, 2, 3), -1, np.int32)
        following = plan.passes[number + 1] if number + 1 < len(plan.passes) else None
        for row, parent in enumerate(parents):
            for rank, child in enumerate(shape.children(parent)):
                table[row, rank, 0] = (0, len(shape), child)
                if following is not None and child in following.nodes:
                    at = list(following.nodes).index(child)
                    table[row, rank, 1] = (plan.first_row(number + 1), len(following.nodes), at)
        tables.append(table)
    return tables
