"""What passes of the target leave in the pools of draft heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from paceline.backends.cpu import CpuBackend, CpuHeadRunner
from paceline.backends.cpu.compiled_model import CpuPool
from paceline.backends.heads import first_slots
from paceline.core.forward import KeptFeatures
from paceline.models.checkpoint import Checkpoint
from tests.backends.cpu.numbers import assert_same_bits
from tests.backends.driver import Driven, drive, run
from tests.models.heads.driver import random_checkpoint
from tests.models.heads.tiny_heads import EAGLE3

MAX_ROWS = 48
PAGES = 3
PARENTS = [-1, 0, 0, 1, 2, -1, 3, 4, 5]  # a tree whose branches interleave


@pytest.fixture(scope="module", params=["int8", "none"])
def backend(
    request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Checkpoint]
) -> Iterator[CpuBackend]:
    target = checkpoint_of("llama-attention-bias")
    backend = CpuBackend.load(target, quantization=request.param, threads=2, max_rows=MAX_ROWS)
    yield backend
    backend.close()


@pytest.fixture
def runner(backend: CpuBackend) -> CpuHeadRunner:
    return CpuHeadRunner(random_checkpoint(EAGLE3), backend, MAX_ROWS)


def bfloat16(values: np.ndarray) -> np.ndarray:
    """The upper halves of float32, rounded."""
    return ((values.view(np.uint32).astype(np.uint64) + 0x8000) >> 16).astype(np.uint16)


def places(request: Driven, count: int) -> list[int]:
    """Those of a request's first rows of the next pass."""
    return [request.place(request.context_length + row) for row in range(count)]


def test_every_row_stores_its_features_at_its_kv_slot(backend: CpuBackend, runner: CpuHeadRunner) -> None:
    """Of chains and trees, for two heads, of layers in any order and more than once, also if no logits are
    wanted; and they are the ones that a pass gives."""
    chain, tree = drive(backend, PAGES, 2)
    tree.extend([7, 8, 9])
    last = backend.config.num_layers
    heads = [(last, 0, 1), (1, 1, 0)]
    pools = [runner.make_pool(2 * PAGES) for _ in heads]
    kept = tuple(KeptFeatures(pool, layers) for pool, layers in zip(pools, heads, strict=True))
    asked = [chain.ask(list(range(20))), tree.ask(list(range(len(PARENTS))), PARENTS)]
    output = run(asked, logit_rows=[], feature_layers=(0, 1, last), kept=kept)
    assert output.features is not None
    given = output.features.reshape(20 + len(PARENTS), 3, -1)
    at = places(chain, 20) + places(tree, len(PARENTS))
    for pool, layers in zip(pools, heads, strict=True):
        expected = bfloat16(given[:, [(0, 1, last).index(layer) for layer in layers]].copy())
        np.testing.assert_array_equal(pool.features[at], expected)
        elsewhere = np.delete(pool.features, at, axis=0)
        assert not elsewhere.any()


def test_the_next_pass_keeps_nothing_if_nobody_asks(backend: CpuBackend, runner: CpuHeadRunner) -> None:
    (request,) = drive(backend, PAGES)
    pool = runner.make_pool(PAGES)
    run([request.ask([1, 2])], kept=(KeptFeatures(pool, (0, 1, 1)),))
    before = pool.features.copy()
    run([request.ask([3, 4])])
    np.testing.assert_array_equal(pool.features, before)
    run([request.ask([3, 4])], kept=(KeptFeatures(pool, (0, 1, 1)),))
    assert (pool.features != before).any()


def test_what_is_accepted_is_moved_and_read_from_there(runner: CpuHeadRunner) -> None:
    """A pass that is told places computes what one computes that is given the features."""
    rng = np.random.default_rng(3)
    pool = runner.make_pool(PAGES)
    pool.features[:] = rng.integers(0x3F00, 0x4000, pool.features.shape)  # numbers between 0.5 and 2
    wanted = pool.features[[5, 9, 2]]
    runner.move(pool, np.array([5, 9, 2], np.int32), np.array([2, 3, 4], np.int32))
    np.testing.assert_array_equal(pool.features[2:5], wanted)

    told = first_slots(pool, runner.page_size, 5)
    told = replace(told, rows=replace(told.rows, logit_rows=np.arange(5, dtype=np.int32)))
    by_place = runner.run(replace(told, slot_mapping=np.array([2, 3, 4, 11, 40], np.int32)))
    logits, states = by_place.logits.copy(), by_place.states.copy()
    features = np.concatenate((wanted, pool.features[[11, 40]])).astype(np.uint32) << 16
    given = runner.run(replace(told, slot_mapping=None, states=features.view(np.float32).reshape(5, -1)))
    assert_same_bits(logits, given.logits)
    assert_same_bits(states, given.states)


def test_prepare_leaves_no_trace_in_the_pool(backend: CpuBackend, runner: CpuHeadRunner) -> None:
    """It takes memory, which nobody sees, and runs a pass of as many rows as fit."""
    pool = runner.make_pool(2)
    runner.prepare(pool)
    assert isinstance(pool, CpuPool)
    assert not pool.features.any()
    own = backend.make_pool(2)
    backend.prepare(own, 32, ())
    assert not own.data.any()
