"""A request driven by hand through a backend, as the engine will do it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.backends.base import Backend
from paceline.core.forward import (
    Choices,
    ForwardBatch,
    ForwardOutput,
    KeptFeatures,
    KVPool,
    RequestStates,
    StatePool,
    chain_parents,
)


class Driven:
    """One request: its pages, how much of it is committed, and the rows it wants to run next."""

    def __init__(
        self,
        backend: Backend,
        pool: KVPool,
        pages: Sequence[int],
        states: StatePool | None = None,
        slot: int = 0,
    ) -> None:
        self.backend, self.pool = backend, pool
        self.states, self.slot = states, slot  # of recurrent layers
        self.adapter = ""
        self.pages = np.array(pages, dtype=np.int32)
        self.context_length = 0
        self.tokens: Sequence[int] = ()
        self.parents = np.zeros(0, dtype=np.int32)

    def ask(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> Driven:
        """Itself, with the rows of the next pass set; without parents they are a chain."""
        self.tokens = tokens
        self.parents = np.array(chain_parents([len(tokens)]) if parents is None else parents, dtype=np.int32)
        return self

    @property
    def positions(self) -> list[int]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return [self.context_length + depth for depth in depths]

    def place(self, index: int) -> int:
        size = self.backend.page_size
        return int(self.pages[index // size]) * size + index % size

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last pass, a path from the root, and forget the others."""
        source = [self.place(self.context_length + row) for row in rows]
        destination = [self.place(self.context_length + depth) for depth in range(len(rows))]
        self.backend.move(self.pool, np.array(source, np.int32), np.array(destination, np.int32))
        if self.states is not None:
            self.backend.advance_state(self.states, self.slot, list(rows), {})
        self.context_length += len(rows)

    def run(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> np.ndarray:
        """Logits [rows, vocab] of all rows, which are not committed."""
        return run([self.ask(tokens, parents)]).logits.copy()

    def extend(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits [rows, vocab] of a chain, which is committed."""
        logits = self.run(tokens)
        self.commit(range(len(tokens)))
        return logits


def drive(backend: Backend, pages_each: int, count: int = 1) -> list[Driven]:
    """Requests with `pages_each` pages each, scattered over one pool in no order."""
    pool = backend.make_pool(pages_each * count)
    pages = np.random.default_rng(5).permutation(pages_each * count).reshape(count, pages_each)
    states = backend.make_states(count) if backend.bytes_per_state else None
    return [Driven(backend, pool, row, states, slot) for slot, row in enumerate(pages)]


def run(
    requests: Sequence[Driven],
    logit_rows: Sequence[int] | None = None,
    feature_layers: tuple[int, ...] = (),
    choices: Choices | None = None,
    kept: tuple[KeptFeatures, ...] = (),
) -> ForwardOutput:
    """One pass over the rows all requests ask for; without `logit_rows`, logits of every row."""
    offsets = np.cumsum([0, *(len(request.tokens) for request in requests)], dtype=np.int32)
    wanted = range(offsets[-1]) if logit_rows is None else logit_rows
    states, slots = requests[0].states, np.array([request.slot for request in requests], np.int32)
    return requests[0].backend.forward(
        ForwardBatch(
            tokens=np.concatenate([request.tokens for request in requests]).astype(np.int32),
            positions=np.concatenate([request.positions for request in requests]).astype(np.int32),
            parents=np.concatenate([request.parents for request in requests]),
            row_offsets=offsets,
            context_lengths=np.array([request.context_length for request in requests], np.int32),
            page_tables=np.stack([request.pages for request in requests]),
            logit_rows=np.array(wanted, np.int32),
            pool=requests[0].pool,
            feature_layers=feature_layers,
            choices=choices,
            kept_features=kept,
            states=None if states is None else RequestStates(states, slots),
            adapters=tuple(request.adapter for request in requests),
        )
    )
