"""Where some layers have a sliding window, these free the pages that left it, and texts stay the same.

The toy's logits are a hash of a whole path, read through the page table, and of its last positions, read
through the table of window pages: a window page that is released too early, or is missing after a prefix hit,
is garbage or another request's, and changes the output.
"""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.backends.cpu import CpuBackend
from paceline.backends.options import BackendOptions
from paceline.backends.torch.backend import TorchBackend
from paceline.control.controller import FixedController
from paceline.core.forward import window_slots
from paceline.core.params import SamplingParams
from paceline.core.trees import DraftPlan
from paceline.draft.base import DraftSampling, Target
from paceline.draft.model.layerskip import LayerSkipDrafter, LayerSkipOptions
from paceline.engine.admission import Limits
from paceline.engine.engine import Engine
from paceline.kv.window_pages import window_pages_for
from paceline.models.registry import load_checkpoint
from tests.engine.test_exactness import prompt
from tests.engine.test_exactness_cpu import Tokenizer
from tests.engine.test_window_properties import MAX_LENGTH, PAGE, REQUESTS, STYLES, Answers
from tests.engines import new_engine
from tests.large import LARGE, repeated
from tests.tiny import save_checkpoint
from tests.tiny_families import VOCAB_SIZE
from tests.toy import ToyBackend, ToyPool, scribble_free_pages, toy_engine
from tests.toy_drafter import ScriptedDrafter

COUPLED = DraftSampling.COUPLED


class GroupedPool(ToyPool):
    def __init__(self, num_pages, page_size, windows):
        super().__init__(num_pages, page_size)
        self.windows = windows
        self.seen = ToyPool(windows.num_pages, page_size)  # what the layers with a window store


class Grouped(ToyBackend):
    """The toy with two layers: one reads all positions, the other the last `window`."""

    def __init__(self, window, **options):
        super().__init__(page_size=PAGE, **options)
        self.window = self.window_group = window

    def make_grouped_pool(self, num_pages, windows):
        return GroupedPool(num_pages, self.page_size, windows)

    def _write(self, batch, pool, request):
        kv_slots = super()._write(batch, pool, request)
        new = kv_slots[batch.context_lengths[request] :]
        written = window_slots(pool.windows, new, self.page_size)
        assert (written >= self.page_size).all(), "a row without a window page"
        pool.seen.tokens[written], pool.seen.positions[written] = pool.tokens[new], pool.positions[new]
        return kv_slots

    def _row_logits(self, batch, pool, kv_slots, row):
        request = int(np.searchsorted(batch.row_offsets, row, side="right")) - 1
        path = kv_slots[request][self._path(batch, request, row)]
        last = window_slots(pool.windows, path[-self.window :], self.page_size)
        tokens = np.concatenate((pool.tokens[path], pool.seen.tokens[last]))
        return self.logits_of(tokens, np.concatenate((pool.positions[path], pool.seen.positions[last])))

    def move(self, pool, source, destination):
        super().move(pool, source, destination)
        super().move(
            pool.seen, *(window_slots(pool.windows, slots, self.page_size) for slots in (source, destination))
        )


def least_windows(window, rows):
    """The fewest window pages that an engine can have."""
    return window_pages_for(window, rows, PAGE) + 1


def grouped_engine(window, rows, num_pages, more_windows, style, caching, on_device, told=None) -> Engine:
    """An engine of 4 requests at a time; `told`: the window that it knows of, if it is another one."""
    backend = Grouped(window, max_rows=rows, on_device=on_device)
    backend.window_group = told or window
    return toy_engine(
        backend,
        max_model_len=MAX_LENGTH,
        max_num_seqs=4,
        max_num_batched_tokens=rows,
        num_pages=num_pages,
        num_window_pages=least_windows(backend.window_group, rows) + more_windows,
        enable_prefix_caching=caching,
        drafter=ScriptedDrafter(Answers(partial(expected, window)), style) if style else None,
        budget=5,
        branching=2 if style == "tree" else 1,
    )


@cache
def expected(window, number):
    """The tokens of a request alone, when no window page is ever taken by another or scribbled."""
    engine = grouped_engine(window, 64, 200, 200, None, caching=False, on_device=False, told=MAX_LENGTH)
    (request,) = engine.add_request(*REQUESTS[number])
    while engine.has_unfinished:
        engine.step()
    return request.output_token_ids


def scribble(engine):
    """Fill all free pages, the null page and the window pages that no window has with garbage."""
    scribble_free_pages(engine)
    seen, free = engine._pool.seen, [0, *engine.kv.windows.free_pages()]
    for stored in (seen.tokens, seen.positions):
        stored.reshape(-1, PAGE)[free] = -999


def check_windows(engine, rows):
    """No sequence holds more window pages than its window and a pass's rows need."""
    windows, running = engine.kv.windows, len(engine.scheduler.running)
    held = windows.num_usable - windows.num_available
    assert held <= running * window_pages_for(windows.window, 64 + 3 * rows, PAGE)
    assert len({*windows.group.table.tolist()} - {0}) == (windows.group.table > 0).sum(), "two have one page"


def serve(engine, numbers, rows):
    """The tokens of these requests, added one after the other while others run."""
    added = []
    for number in numbers:
        added.append(engine.add_request(*REQUESTS[number])[0])
        for _ in range(3):
            engine.step()
            scribble(engine)
            check_windows(engine, rows)
    while engine.has_unfinished:
        engine.step()
        scribble(engine)
        check_windows(engine, rows)
    assert engine.kv.usage == 0
    return [request.output_token_ids for request in added]


@settings(max_examples=40)
@given(
    window=st.integers(1, 30),
    rows=st.integers(6, 32),
    num_pages=st.integers(MAX_LENGTH // PAGE, 60),
    more_windows=st.integers(0, 20),
    style=st.sampled_from([None, *STYLES]),
    caching=st.booleans(),
    on_device=st.booleans(),
    numbers=st.lists(st.integers(0, len(REQUESTS) - 1), min_size=1, max_size=8),
)
def test_texts_stay_the_same_and_few_window_pages_are_held(
    window, rows, num_pages, more_windows, style, caching, on_device, numbers
):
    engine = grouped_engine(window, rows, num_pages, more_windows, style, caching, on_device)
    assert serve(engine, numbers, rows) == [expected(window, number) for number in numbers]


@pytest.mark.parametrize("style", [None, "tree"])
def test_requests_that_lack_window_pages_are_preempted_and_have_the_same_texts(style):
    numbers = [3, 5, 6, 3, 4, 5]
    engine = grouped_engine(30, 16, 60, 0, style, caching=True, on_device=False)
    assert serve(engine, numbers, 16) == [expected(30, number) for number in numbers]
    assert engine.scheduler.num_preemptions > 0
    assert engine.kv.prefix_hits > 0


@pytest.mark.parametrize("style", [None, "tree"])
def test_a_window_page_released_too_early_is_noticed(style):
    numbers = [3, 5, 6, 3, 4, 5]
    engine = grouped_engine(14, 16, 60, 4, style, caching=False, on_device=False, told=14 - 2 * PAGE)
    assert serve(engine, numbers, 16) != [expected(14, number) for number in numbers]


def test_a_prefix_hit_is_as_long_as_its_window_is_known():
    """The pages of a beginning outlive its window pages: then only what both know is used again."""
    ids, params = prompt(0, 60), SamplingParams(temperature=0, max_tokens=1)
    engine = grouped_engine(8, 16, 60, 0, None, caching=True, on_device=False)

    def cached_tokens(tokens):
        (request,) = engine.add_request(tokens, params)
        while engine.has_unfinished:
            engine.step()
            scribble(engine)
        return request.num_cached_tokens

    assert cached_tokens(ids) == 0
    assert cached_tokens([*ids, 5]) == 60  # its last window is there
    assert cached_tokens(ids[:20]) == 0  # the window of 16 tokens is not: others took its pages
    cached_tokens(prompt(1, 60))  # takes all window pages
    assert cached_tokens([*ids, 6]) == 0
    assert cached_tokens([*ids, 7]) == 60  # computed again


# the window of these tiny models is 9, and pages have 16 tokens
def long_requests(max_tokens, longer):
    return [
        (
            np.random.default_rng(number).integers(2, VOCAB_SIZE, 6 + longer * number).tolist(),
            SamplingParams(
                temperature=number % 2, seed=5, max_tokens=max_tokens, ignore_eos=True, logprobs=1
            ),
        )
        for number in range(3)
    ]


ROWS = 20
FEW = window_pages_for(9, ROWS, 16) + 1


FAMILIES = ["gemma3", "gpt-oss", "gemma4", "llama4"]
CASES = [
    *(("cpu", family) for family in FAMILIES),
    ("torch", FAMILIES[0]),
    *repeated(*(("torch", family) for family in FAMILIES[1:])),  # row by row, which is slow
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def backend(request, tmp_path_factory):
    name, family = request.param
    checkpoint = load_checkpoint(save_checkpoint(family, tmp_path_factory.mktemp("windows")))
    if name == "cpu":
        return CpuBackend.load(checkpoint, quantization="int8", threads=1, max_rows=64)
    return TorchBackend.load(checkpoint, max_rows=64, row_by_row=True)


def run(backend, wanted, num_window_pages=None, drafter=None, max_num_seqs=4, plan=None, num_pages=60):
    """Tokens and log-probabilities of the wanted requests, run together."""
    engine = new_engine(
        backend,
        Tokenizer(),
        Limits(VOCAB_SIZE, 200, max_num_seqs, ROWS),
        num_pages=num_pages,
        num_window_pages=num_window_pages,
        controller=FixedController(plan or DraftPlan("scripted", 5, branching=2)) if drafter else None,
        drafters={drafter.name: drafter} if drafter else {},
    )
    added = [engine.add_request(ids, params)[0] for ids, params in wanted]
    engine.num_steps = 0
    while engine.has_unfinished:
        engine.step()
        engine.num_steps += 1
    assert [request.error for request in added] == [None] * len(added)
    return [(request.output_token_ids, request.logprobs) for request in added], engine


@pytest.fixture(scope="module")
def long(backend):
    """Three requests whose texts cross borders of pages. torch computes row by row: fewer tokens."""
    return long_requests(40, 31) if isinstance(backend, CpuBackend) else long_requests(12, 22)


@pytest.fixture(scope="module")
def alone(backend, long):
    """The outputs of each request when all layers keep all pages."""
    return [run(backend, [one])[0][0] for one in long]


def skip_repeats_on_torch(backend):
    if isinstance(backend, TorchBackend) and not LARGE:
        pytest.skip("repeats what others try: run it with `make test-large`")


@pytest.mark.parametrize("style", [None, "tree"])
def test_models_with_two_groups_have_the_bytes_of_one(backend, long, alone, style):
    if style is None:  # as below
        skip_repeats_on_torch(backend)
    truth = {tuple(ids): alone[number][0] for number, (ids, _) in enumerate(long)}
    drafter = ScriptedDrafter(truth, style) if style else None
    assert run(backend, long, FEW + 8, drafter)[0] == alone
    results, engine = run(backend, [*long, *long], FEW, drafter)
    assert results == alone + alone
    assert engine.scheduler.num_preemptions > 0


def test_a_text_continues_after_its_cached_window(backend, long, alone):
    """Of the first text, only the pages of its last window have keys and values of all layers."""
    whole = long[2][0] + alone[2][0]
    longer = (whole, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1))
    (expected,), _ = run(backend, [longer])
    results, engine = run(backend, [long[2], longer], FEW + 4, max_num_seqs=1)
    assert results == [alone[2], expected]
    assert engine.kv.prefix_hits == (len(whole) - 1) // 16 * 16


@pytest.mark.parametrize("exit_layer", [1, 2])
def test_the_first_layers_draft_from_window_pages(backend, long, exit_layer):
    """One of the two has a window. The drafts are those of one group: as many steps are needed."""
    if exit_layer == 1:
        skip_repeats_on_torch(backend)
    config = backend.config if isinstance(backend, CpuBackend) else backend.model.config
    target = Target(config, Tokenizer(), BackendOptions(backend=backend.name), backend, ROWS, COUPLED)
    plan, steps = DraftPlan("layerskip", 6, 2), []
    for num_window_pages in (None, FEW + 8):
        drafter = LayerSkipDrafter.load(LayerSkipOptions(exit_layer), target)
        results, engine = run(backend, long, num_window_pages, drafter, plan=plan)
        steps.append((results, engine.num_steps))
    assert steps[0] == steps[1]


def test_their_pools_have_the_bytes_that_are_planned(backend, long):
    windows, all_layers = backend.bytes_per_window_page(), backend.bytes_per_page()
    assert 0 < windows < all_layers
    _, engine = run(backend, long[:1], FEW)
    pool = engine.kv.pool_of(backend)
    stored = [pool.data] if isinstance(backend, CpuBackend) else [*pool.cache.keys, *pool.cache.values]
    assert sum(array.nbytes for array in stored) == 60 * (all_layers - windows) + FEW * windows
