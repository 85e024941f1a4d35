"""The drafts of a batch that give most tokens per second, by what is known of costs and chances.

Nodes of all requests compete: they are taken in the order of the tokens that they bring for a row, and
every stop on the way, the first of which is to draft nothing, is priced as a whole step. So a row that fills
a tile is taken where one that begins another is not, and more requests leave less room for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.control.cost import DraftCosts, Float64Array, StepCosts


@dataclass(frozen=True, slots=True)
class Batch:
    """A step before anything is drafted."""

    tokens: float  # that it gives
    rows: float  # that it has
    keys: float  # that a row reads, on average


@dataclass(frozen=True, slots=True)
class Prospect:
    """What one drafter can do for the requests of a batch."""

    tokens: Float64Array  # [requests, depth] that a level of a draft adds
    rows: Float64Array  # [requests, depth] that it takes; below 1 where drafts often end before


@dataclass(frozen=True, slots=True)
class Choice:
    """A length for each request, and what is expected of the step."""

    drafters: tuple[str, ...]  # [requests] who drafts, where the length is not 0
    lengths: tuple[int, ...]  # [requests]
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def choose(
    batch: Batch, prospects: Mapping[str, Prospect], steps: StepCosts, drafts: DraftCosts
) -> tuple[Choice, Choice]:
    """The best choice that was found, and plain decoding.

    Tried are each drafter for all requests, and each request with the drafter that seems best for it at the
    price that a row then has.
    """
    count = len(next(iter(prospects.values())).tokens)
    seconds = float(steps.seconds(batch.rows, batch.keys))
    plain = Choice(("",) * count, (0,) * count, batch.tokens, seconds)
    best = plain
    for name, prospect in prospects.items():
        if count == 1:
            best = _better(best, _alone(name, prospect, batch, steps, drafts))
        else:
            best = _better(best, _along((name,) * count, batch, prospects, steps, drafts))
    if len(prospects) > 1 and count > 1:
        each = _drafter_of_each(best, batch, prospects, steps, drafts)
        if len(set(each)) > 1:
            best = _better(best, _along(each, batch, prospects, steps, drafts))
    return best, plain


def priced(
    lengths: Sequence[tuple[str, int]],
    batch: Batch,
    prospects: Mapping[str, Prospect],
    steps: StepCosts,
    drafts: DraftCosts,
) -> Choice:
    """What is expected of a step in which each request has this drafter and length."""
    tokens, rows, seconds = batch.tokens, batch.rows, 0.0
    for name, prospect in prospects.items():
        own = [(index, length) for index, (who, length) in enumerate(lengths) if who == name and length]
        if own:
            nodes = [float(prospect.rows[index, :length].sum()) for index, length in own]
            tokens += sum(float(prospect.tokens[index, :length].sum()) for index, length in own)
            rows += sum(nodes)
            seconds += float(drafts.seconds(name, len(own), max(nodes), sum(nodes)))
    seconds += float(steps.seconds(rows, batch.keys))
    names, sizes_of = zip(*lengths, strict=True)
    return Choice(names, sizes_of, tokens, seconds)


def _better(first: Choice, second: Choice) -> Choice:
    return second if second.rate > first.rate else first


def _alone(name: str, prospect: Prospect, batch: Batch, steps: StepCosts, drafts: DraftCosts) -> Choice:
    """The best length of a lone request's draft: what `_along` finds, with less ado."""
    rows = np.cumsum(prospect.rows[0])
    expected = batch.tokens + np.cumsum(prospect.tokens[0])
    seconds = steps.seconds(batch.rows + rows, batch.keys) + drafts.seconds(name, 1, rows, rows)
    stop = int(np.argmax(expected / seconds))
    return Choice((name,), (stop + 1,), float(expected[stop]), float(seconds[stop]))


def _along(
    who: Sequence[str],
    batch: Batch,
    prospects: Mapping[str, Prospect],
    steps: StepCosts,
    drafts: DraftCosts,
) -> Choice:
    """The best stop on the ways from no node to all nodes, when these drafters draft.

    There is a way for each depth that drafts may have: a level can cost a drafter a pass for all requests.
    """
    tokens = np.stack([prospects[name].tokens[line] for line, name in enumerate(who)])
    rows = np.stack([prospects[name].rows[line] for line, name in enumerate(who)])
    count, depth = tokens.shape
    # a node may not come before its parent, so it counts for no more than that
    worth = np.minimum.accumulate(tokens / np.maximum(rows, 1e-9), axis=1)
    order = np.argsort(-worth, axis=None, kind="stable")
    line, level = np.divmod(order, depth)
    taken = level <= np.arange(depth)[:, None]  # [ways, nodes]
    added = rows.ravel()[order] * taken
    reached = np.cumsum(rows, axis=1).ravel()[order] * taken  # levels that the node's request then has
    seconds = steps.seconds(batch.rows + np.cumsum(added, axis=1), batch.keys)
    for name in set(who):
        own = np.array([drafter == name for drafter in who])[line] * taken
        requests = np.cumsum(own & (level == 0), axis=1)
        levels = np.maximum.accumulate(reached * own, axis=1)
        seconds = seconds + drafts.seconds(name, requests, levels, np.cumsum(added * own, axis=1))
    expected = batch.tokens + np.cumsum(tokens.ravel()[order] * taken, axis=1)
    way, stop = np.unravel_index(int(np.argmax(expected / seconds)), expected.shape)
    nodes = line[: stop + 1][taken[way, : stop + 1]]
    lengths = np.bincount(nodes, minlength=count)
    return Choice(tuple(who), tuple(lengths.tolist()), float(expected[way, stop]), float(seconds[way, stop]))


def _drafter_of_each(
    best: Choice, batch: Batch, prospects: Mapping[str, Prospect], steps: StepCosts, drafts: DraftCosts
) -> list[str]:
    """For each request the drafter whose nodes are worth most at what a row and a draft cost now."""
    count = len(best.lengths)
    rows = batch.rows + sum(best.lengths)
    near = steps.seconds(np.array([rows, rows + 4.0]), batch.keys)
    row = float(near[1] - near[0]) / 4.0
    worth = []
    for name, prospect in prospects.items():
        _, request, level, node = drafts.prices(name)
        seconds = request + (row + node + level / count) * np.cumsum(prospect.rows, axis=1)
        worth.append((np.cumsum(prospect.tokens, axis=1) - best.rate * seconds).max(axis=1))
    names = list(prospects)
    return [names[index] for index in np.argmax(np.stack(worth), axis=0)]
