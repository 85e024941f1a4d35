"""A toy model whose logits are a hash of what it reads from its paged pool.

The toy stores, at every KV slot, the token and the position it was written for. The logits of a row are a
hash of its whole path, read back through the page table: one wrong page, stale slot, extra ancestor or missed
move changes the output. It also checks the contract of ForwardBatch as strictly as it can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.backends.base import Backend
from paceline.control.controller import Controller, FixedController
from paceline.core.arrays import Float32Array, Int32Array
from paceline.core.forward import Choices, ForwardBatch, ForwardOutput, KeptFeatures, KVPool, StatePool
from paceline.core.request import Request
from paceline.core.trees import DraftPlan
from paceline.core.truncation import KEEPS_ALL
from paceline.draft.base import Drafter
from paceline.engine.admission import Limits
from paceline.engine.engine import Engine
from tests.engines import new_engine
from tests.toy_decoder import ToyDecoder, reference_token
from tests.toy_logits import hashed_logits
from tests.toy_tokenizer import VOCAB, ToyTokenizer


class ToyPool:
    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.bytes_per_page = 8 * page_size
        self.tokens = np.full(num_pages * page_size, -7, dtype=np.int64)  # [KV slots]
        self.positions = np.full(num_pages * page_size, -7, dtype=np.int64)  # [KV slots]


class ToyBackend(Backend):
    """Implements Backend. `nan_after` makes logits NaN on paths that contain this token."""

    name = "toy"
    batch_invariant = True
    supports_features = True

    def __init__(
        self,
        page_size: int = 4,
        max_rows: int = 64,
        vocab: int = VOCAB,
        nan_after: int | None = None,
        chooses: bool = False,
        on_device: bool = False,
        supports_lookup: bool = True,
        supports_masks: bool = True,
    ) -> None:
        self.chooses = chooses or on_device
        self.supports_lookup, self.supports_masks = supports_lookup, supports_masks  # on the device
        self.on_device = on_device
        self.num_launched = 0  # passes that were launched on the device
        self.has_room = True  # on the device, for drafts that no one asked for
        self.num_masks = 0  # that were sent to it
        self.page_size = page_size
        self.max_rows = max_rows
        self.vocab = vocab
        self.nan_after = nan_after
        self.fail_next: Exception | None = None
        self.batches: list[tuple[int, int]] = []  # (requests, rows) of each pass
        self.contexts: list[list[int]] = []  # of the requests of each pass
        self.num_logits = self.num_chosen = 0  # rows that gave logits, and tokens
        self.moved = 0
        self._logits = np.empty((max_rows, vocab), dtype=np.float32)

    def make_pool(self, num_pages: int) -> ToyPool:
        return ToyPool(num_pages, self.page_size)

    def bytes_per_page(self) -> int:
        return 8 * self.page_size

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        self._check(batch)
        self.batches.append((batch.num_requests, batch.num_rows))
        self.contexts.append(batch.context_lengths.tolist())
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        pool = batch.pool
        assert isinstance(pool, ToyPool)
        kv_slots = [self._write(batch, pool, request) for request in range(batch.num_requests)]
        for output, row in enumerate(batch.logit_rows.tolist()):
            self._logits[output] = self._row_logits(batch, pool, kv_slots, row)
        self.num_logits += len(batch.logit_rows)
        features = None
        if batch.feature_layers:
            features = batch.tokens.astype(np.float32)[:, None].repeat(len(batch.feature_layers), axis=1)
        chosen = None if batch.choices is None else self._choose(batch, pool, kv_slots, batch.choices)
        return ForwardOutput(self._logits[: len(batch.logit_rows)], features, chosen)

    def begin(self, batch: ForwardBatch) -> Callable[[], ForwardOutput]:
        """The output is a copy: passes of the decoder in between do not overwrite it."""
        output = self.forward(batch)
        copied = replace(output, logits=output.logits.copy())
        return lambda: copied

    def _row_logits(
        self, batch: ForwardBatch, pool: ToyPool, kv_slots: Sequence[npt.NDArray[np.int64]], row: int
    ) -> Float32Array:
        """The logits [vocab] after a row, from its path in the pool."""
        request = int(np.searchsorted(batch.row_offsets, row, side="right")) - 1
        path = kv_slots[request][self._path(batch, request, row)]
        tokens = pool.tokens[path]
        if self.nan_after is not None and self.nan_after in tokens:
            return np.full(self.vocab, np.nan, dtype=np.float32)
        return self.logits_of(tokens, pool.positions[path])

    def _choose(
        self,
        batch: ForwardBatch,
        pool: ToyPool,
        kv_slots: Sequence[npt.NDArray[np.int64]],
        choices: Choices,
    ) -> Int32Array:
        """The tokens [choices] by the reference sampler."""
        assert self.chooses
        chosen = []
        for row, seed, temperature in zip(choices.rows, choices.seeds, choices.temperatures, strict=True):
            logits = self._row_logits(batch, pool, kv_slots, int(row))
            position = int(batch.positions[row]) + 1
            chosen.append(reference_token(logits, float(temperature), KEEPS_ALL, int(seed), position))
        self.num_chosen += len(chosen)
        return np.array(chosen, dtype=np.int32)

    def logits_of(self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> Float32Array:
        """Logits after a path: a function of all of it, and peaked enough that drafts can be right."""
        items = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(1_000_003) + positions.astype(np.uint64)
        return hashed_logits(items.tobytes(), self.vocab)

    def prepare(
        self,
        pool: KVPool,
        longest: int,
        feature_layers: tuple[int, ...],
        kept: tuple[KeptFeatures, ...] = (),
    ) -> None:
        self.prepared = (longest, feature_layers)

    def make_async_decoder(
        self,
        pool: KVPool,
        slots: int,
        longest: int,
        feature_layers: tuple[int, ...],
        kept: tuple[KeptFeatures, ...] = (),
        states: StatePool | None = None,
    ) -> ToyDecoder | None:
        assert isinstance(pool, ToyPool)
        return ToyDecoder(self, pool, slots, len(feature_layers)) if self.on_device else None

    def move(self, pool: KVPool, source: Int32Array, destination: Int32Array) -> None:
        assert isinstance(pool, ToyPool)
        assert (source != destination).all(), "a row that is in place must not be moved"
        pool.tokens[destination] = pool.tokens[source].copy()
        pool.positions[destination] = pool.positions[source].copy()
        self.moved += len(source)

    def _write(self, batch: ForwardBatch, pool: ToyPool, request: int) -> npt.NDArray[np.int64]:
        """The KV slots of all KV indices of a request, after storing its rows."""
        start, end = batch.row_offsets[request], batch.row_offsets[request + 1]
        length, size = int(batch.context_lengths[request] + end - start), self.page_size
        pages = batch.page_tables[request, : -(-length // size)].astype(np.int64)
        assert pages.min() >= 0, "an index without a page"
        assert pages.max() < pool.num_pages, "an index without a page"
        kv_slots: npt.NDArray[np.int64] = (pages[:, None] * size + np.arange(size)).ravel()[:length]
        written = kv_slots[batch.context_lengths[request] :]
        pool.tokens[written] = batch.tokens[start:end]
        pool.positions[written] = batch.positions[start:end]
        return kv_slots

    def _path(self, batch: ForwardBatch, request: int, row: int) -> npt.NDArray[np.int64]:
        """KV indices of a row's committed context, its ancestors and itself, in order."""
        start, end = int(batch.row_offsets[request]), int(batch.row_offsets[request + 1])
        context = int(batch.context_lengths[request])
        parents = batch.parents[start:end].tolist()
        ancestors = []
        local = row - start
        while local >= 0:
            ancestors.append(context + local)
            local = parents[local]
        path = np.arange(context + len(ancestors))
        if len(ancestors) != row - start + 1:  # else all rows up to this one: most paths are chains
            path[context:] = ancestors[::-1]
        return path

    def _check(self, batch: ForwardBatch) -> None:
        assert 0 < batch.num_rows <= self.max_rows
        for array in (batch.tokens, batch.positions, batch.parents, batch.row_offsets, batch.logit_rows):
            assert array.dtype == np.int32
            assert array.flags.c_contiguous
        assert batch.page_tables.dtype == np.int32
        assert batch.page_tables.flags.c_contiguous
        offsets, contexts = batch.row_offsets.tolist(), batch.context_lengths.tolist()
        logit_rows = batch.logit_rows.tolist()
        assert offsets[0] == 0
        assert offsets[-1] == batch.num_rows
        assert all(start < end for start, end in pairwise(offsets))
        assert all(row < after for row, after in pairwise(logit_rows))
        if batch.choices is not None:
            chosen_rows = batch.choices.rows.tolist()
            assert len(chosen_rows) > 0
            assert all(row < after for row, after in pairwise(chosen_rows))
            assert not set(chosen_rows) & set(logit_rows)
        assert batch.tokens.min() >= 0
        assert batch.tokens.max() < self.vocab
        positions, parents = batch.positions.tolist(), batch.parents.tolist()
        size, written = self.page_size, set[int]()
        for request, context in enumerate(contexts):
            start, end, first = offsets[request], offsets[request + 1], context // size
            pages = batch.page_tables[request, first : -(-(context + end - start) // size)].tolist()
            for local, parent in enumerate(parents[start:end]):
                assert -1 <= parent < local
                position = positions[start + parent] + 1 if parent >= 0 else context
                assert positions[start + local] == position
                page, place = divmod(context + local, size)
                written.add(pages[page - first] * size + place)
        assert len(written) == batch.num_rows, "two rows write to one KV slot"


def toy_engine(
    backend: ToyBackend | None = None,
    *,
    max_model_len: int = 256,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 64,
    num_pages: int = 400,
    num_window_pages: int | None = None,
    enable_prefix_caching: bool = True,
    drafter: Drafter | None = None,
    drafters: Sequence[Drafter] = (),
    budget: int = 0,
    branching: int = 2,
    seed: int = 0,
    controller: Controller | None = None,
    plans: Mapping[str, DraftPlan] | None = None,
) -> Engine:
    """An engine over the toy model, drafting `budget` nodes a step if a drafter is given alone."""
    backend = backend or ToyBackend(max_rows=max_num_batched_tokens)
    if drafter is not None and controller is None:
        controller = FixedController(DraftPlan(drafter.name, budget, branching))
    ticks = iter(range(10**9))
    return new_engine(
        backend,
        ToyTokenizer(),
        Limits(backend.vocab, max_model_len, max_num_seqs, max_num_batched_tokens),
        num_pages=num_pages,
        num_window_pages=num_window_pages,
        enable_prefix_caching=enable_prefix_caching,
        seed=seed,
        controller=controller,
        plans=plans,
        drafters={each.name: each for each in ([drafter] if drafter else drafters)},
        clock=lambda: float(next(ticks)),
    )


ENDLESS = 19_000  # tokens of an output in a roomy engine: more than any test waits for


def roomy_engine(backend: ToyBackend | None = None, max_num_seqs: int = 16) -> Engine:
    """A toy engine whose requests of ENDLESS tokens run until they are aborted."""
    return toy_engine(backend, max_model_len=20_000, num_pages=20_000, max_num_seqs=max_num_seqs)


def play(
    engine: Engine,
    events: Iterable[tuple[str, Any]],
    wanted: Sequence[Any],
    lose: Callable[[str], None] | None = None,
) -> list[tuple[Request, int]]:
    """Add requests by their number in `wanted`, abort some, make steps; the added ones with their numbers.

    `lose` gets the values of the events of this name. Free pages are filled with garbage, as by `drain`.
    """
    added: list[tuple[Request, int]] = []
    for event, value in events:
        if event == "add":
            added.append((engine.add_request(*wanted[value])[0], value))
        elif event == "lose" and lose:
            lose(value)
        elif event == "abort" and added:
            engine.abort(added[value % len(added)][0].request_id)
        elif event == "step":
            for _ in range(value):
                engine.step()
                scribble_free_pages(engine)
    return added


def drain(engine: Engine, scribble: bool = True) -> dict[Request, str]:
    """The streamed text of each request, after stepping until all have finished.

    Between steps every free page is filled with garbage: freed pages must never be read.
    """
    texts: dict[Request, str] = {}
    steps = 0
    while engine.has_unfinished:
        for delta in engine.step():
            text = delta.request.detokenizer.take()
            texts[delta.request] = texts.get(delta.request, "") + text
        if scribble:
            scribble_free_pages(engine)
        steps += 1
        assert steps < 20_000, "the engine makes no progress"
    return texts


def scribble_free_pages(engine: Engine) -> None:
    """Fill all free pages with garbage."""
    pool = engine._pool
    assert isinstance(pool, ToyPool)
    pages = np.array(engine.kv.pages.free_pages(), dtype=np.intp)
    for stored in (pool.tokens, pool.positions):
        stored.reshape(-1, engine.kv.page_size)[pages] = -999
