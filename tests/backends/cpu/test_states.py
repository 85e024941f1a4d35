"""States stored by a pass have the bits of states that are scanned again."""

from __future__ import annotations

import pytest

from paceline.backends.cpu import CpuBackend
from paceline.backends.cpu import job as fields
from paceline.backends.cpu.states import SPARE_STATES, CpuStates, RecurrentRows
from paceline.kv.states import count_checkpoints, states_memory
from tests.backends.cpu.checkpoints import RECURRENCES, recurrent_checkpoint
from tests.backends.driver import Driven, drive, run

CONTEXT, CHUNK = 9, 30  # the chunk ends 7 rows after a page border
BORDER = 32 - CONTEXT
TREE = [-1, 0, 0, 1, 2, 4]


@pytest.fixture(params=RECURRENCES)
def backend(request):
    backend = CpuBackend.load(
        recurrent_checkpoint(request.param), quantization="int8", threads=2, max_rows=120
    )
    yield backend
    backend.close()


def state_of(request: Driven, slot: int) -> bytes:
    """The state of a slot, without what is behind the last columns of a head, which nothing reads."""
    states, own = request.states, request.backend.config.recurrent
    assert isinstance(states, CpuStates)
    state = states.data[states.places[slot]]
    memory = own.value_heads * -(-own.value_dim // 16) * 16 * own.key_dim
    seen = state[:, : state.shape[1] - memory]
    if not memory:
        return seen.tobytes()
    heads = state[:, seen.shape[1] :].reshape(len(state), own.value_heads, -1, own.key_dim, 16)
    columns = heads.swapaxes(3, 4).reshape(len(state), own.value_heads, -1, own.key_dim)
    return seen.tobytes() + columns[:, :, : own.value_dim].tobytes()


def commit(request: Driven, count: int, kept: dict[int, int]) -> list[bytes]:
    """The states of a request and of the slots that are kept, after `count` rows of a chunk."""
    request.extend(range(CONTEXT))
    request.run(range(20, 20 + CHUNK))
    request.backend.advance_state(request.states, request.slot, range(count), kept)
    return [state_of(request, slot) for slot in (request.slot, *kept.values())]


@pytest.mark.parametrize(
    ("count", "kept", "is_stored"),
    [
        (CHUNK, {}, True),
        (CHUNK, {BORDER: 1}, True),
        (CHUNK, {CHUNK: 1}, True),
        (BORDER, {}, True),
        (CHUNK, {BORDER - 16: 1, BORDER: 2}, False),
        (5, {}, False),
    ],
)
def test_stored_states_have_the_bits_of_a_second_scan(backend, monkeypatch, count, kept, is_stored):
    taken, take_stored = [], RecurrentRows.take_stored

    def noted(*arguments):
        taken.append(take_stored(*arguments))
        return taken[-1]

    monkeypatch.setattr(RecurrentRows, "take_stored", noted)
    found = commit(drive(backend, 4, count=3)[0], count, kept)
    assert taken == [True, is_stored]
    monkeypatch.setattr(RecurrentRows, "take_stored", lambda *_: False)
    expected = commit(drive(backend, 4, count=3)[0], count, kept)
    for got, want in zip(found, expected, strict=True):
        assert got == want
        assert any(want)


def test_all_states_and_kept_rows_are_counted(backend):
    """The system gives memory when it is touched: what is not counted would be given away to KV pages."""
    states = backend.make_states(5)
    counted = states_memory(backend.bytes_per_state, 5, backend.spare_states)
    assert (
        states.data.nbytes == counted - count_checkpoints(backend.bytes_per_state) * backend.bytes_per_state
    )
    job, layers = backend.workspace.job, len(backend.config.recurrent_layers)
    assert backend.buffer_bytes > layers * backend.max_rows * job[fields.KEPT_STRIDE]


def test_spare_places_are_released_after_any_outcome_of_a_pass(backend):
    first, *others = drive(backend, 4, count=SPARE_STATES + 4)
    states = first.states
    assert isinstance(states, CpuStates)
    everywhere = {*range(len(states.data))}
    for round_number in range(3):
        asked = [request.ask([3, 4, 5][: 1 + request.slot % 3]) for request in (first, *others)]
        asked[2].ask([1, 2, 3, 4, 5, 6], TREE)
        run(asked)
        for request in asked[: 8 * round_number]:
            backend.advance_state(states, request.slot, [0], {})
        for request in asked[: 8 * round_number]:
            request.context_length += 1
    run([first.ask([1], [-1])])
    assert len(states.spares) >= SPARE_STATES - 1
    assert {*states.places.tolist()} | {*states.spares} <= everywhere
    assert len({*states.places.tolist(), *states.spares}) == len(states.places) + len(states.spares)
