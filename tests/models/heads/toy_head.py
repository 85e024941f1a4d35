"""A head over the toy model that knows the target, as long as it is given the right features.

The toy's feature of a token is the token itself, and the state that the toy head feeds back is its
token. So along every path the state that a slot reads must be the token before it: one stale page,
one hole, one wrong state, and the toy head says so. If all is right, it guesses what the target says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paceline.backends.head_chains import chains_by_passes
from paceline.backends.heads import ChainNoise, HeadBatch, HeadChains, HeadOutput, HeadRunner
from paceline.core.trees import DraftPlan
from paceline.draft.base import DraftSampling
from paceline.draft.heads.eagle import Eagle3Drafter
from paceline.draft.heads.head_drafter import HeadShape, LoadedHead
from paceline.draft.model.vocabulary import trimmed_vocabulary
from paceline.engine.engine import Engine
from tests.engines import Later
from tests.toy import VOCAB, ToyBackend, scribble_free_pages


class ToyHeadPool:
    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.bytes_per_page = 16 * page_size
        self.slots = np.full((num_pages * page_size, 3), -7.0)  # [places] token, position, state


class ToyHeadRunner(HeadRunner):
    """A HeadRunner. `strict`: an unknown feature is an error and not a poor guess."""

    least_chance = 0.0

    def __init__(self, target: ToyBackend, ids: np.ndarray, max_rows: int = 128, strict: bool = True) -> None:
        self.page_size = target.page_size
        self.max_rows = max_rows
        self.strict = strict
        self.passes: list[tuple[int, bool]] = []  # rows, from_target
        self.poor = 0  # outputs along paths with an unknown feature
        self._target = target
        self._ids = ids

    def make_pool(self, num_pages: int) -> ToyHeadPool:
        return ToyHeadPool(num_pages, self.page_size)

    def bytes_per_page(self) -> int:
        return 16 * self.page_size

    def run(self, batch: HeadBatch) -> HeadOutput:
        rows = batch.rows
        self._target._check(_as_target_rows(rows))
        assert batch.states.shape == (rows.num_rows, 2 if batch.from_target else 1)
        assert (batch.states[:, 0] == batch.states[:, -1]).all()
        self.passes.append((rows.num_rows, batch.from_target))
        places = [self._write(batch, request) for request in range(rows.num_requests)]
        owners = np.searchsorted(rows.row_offsets, rows.logit_rows, side="right") - 1
        logits = []
        for row, request in zip(rows.logit_rows.tolist(), owners.tolist(), strict=True):
            path = self._target._path(rows, request, row)[1:]
            logits.append(self._logits(rows.pool.slots[places[request][path]]))
        states = rows.tokens[rows.logit_rows].astype(np.float32)[:, None]
        return HeadOutput(np.array(logits, dtype=np.float32).reshape(-1, len(self._ids)), states)

    def run_chains(
        self, batch: HeadBatch, most: Sequence[int], least_chance: float, noise: ChainNoise | None = None
    ) -> HeadChains:
        return chains_by_passes(self.run, batch, self._ids, most, least_chance, noise)

    def _write(self, batch: HeadBatch, request: int) -> np.ndarray:
        rows = batch.rows
        start, end = rows.row_offsets[request], rows.row_offsets[request + 1]
        context = rows.context_lengths[request]
        indices = np.arange(context + end - start)
        places = rows.page_tables[request][indices // self.page_size] * self.page_size
        places += (indices % self.page_size).astype(np.int32)
        columns = (rows.tokens[start:end], rows.positions[start:end], batch.states[start:end, 0])
        rows.pool.slots[places[context:]] = np.stack(columns, axis=1)
        return places

    def _logits(self, path: np.ndarray) -> np.ndarray:
        tokens, positions, states = path.T.astype(np.int64)
        assert (positions == np.arange(len(path))).all()
        known = np.array([states[0], *tokens])
        unknown = (states == 0) & (known[:-1] != 0)
        unknown[0] = states[0] == 0  # no prompt of these tests begins with token 0
        assert ((states == known[:-1]) | unknown).all(), "a wrong state"
        assert not (self.strict and unknown.any()), "an unknown feature"
        self.poor += bool(unknown.any())
        return self._target.logits_of(known, np.arange(len(known)))[self._ids]


def _as_target_rows(rows):
    """The rows with positions as the target's, so that its checks apply: one more."""
    return replace(rows, positions=rows.positions + 1)


def toy_eagle(
    target: ToyBackend | None = None,
    sampling: DraftSampling = DraftSampling.COUPLED,
    *,
    ids: Sequence[int] = range(VOCAB),
    longest: int = 256,
    strict: bool = True,
) -> Later:
    """A drafter with the toy head; `ids` are what it can guess."""
    own = np.array(ids, dtype=np.int32)
    vocabulary = trimmed_vocabulary(own, VOCAB)
    runner = ToyHeadRunner(target or ToyBackend(max_rows=128), own, strict=strict)
    # two features, and not in the engine's order
    return Later(
        Eagle3Drafter.unbound(LoadedHead(runner, HeadShape((2, 1), 2, vocabulary, longest), sampling))
    )


def chain(budget: int) -> DraftPlan:
    return DraftPlan("eagle3", budget)


def tree(budget: int, branching: int, depth: int | None = None) -> DraftPlan:
    return DraftPlan("eagle3", budget, branching, depth)


def drain(engine: Engine, drafter: Later) -> None:
    """Step until all is done. Between steps, free pages of both pools are filled with rubbish."""
    while engine.has_unfinished:
        engine.step()
        scribble_free_pages(engine)
        for page in engine.kv.pages.free_pages():
            drafter._pages.pool.slots[page * engine.kv.page_size : (page + 1) * engine.kv.page_size] = -999
