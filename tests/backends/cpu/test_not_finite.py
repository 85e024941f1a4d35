"""Values that are not finite stay in their own row, branch and request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from paceline.backends.cpu import CpuBackend
from paceline.models.checkpoint import Checkpoint
from tests.backends.cpu.checkpoints import floats
from tests.backends.cpu.numbers import assert_same_bits
from tests.backends.driver import drive, run

BAD = 7  # the token whose embedding is broken
CLEAN = [5, 9, 4, 20, 31]
MODELS = [(name, quantization) for name in ("qwen2", "mixtral") for quantization in ("int8", "none")]


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def clean(request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Checkpoint]) -> Iterator[CpuBackend]:
    name, quantization = request.param
    backend = CpuBackend.load(checkpoint_of(name), quantization=quantization, threads=2, max_rows=32)
    yield backend
    backend.close()


@pytest.fixture(params=[np.nan, np.inf, -np.inf], ids=["nan", "inf", "minus inf"])
def broken(
    request: pytest.FixtureRequest, clean: CpuBackend, checkpoint_of: Callable[[str], Checkpoint]
) -> Iterator[CpuBackend]:
    """The same model with one broken number in the embedding of one token."""
    checkpoint = checkpoint_of(clean.config.family)
    name = "model.embed_tokens.weight"
    embedding = checkpoint.tensors[name].float32()
    embedding[BAD, 33] = request.param
    damaged = replace(checkpoint, tensors={**checkpoint.tensors, name: floats(embedding)})
    backend = CpuBackend.load(damaged, quantization=clean.quantization, threads=2, max_rows=32)
    yield backend
    backend.close()


every_model = pytest.mark.parametrize("clean", MODELS, ids="-".join, indirect=True)


def assert_no_number(logits: np.ndarray) -> None:
    assert not np.isfinite(logits).any()


@every_model
def test_nan_in_a_row_does_not_reach_other_rows(clean: CpuBackend, broken: CpuBackend) -> None:
    expected = drive(clean, 2)[0].run(CLEAN)
    first, second, third = drive(broken, 2, count=3)
    logits = run([first.ask(CLEAN), second.ask([5, BAD, 9]), third.ask(CLEAN)]).logits
    assert_same_bits(logits[:5], expected)
    assert_same_bits(logits[5], expected[0])  # before the broken token
    assert_no_number(logits[6:8])  # the token itself, and what has it in its past
    assert_same_bits(logits[8:], expected)


@every_model
def test_nan_in_a_branch_does_not_reach_other_branches(clean: CpuBackend, broken: CpuBackend) -> None:
    parents = [-1, 0, 0, 1, 2, 4]
    expected = drive(clean, 2)[0].run(CLEAN[:4])
    logits = drive(broken, 2)[0].run([CLEAN[0], BAD, CLEAN[1], 3, *CLEAN[2:4]], parents)
    assert_same_bits(logits[[0, 2, 4, 5]], expected)
    assert_no_number(logits[[1, 3]])


@every_model
def test_what_a_rejected_draft_left_behind_is_never_read(clean: CpuBackend, broken: CpuBackend) -> None:
    expected = drive(clean, 2)[0].run([*CLEAN, 8])
    request = drive(broken, 2)[0]
    request.extend(CLEAN[:2])
    request.run([BAD] * 20)
    assert_same_bits(request.extend(CLEAN[2:]), expected[2:5])
    request.run([BAD] * 3)
    assert_same_bits(request.run([8, BAD], [-1, -1])[:1], expected[5:])


def test_nan_in_the_kv_cache_fails_its_request_only(clean: CpuBackend) -> None:
    expected = drive(clean, 2)[0].run([*CLEAN, 8])
    first, second, third = drive(clean, 2, count=3)
    for request in (first, second, third):
        request.extend(CLEAN)
    heads, _, block = clean.workspace.kv_shapes()[0]
    keys = first.pool.data.reshape(-1)[heads * block * second.pages[0] :]  # type: ignore[attr-defined]
    keys[:block] = 0xFF  # NaN, as half and as float
    logits = run([first.ask([8]), second.ask([8]), third.ask([8])]).logits
    assert_same_bits(logits[[0, 2]], expected[[5, 5]])
    assert_no_number(logits[1])


def test_stale_nans_in_a_page_have_no_effect(clean: CpuBackend) -> None:
    """What lies behind a request's last token may be anything: it is masked, not multiplied by zero."""
    expected = drive(clean, 2)[0].run([*CLEAN, 8, 3])
    request = drive(clean, 2)[0]
    request.pool.data[:] = 0xFF  # type: ignore[attr-defined]
    assert_same_bits(request.extend(CLEAN), expected[:5])
    assert_same_bits(request.run([8, 8, 3], [-1, -1, 1])[[0, 2]], expected[5:])
