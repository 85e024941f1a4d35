"""A token's logits depend, bit for bit, on its own prefix alone: on a real model too."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from paceline.backends.cpu import CpuBackend
from paceline.models.checkpoint import Checkpoint
from tests.backends.cpu.numbers import assert_same_bits
from tests.backends.cpu.subject import (
    LENGTH,
    TREES,
    Subject,
    assert_chunks_are_true,
    assert_seventh_is_true,
    assert_tree_is_true,
    crowd,
    deepest_path,
    load,
    plant,
)
from tests.backends.driver import run
from tests.large import LARGE, repeated

HELD = (1, 2) if LARGE else (2,)  # threads of passes that are held to the truth, which is one thread's


@pytest.fixture(scope="module", params=["native", "int8", *repeated("none")])
def real(request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Checkpoint]) -> Iterator[Subject]:
    made = load(checkpoint_of("smollm2-135m"), request.param, (1, 2), max_rows=192, name=request.param)
    yield made
    for backend in made.backends.values():
        backend.close()


def held(real: Subject) -> list[CpuBackend]:
    return [real.backends[threads] for threads in HELD]


@pytest.mark.real
@pytest.mark.parametrize("chunk", [7, LENGTH, *repeated(17)])  # small models try twelve sizes
def test_a_real_token_in_a_prefill_chunk(real: Subject, chunk: int) -> None:
    for backend in held(real):
        assert_chunks_are_true(real, backend, chunk)


@pytest.mark.real
def test_a_real_token_in_a_draft_and_in_a_tree(real: Subject) -> None:
    parents = TREES["comb"]
    for backend in held(real):
        assert_seventh_is_true(real, backend, 26)
        tokens = plant(parents, real.prompt[31:], backend.config.vocab_size)
        assert_tree_is_true(real, real.prefix(backend, 31), parents, tokens)


@pytest.mark.real
def test_a_real_token_beside_fifteen_other_requests(real: Subject) -> None:
    if real.name == "int8" and not LARGE:
        pytest.skip("repeats what the blocks of the file and small models try: run it with `make test-large`")
    for backend in held(real):
        requests = crowd(real, backend, 16)
        logits = run(requests).logits
        start = 0
        for request in requests:
            for depth, row in enumerate(deepest_path(request.parents)):
                true = real.truth(real.prompt[: request.context_length + depth + 1])
                assert_same_bits(logits[start + row], true)
            start += len(request.tokens)
