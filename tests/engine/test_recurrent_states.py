"""Recurrent layers in the engine: whatever happens to a request, a pass begins with the right state.

The toy's state is a hash of the tokens in order. Before every pass it is compared with the hash of the
committed tokens, which are read back from the pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from paceline.core.forward import ForwardBatch, ForwardOutput, StatePool
from paceline.core.params import SamplingParams
from paceline.kv import states
from tests.engine.test_exactness import prompt, requests, result, together
from tests.toy import ToyBackend, ToyPool, drain, toy_engine
from tests.toy_decoder import ToyDecoder
from tests.toy_drafter import ScriptedDrafter


class ToyStates:
    def __init__(self, count: int) -> None:
        self.num_states = count
        self.hashes: list[int | None] = [None] * count
        self.rows: dict[int, tuple[list[int], list[int]]] = {}  # of the last pass, by slot: tokens, parents


class RecurrentToy(ToyBackend):
    """A ToyBackend with a recurrent layer."""

    bytes_per_state = 8

    def make_states(self, count: int) -> ToyStates:
        return ToyStates(count)

    def copy_state(self, states: StatePool, source: int, destination: int) -> None:
        assert isinstance(states, ToyStates)
        assert states.hashes[source] is not None
        states.hashes[destination] = states.hashes[source]

    def advance_state(
        self, states: StatePool, slot: int, rows: Sequence[int], checkpoints: Mapping[int, int]
    ) -> None:
        assert isinstance(states, ToyStates)
        tokens, parents = states.rows[slot]
        state, parent = states.hashes[slot], -1
        for count, row in enumerate(rows, start=1):
            assert parents[row] == parent, "not a path"
            state, parent = hash((state, tokens[row])), row
            if count in checkpoints:
                states.hashes[checkpoints[count]] = state
        states.hashes[slot] = state

    def make_async_decoder(self, pool, slots, longest, feature_layers, kept=(), states=None):  # type: ignore[no-untyped-def]
        return RecurrentDecoder(self, pool, slots, states) if self.on_device else None

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        if batch.states is None:  # of a device pass, whose buffers are its own
            return super().forward(batch)
        pool = batch.states.pool
        assert isinstance(pool, ToyStates)
        pool.rows = {}
        output = super().forward(batch)
        for request, slot in enumerate(batch.states.slots.tolist()):
            begin, end = batch.row_offsets[request : request + 2].tolist()
            if not batch.context_lengths[request]:
                pool.hashes[slot] = None
            assert pool.hashes[slot] == self._hash_of_context(batch, request)
            pool.rows[slot] = (batch.tokens[begin:end].tolist(), batch.parents[begin:end].tolist())
        return output

    def _hash_of_context(self, batch: ForwardBatch, request: int) -> int | None:
        assert isinstance(batch.pool, ToyPool)
        state = None
        for index in range(batch.context_lengths[request]):
            page = batch.page_tables[request][index // self.page_size]
            token = int(batch.pool.tokens[page * self.page_size + index % self.page_size])
            state = hash((state, token))
        return state


class RecurrentDecoder(ToyDecoder):
    """A ToyDecoder whose passes advance the states of their slots."""

    def __init__(self, backend: RecurrentToy, pool: ToyPool, slots: int, states: ToyStates) -> None:
        super().__init__(backend, pool, slots, 0)
        self._states = states

    def _pass(self, slots, page_tables, level):  # type: ignore[no-untyped-def]
        size = self._backend.page_size
        for slot in slots:
            if page_tables is None:  # the pass waited for masks: its pages may be others' now
                self._states.hashes[slot] = hash((self._states.hashes[slot], int(self._tokens[slot])))
                continue
            expected = None
            for index in range(self._lengths[slot]):
                place = self._page(slot, index, page_tables) * size + index % size
                expected = hash((expected, int(self._pool.tokens[place])))
            assert self._states.hashes[slot] == expected
            self._states.hashes[slot] = hash((expected, int(self._tokens[slot])))
        return super()._pass(slots, page_tables, level)


@pytest.mark.parametrize(
    ("style", "on_device"), [("partly", False), ("tree", False), ("partly", True), ("", True)]
)
@pytest.mark.parametrize("num_pages", [26, 200])
def test_chunks_drafts_preemptions_and_prefix_hits(alone, style, num_pages, on_device, monkeypatch):
    monkeypatch.setattr(states, "MAX_CHECKPOINTS", 4 * num_pages)
    truth = {tuple(ids): alone[number][0] for number, (ids, _) in enumerate(requests())}
    engine = toy_engine(
        RecurrentToy(max_rows=17, on_device=on_device),
        drafter=ScriptedDrafter(truth, style) if style else None,
        budget=6,
        branching=1 if on_device else 2,
        num_pages=num_pages,
        max_model_len=100,
        max_num_seqs=7,
        max_num_batched_tokens=17,
    )
    for _ in range(2):
        assert [result(request) for request in together(engine)] == alone
    assert bool(engine.backend.num_launched) == on_device
    assert engine.scheduler.num_preemptions > 0 or num_pages > 26
    assert engine.kv.prefix_hits > 0 or num_pages == 26


def test_a_prefix_is_used_again_up_to_its_last_checkpoint():
    engine = toy_engine(RecurrentToy())

    def cached(tokens, max_tokens=1):
        (request,) = engine.add_request(tokens, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        drain(engine)
        return request.num_cached_tokens, request.token_ids

    common, chat = prompt(1, 18), prompt(2, 30)  # pages have four tokens
    assert cached([*common, *prompt(3, 30)])[0] == 0
    assert cached([*common, *prompt(4, 30)])[0] == 0  # four pages are there, the state after them is not
    assert cached([*common, *prompt(5, 30)])[0] == 16  # but it was stored when it was known to be shared
    first, answered = cached(chat, max_tokens=14)
    assert first == 0
    assert cached([*answered, 2, 3])[0] == 40  # the next turn: 43 tokens of the first one were computed
    assert cached(chat)[0] == 28  # and the same prompt once more


def test_checkpoints_are_few_and_the_least_recently_used_is_replaced(monkeypatch):
    monkeypatch.setattr(states, "MAX_CHECKPOINTS", 2)
    engine = toy_engine(RecurrentToy())
    found = []
    for number in (1, 2, 1, 3, 1, 2):  # prompts
        (request,) = engine.add_request(prompt(number, 21), SamplingParams(max_tokens=1))
        drain(engine)
        found.append(request.num_cached_tokens)
    assert found == [0, 0, 20, 0, 20, 0]


def test_children_of_n_share_the_prompt():
    engine = toy_engine(RecurrentToy())
    children = engine.add_request(prompt(3, 21), SamplingParams(n=3, seed=11, max_tokens=12))
    drain(engine)
    assert [child.num_cached_tokens for child in children] == [0, 20, 20]
    assert len({tuple(child.output_token_ids) for child in children}) == 3


def test_a_failed_pass_changes_no_state(alone):
    engine = toy_engine(RecurrentToy())
    (first,) = engine.add_request(prompt(50, 30), SamplingParams(max_tokens=50))
    engine.step()
    engine.backend.fail_next = RuntimeError("a pass that is lost")
    engine.step()
    assert first.finish_reason == "error"
    assert [result(request) for request in together(engine)] == alone
