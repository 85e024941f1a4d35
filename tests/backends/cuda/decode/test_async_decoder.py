"""The decoder of the cuda backend: what the host says reaches the device before the pass that needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from paceline.backends.async_decoding import DeviceDraft, SlotInits
from paceline.core.forward import WindowGroup
from paceline.core.logit_edits import LogitEdits
from paceline.core.params import SamplingParams
from paceline.core.request import UNLIMITED, SamplingNeeds
from paceline.core.sampling import SamplingState
from paceline.core.truncation import Truncation
from paceline.verify.logprobs import NUM_FIELDS
from tests.tiny_families import VOCAB_SIZE

PAGE, SLOTS, LONGEST = 4, 6, 32
CPU = torch.device("cpu")


class Recording:
    """In place of the decode loop: a step's token is the page that its row writes to."""

    def __init__(
        self, weights: object, requests: object, rows: int, width: int, nodes: int, host_drafts: int
    ) -> None:
        from paceline.backends.cuda.kernels.sampling.token_masks import row_masks

        self.weights, self.requests, self.features = weights, requests, torch.zeros(rows, 3)
        is_tree = nodes > width
        self.results = torch.full((rows * (2 + width * (1 + is_tree)),), -7, dtype=torch.int32)
        self.counts, self.found = self.results[: 2 * rows].view(2, rows)
        self.output = self.results[-rows * width :].view(rows, width)
        if is_tree:
            accepted = self.results[2 * rows : -rows * width]
            accepted.copy_(torch.arange(rows * width))
        self.host_drafts = torch.full((rows, 1 + host_drafts), -1, dtype=torch.int32) if host_drafts else None
        self.nodes, self.shared = nodes, list[object]()
        self.begun: list[list[int]] = []
        self.logprobs = torch.full((rows, width, NUM_FIELDS), -7, dtype=torch.float64)
        self.needs: list[int] = []
        self.parts: list[str] = []  # of steps with masks
        self.parents = tuple(range(-1, nodes - 1))
        self.masks = row_masks(rows * nodes, VOCAB_SIZE, CPU)
        self.rows = torch.arange(rows * nodes, dtype=torch.int32).view(rows, nodes)
        self.has_adapters: list[bool] = []
        self.edits: object = None
        self.raw_logits = torch.empty(0)

    def begin(self, slots: Sequence[int], rows: int) -> None:
        assert rows >= len(slots)
        self.begun.append(list(slots))

    def path_logprobs(self, rows: int) -> torch.Tensor:
        return self.logprobs[:rows]

    def use_shared_prefix(self, shared_prefix: object) -> None:
        self.shared.append(shared_prefix)

    def drafted(self, rows: int) -> torch.Tensor:
        return self.rows[:rows] + 100 * len(self.parts)

    def start_draft(self, rows: int) -> None:
        self.parts.append("draft")

    def start_logits(self, rows: int, has_adapters: bool = False) -> None:
        self.parts.append("logits")
        self.has_adapters.append(has_adapters)

    def finish(self, rows: int, needs: int, edits: object = None) -> None:
        self.parts.append("finish")
        self.step(rows, needs, edits)
        self.has_adapters.pop()

    def step(self, rows: int, needs: int = 0, edits: object = None, has_adapters: bool = False) -> None:
        self.needs.append(needs)
        self.has_adapters.append(has_adapters)
        self.edits = edits
        state = self.requests
        for row, slot in enumerate(self.begun[-1]):
            self.output[row, 0] = state.pages[slot, state.lengths[slot] // PAGE]  # type: ignore[attr-defined]
            state.lengths[slot] += 1  # type: ignore[attr-defined]
            self.counts[row] = 1
            self.features[row] = slot


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """The decode loops, as they are made."""
    from paceline.backends.cuda.decode import draft_loops

    made: list[Recording] = []

    def loop(
        weights,
        pool,
        state,
        rows,
        size,
        network,
        given,
        feature_layers,
        kept,
        look_up,
        host_drafts,
        draft_levels,
        states,
        raw_logits,
    ):  # type: ignore[no-untyped-def]
        made.append(Recording(weights, state, rows, 1 + given.levels, len(given), host_drafts))
        made[-1].raw_logits = raw_logits
        return made[-1]

    monkeypatch.setattr(draft_loops, "DecodeLoop", loop)
    return made


def make_decoder(device: torch.device = CPU, pool: object = SimpleNamespace(windows=None)):  # type: ignore[no-untyped-def]
    from paceline.backends.cuda.decode.async_decoder import CudaAsyncDecoder

    config = SimpleNamespace(num_heads=4, num_kv_heads=2, vocab_size=VOCAB_SIZE, latent=None)
    sizes = {"config": config, "head_groups": (4, 2), "adapters": {"chat": 0, "sql": 1}}
    weights = type("Weights", (), {"device": device, **sizes})
    return CudaAsyncDecoder(weights, pool, SLOTS, LONGEST, PAGE, (1,))  # type: ignore[arg-type]


@pytest.fixture
def decoder(loops):  # type: ignore[no-untyped-def]
    return make_decoder()


def head_draft(length: int) -> DeviceDraft:
    return DeviceDraft(length, SimpleNamespace(network=lambda *sizes: None), SimpleNamespace(), (0, 1, 2))  # type: ignore[arg-type]


def test_a_tree_has_pages_for_all_of_its_nodes(decoder, loops) -> None:  # type: ignore[no-untyped-def]
    """Seven rows of this pass and of the next, though a request gets three tokens at most."""
    tables = np.arange(SLOTS * LONGEST // PAGE, dtype=np.int32).reshape(SLOTS, -1)
    decoder.join(joining([1], [2]))
    decoder.launch([1], tables, replace(head_draft(2), branching=2, nodes=6))
    assert (loops[0].nodes, loops[0].output.shape[1]) == (7, 3)
    last = (2 + 2 * 7) // PAGE
    assert loops[0].requests.pages[1, : last + 1].tolist() == tables[1, : last + 1].tolist()  # type: ignore[attr-defined]


@pytest.mark.parametrize("slots", [[1], [0, 2, 5]])
def test_the_result_of_a_tree_has_the_nodes_of_accepted_paths(decoder, loops, slots) -> None:  # type: ignore[no-untyped-def]
    tables = np.arange(SLOTS * LONGEST // PAGE, dtype=np.int32).reshape(SLOTS, -1)
    decoder.join(joining(slots, [2] * len(slots)))
    decoder.launch(slots, tables, replace(head_draft(2), branching=2, nodes=6))
    output = decoder.read()
    assert output.nodes.tolist() == [[3 * row, 3 * row + 1, 3 * row + 2] for row in range(len(slots))]
    assert output.tokens[:, 0].tolist() == tables[slots, 0].tolist()
    assert output.counts.tolist() == [1] * len(slots)
    decoder.launch(slots, tables, head_draft(2))
    assert decoder.read().nodes is None


def biased() -> LogitEdits:
    return SamplingState(SamplingParams(logit_bias={7: 2.0}), 0, (), ()).logit_edits()


def joining(slots: Sequence[int], lengths: Sequence[int], masked: Sequence[int] = ()) -> SlotInits:
    return SlotInits(
        slots=np.array(slots, dtype=np.int32),
        tokens=np.array([[slot + 40, slot + 50] for slot in slots], dtype=np.int32),
        lengths=np.array(lengths, dtype=np.int32),
        limits=np.array(lengths, dtype=np.int32) + 20,
        seeds=np.array(slots, dtype=np.uint64) + np.uint64(2**63),
        temperatures=np.array(slots) / 10,
        most_drafted=np.array([slot if slot != 5 else 0 for slot in slots], dtype=np.int32),
        truncation=np.array([Truncation(top_k=5 if slot == 3 else 0) for slot in slots], dtype=np.float64),
        logprobs=np.array([slot == 5 for slot in slots]),
        masked=np.array([slot in masked for slot in slots]),
        edits=[biased() if slot == 0 else None for slot in slots],
        adapters=["sql" if slot == 4 else "" for slot in slots],
    )


def test_changed_pages_are_sent_before_the_next_pass(decoder, loops) -> None:  # type: ignore[no-untyped-def]
    tables = np.full((SLOTS, LONGEST // PAGE), -1, dtype=np.int32)
    tables[[1, 4], :2] = [[10, 11], [20, 21]]
    decoder.join(joining([1, 4], [2, 6]))
    expected = []
    for step in range(10):
        for slot, length in ((1, 2 + step), (4, 6 + step)):
            tables[slot, length // PAGE] = (
                30 + 10 * slot + step // 3
            )  # as good as any: also pages in use change
        decoder.launch([1, 4], tables, None)
        expected.append([int(tables[1, (2 + step) // PAGE]), int(tables[4, (6 + step) // PAGE])])
        if step:
            assert decoder.read().tokens[:, 0].tolist() == expected[step - 1]  # the one before the last
    assert decoder.read().tokens[:, 0].tolist() == expected[-1]
    assert loops[0].begun == [[1, 4]]


def test_a_page_that_was_released_and_taken_again_is_sent_with_its_new_window_page(loops) -> None:  # type: ignore[no-untyped-def]
    """The page table is the same, so that its changes do not tell."""
    windows = WindowGroup(20, np.zeros(60, dtype=np.int32))
    decoder = make_decoder(pool=SimpleNamespace(num_pages=60, windows=windows))
    tables = np.full((SLOTS, LONGEST // PAGE), -1, dtype=np.int32)
    tables[1, :3], windows.table[[10, 11, 12]] = [10, 11, 12], [3, 4, 5]
    decoder.join(joining([1], [6]))
    decoder.launch([1], tables, None)
    sent = decoder._requests.window_pages
    assert sent[1, :3].tolist() == [3, 4, 5]
    windows.table[[10, 12]] = 0, 7  # one left the window, one was rejected and taken again
    decoder.launch([1], tables, None)
    assert sent[1, 1:3].tolist() == [4, 7]
    for _ in range(2):
        decoder.read()
    windows.table[[10, 11, 12]] = [8, 9, 6]  # another request with the same pages
    decoder.join(joining([1], [6]))
    decoder.launch([1], tables, None)
    assert sent[1, :3].tolist() == [8, 9, 6]
    assert decoder._requests.pages[1, :3].tolist() == [10, 11, 12]


def test_a_request_that_leaves_and_one_that_joins_begin_the_rows_anew(decoder, loops) -> None:  # type: ignore[no-untyped-def]
    tables = np.arange(SLOTS * LONGEST // PAGE, dtype=np.int32).reshape(SLOTS, -1)
    decoder.join(joining([0, 1, 2], [3, 3, 3]))
    decoder.launch([0, 1, 2], tables, None)
    decoder.launch([0, 2], tables, None)
    decoder.join(joining([5], [7]))
    decoder.launch([0, 2, 5], tables, None)
    assert loops[0].begun == [[0, 1, 2], [0, 2], [0, 2, 5]]
    assert [decoder.read().features[:, 0].tolist() for _ in range(3)] == [[0, 1, 2], [0, 2], [0, 2, 5]]
    state = decoder._requests
    assert state.tokens[5, 6:8].tolist() == [45, 55]
    assert state.limits[5] == 27
    assert state.most_drafted.tolist() == [0, 1, 2, UNLIMITED, UNLIMITED, 0]
    assert state.lengths.tolist() == [6, 4, 6, 0, 0, 8]
    assert state.seeds[5].item() == 5 - 2**63
    assert state.temperatures[5] == 0.5


def test_passes_are_timed_over_requests_with_a_context_and_later_ones_do_not_see_them(  # type: ignore[no-untyped-def]
    decoder, loops, monkeypatch
) -> None:
    from paceline.backends.cuda.decode import loop_timing

    timed: list[tuple[list[int], list[int]]] = []

    def run_once(device: torch.device, run: Callable[[], None]) -> float:
        slots, state = loops[0].begun[-1], loops[0].requests
        run()
        timed.append((state.lengths[slots].tolist(), loops[0].output[: len(slots), 0].tolist()))
        return 1e-3 * len(slots)

    monkeypatch.setattr(loop_timing, "device_seconds", run_once)
    prepared = make_decoder(pool=SimpleNamespace(num_pages=45, windows=None))
    assert prepared.prepare(None) == {1: 1e-3, 2: 2e-3, 4: 4e-3, 8: 6e-3}
    # half of the longest context, and a token more; pages of their own, but for the last slot's
    assert timed[-1] == ([LONGEST // 2 + 1] * SLOTS, [4, 12, 20, 28, 36, 44])
    assert loops[0].begun[-1] == []
    tables = np.full((SLOTS, LONGEST // PAGE), 7, dtype=np.int32)
    outputs = []
    for each in (prepared, decoder):
        each.join(joining([5, 1], [2, 6]))
        each.launch([5, 1], tables, None)
        outputs.append(each.read())
    assert outputs[0].tokens.tolist() == outputs[1].tokens.tolist() == [[7], [7]]
    assert prepared._requests.most_drafted[[5, 1]].tolist() == [0, 1]


def test_shared_prefixes_are_looked_for_when_rows_begin_anew(decoder, loops, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    from paceline.backends.cuda.decode import async_decoder

    asked = []

    def find(own, *sizes):  # type: ignore[no-untyped-def]
        asked.append((own.contexts.tolist(), own.begins.tolist(), own.counts.tolist(), own.firsts.tolist()))
        assert sizes == (PAGE, 4, 2)
        return own.page_tables[:, :2].tolist()

    monkeypatch.setattr(async_decoder, "find_shared_prefixes", find)
    tables = np.arange(SLOTS * LONGEST // PAGE, dtype=np.int32).reshape(SLOTS, -1)
    decoder.join(joining([1, 4], [6, 7]))
    for draft in (None, None, None, head_draft(2)):  # what passes in flight will have computed is not known
        decoder.launch([1, 4], tables, draft)
    assert asked == [([6, 7], [8, 32], [1, 1], [0, 1]), ([6, 7], [8, 32], [3, 3], [0, 3])]
    assert [loop.shared for loop in loops] == [[[[8, 9], [32, 33]]]] * 2


def test_each_length_has_a_loop_that_begins_anew_when_it_takes_its_turn(decoder, loops) -> None:  # type: ignore[no-untyped-def]
    tables = np.arange(SLOTS * LONGEST // PAGE, dtype=np.int32).reshape(SLOTS, -1)
    short, long = head_draft(2), head_draft(3)
    decoder.join(joining([4, 2], [3, 5]))
    for draft in (None, short, short, long, short):
        decoder.launch([4, 2], tables, draft)
    plain, by_two, by_three = loops
    assert [len(loop.begun) for loop in (plain, by_two, by_three)] == [1, 2, 1]
    outputs = [decoder.read() for _ in range(5)]
    assert [output.tokens.shape[1] for output in outputs] == [1, 3, 3, 4, 3]
    assert [output.features is None for output in outputs] == [False, True, True, True, True]


def test_host_drafts_arrive_before_their_pass_and_for_no_other(decoder, loops) -> None:  # type: ignore[no-untyped-def]
    tables = np.zeros((SLOTS, LONGEST // PAGE), dtype=np.int32)
    decoder.join(joining([4, 2], [3, 5]))
    by_host = DeviceDraft(2, host_tokens=3)
    lines = [[[4, 7, 8, -1], [6, 9, 0, 5]], [[-1, -1, -1, -1], [6, 9, 0, 5]], [[7, 1, -1, -1]]]
    for slots, own in zip([[4, 2], [4, 2], [2]], lines, strict=True):
        decoder.launch(slots, tables, by_host, np.array(own, dtype=np.int32))
        assert loops[0].host_drafts[: len(slots)].tolist() == own
    outputs = [decoder.read() for _ in lines]
    assert [output.tokens.shape for output in outputs] == [(2, 3), (2, 3), (1, 3)]
    assert all(output.found is not None for output in outputs)


def test_passes_that_are_dropped_are_not_read(decoder) -> None:  # type: ignore[no-untyped-def]
    tables = np.zeros((SLOTS, LONGEST // PAGE), dtype=np.int32)
    decoder.join(joining([3], [1]))
    for number in range(9):  # more than there are buffers
        tables[:] = number
        decoder.launch([3], tables, None)
        if number < 8:
            decoder.drop()
    assert decoder.read().tokens[:, 0].tolist() == [8]


def test_passes_run_only_the_sampling_kernels_that_requests_need(decoder, loops) -> None:  # type: ignore[no-untyped-def]
    tables = np.zeros((SLOTS, LONGEST // PAGE), dtype=np.int32)
    decoder.join(joining([2, 3, 5], [1, 1, 1]))
    given = []
    for slots in ([2, 3], [2], [5, 2]):
        decoder.launch(slots, tables, None)
        given.append(decoder.read().logprobs is not None)
    needs = SamplingNeeds
    assert loops[0].needs == [needs.TRUNCATION, needs.NOTHING, needs.LOGPROBS]
    assert given == [False, False, True]
    assert decoder._requests.truncation[[2, 3]].tolist() == [list(Truncation()), list(Truncation(top_k=5))]
    assert decoder._requests.asks_logprobs[[2, 5]].tolist() == [0, 1]


def test_loops_share_the_copy_of_raw_logits_if_it_has_their_rows(decoder, loops) -> None:  # type: ignore[no-untyped-def]
    for draft in (None, head_draft(2), head_draft(1), replace(head_draft(2), max_requests=2)):
        decoder.has_room(draft)
    plain, longest, *others = [loop.raw_logits for loop in loops]
    assert plain.shape == (8, VOCAB_SIZE)
    assert longest.shape == (8 * 3, VOCAB_SIZE)
    assert all(own is longest for own in others)


def test_edits_of_logits_are_those_of_the_request_in_the_slot(decoder, loops) -> None:  # type: ignore[no-untyped-def]
    tables = np.zeros((SLOTS, LONGEST // PAGE), dtype=np.int32)
    decoder.join(joining([0, 2], [1, 1]))
    decoder.launch([0, 2], tables, None)
    assert loops[0].needs == [SamplingNeeds.LOGIT_EDITS]
    edits = loops[0].edits
    assert edits.is_active[[0, 2]].tolist() == [1, 0]
    assert edits.bias[0].nonzero().tolist() == [[7]]
    plain = replace(joining([0], [1]), edits=[None])
    decoder.join(plain)
    assert edits.is_active[0] == 0


def test_where_edits_do_not_fit_the_memory_the_host_makes_them(loops, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    from paceline.backends.cuda.decode import slot_writer

    def too_large(*sizes: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 300 MB")

    assert SamplingNeeds.LOGIT_EDITS in make_decoder().supported_sampling
    monkeypatch.setattr(slot_writer, "make_edit_state", too_large)
    decoder = make_decoder()
    rest = SamplingNeeds.TRUNCATION | SamplingNeeds.LOGPROBS | SamplingNeeds.TOKEN_MASK
    assert decoder.supported_sampling == rest
    decoder.join(joining([2], [1]))
    decoder.launch([2], np.zeros((SLOTS, LONGEST // PAGE), dtype=np.int32), None)
    assert decoder.read().logprobs is None


def test_passes_with_an_adapter_are_told_so(decoder, loops) -> None:  # type: ignore[no-untyped-def]
    tables = np.zeros((SLOTS, LONGEST // PAGE), dtype=np.int32)
    decoder.join(joining([1, 4], [2, 6]))
    for slots in ([1], [1, 4], [4]):
        decoder.launch(slots, tables, None)
    assert loops[0].has_adapters == [False, True, True]
    assert decoder._requests.adapters[[1, 4]].tolist() == [-1, 1]
    decoder.join(replace(joining([4], [8]), adapters=[""]))
    decoder.launch([4], tables, None)
    assert not loops[0].has_adapters[-1]
    assert decoder._requests.adapters[4] == -1


def test_a_pass_over_masked_requests_samples_when_it_gets_their_masks(decoder, loops) -> None:  # type: ignore[no-untyped-def]
    """Only what the host must know is copied before: the drafts. The results follow the masks."""
    tables = np.arange(SLOTS * LONGEST // PAGE, dtype=np.int32).reshape(SLOTS, -1)
    decoder.join(joining([1, 2, 4], [2, 5, 6], masked=[2]))
    decoder.launch([1, 2, 4], tables, replace(head_draft(2), max_requests=4))
    (loop,) = loops
    assert (loop.parts, loop.needs, loop.has_adapters) == (["draft", "logits"], [], [True])
    with pytest.raises(AssertionError, match="waits for token masks"):
        decoder.launch([1], tables, None)
    drafted = decoder.drafted()
    assert drafted.tokens.tolist() == (np.arange(9).reshape(3, 3) + 100).tolist()
    assert list(drafted.parents) == [-1, 0, 1]
    words = len(loop.masks.masks[0])
    masks = [np.full(words, number, dtype=np.int32) for number in (7, 8)]
    decoder.send_masks(np.array([3, 5], dtype=np.int32), masks)  # the root of the second request, and a leaf
    assert loop.masks.lines.tolist() == [-1, -1, -1, 0, -1, 1, *[-1] * (len(loop.masks.lines) - 6)]
    assert loop.masks.masks[:2].tolist() == [mask.tolist() for mask in masks]
    assert (loop.parts[-1], loop.needs) == ("finish", [SamplingNeeds.TOKEN_MASK])
    assert decoder.read().tokens[:, 0].tolist() == [tables[1, 0], tables[2, 1], tables[4, 1]]
    decoder.launch([1, 4], tables, replace(head_draft(2), max_requests=4))  # neither is masked
    assert len(loops[-1].parts) == 3 * (loops[-1] is loop)
    assert loops[-1].needs[-1] == SamplingNeeds.NOTHING


def test_a_pass_that_waits_for_masks_can_be_dropped(decoder, loops) -> None:  # type: ignore[no-untyped-def]
    """The next one begins its rows again: the step that would have written them did not end."""
    tables = np.zeros((SLOTS, LONGEST // PAGE), dtype=np.int32)
    decoder.join(joining([2], [1], masked=[2]))
    decoder.launch([2], tables, None)
    decoder.drop()
    decoder.launch([2], tables, None)
    assert loops[0].begun == [[2], [2]]
    decoder.send_masks(np.zeros(0, dtype=np.int32), [])
    assert decoder.read().counts.tolist() == [1]
    assert loops[0].parts.count("finish") == 1


def test_drafts_without_memory_are_told(decoder, loops, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    from paceline.backends.cuda.decode import draft_loops

    def too_large(*sizes: object, **options: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 300 MB")

    draft = head_draft(3)
    assert decoder.has_room(draft)
    assert len(loops) == 1
    monkeypatch.setattr(draft_loops, "DecodeLoop", too_large)
    assert decoder.has_room(draft)
    assert not decoder.has_room(head_draft(2))
