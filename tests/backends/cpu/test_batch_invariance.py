"""The promise of the compiled backend: a token's logits depend, bit for bit, on its own prefix alone.

The truth is always the same: one thread, one request, one token at a time. Everything else, chunks,
drafts, trees, crowds, more threads, must give those bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.backends.cpu import CpuBackend
from paceline.models.checkpoint import Checkpoint
from tests.backends.cpu.numbers import assert_same_bits
from tests.backends.cpu.subject import (
    LENGTH,
    PAGES,
    TREES,
    Subject,
    assert_chunks_are_true,
    assert_seventh_is_true,
    assert_tree_is_true,
    crowd,
    deepest_path,
    load,
    path_to,
    plant,
)
from tests.backends.driver import drive, run
from tests.large import LARGE

CHUNKS = (1, 2, 3, 5, 7, 8, 9, 16, 17, 31, 64, LENGTH)
SOME_CHUNKS = (1, 7, 17, LENGTH)  # for models whose products are of a kind that others try with all
EDGES = (15, 16, 17, 31, 32, 33)  # committed lengths around the ends of pages

MODELS = [
    ("blocks", "native"),
    ("blocks", "none"),
    ("uneven", "int8"),
    ("latent", "int8"),
    ("mistral-window", "int8"),
    ("qwen3", "none"),
    ("mixtral", "int8"),
]


@pytest.fixture(scope="module", params=MODELS, ids=["-".join(model) for model in MODELS])
def subject(request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Checkpoint]) -> Iterator[Subject]:
    name, quantization = request.param
    made = load(checkpoint_of(name), quantization, (1, 2, 3), max_rows=192, name=name)
    yield made
    for backend in made.backends.values():
        backend.close()


@pytest.fixture(params=[1, 2, 3], ids=["1 thread", "2 threads", "3 threads"])
def backend(request: pytest.FixtureRequest, subject: Subject) -> CpuBackend:
    """Of one thread and of three, which wait for each other on two cores, one model unless all are wanted."""
    if request.param != 2 and subject.name != "uneven" and not LARGE:
        pytest.skip("repeats what the uneven model tries: run it with `make test-large`")
    return subject.backends[request.param]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_token_in_a_prefill_chunk_of_any_size(subject: Subject, backend: CpuBackend, chunk: int) -> None:
    if chunk not in SOME_CHUNKS and subject.name not in ("blocks", "uneven") and not LARGE:
        pytest.skip("repeats what other models try: run it with `make test-large`")
    assert_chunks_are_true(subject, backend, chunk)


def test_a_token_when_only_its_logits_are_wanted(subject: Subject, backend: CpuBackend) -> None:
    for wanted in ([LENGTH - 1], [0], [3, 40], [*range(0, LENGTH, 9)]):
        logits = run([drive(backend, PAGES)[0].ask(subject.prompt)], logit_rows=wanted).logits
        assert_same_bits(logits, np.stack([subject.truth(subject.prompt[: row + 1]) for row in wanted]))


@pytest.mark.parametrize("context", [0, 8, *EDGES])
def test_a_token_as_the_seventh_row_of_a_draft(subject: Subject, backend: CpuBackend, context: int) -> None:
    assert_seventh_is_true(subject, backend, context)


@pytest.mark.parametrize("parents", TREES.values(), ids=TREES)
def test_a_token_as_a_node_of_a_tree(subject: Subject, backend: CpuBackend, parents: list[int]) -> None:
    vocab_size = backend.config.vocab_size
    for context in EDGES:
        request = subject.prefix(backend, context)
        tokens = plant(parents, subject.prompt[context:], vocab_size)
        assert_tree_is_true(subject, request, parents, tokens)


def test_a_token_after_a_branch_was_committed(subject: Subject, backend: CpuBackend) -> None:
    """Keys and values that were moved into place are the ones the place would have got."""
    parents, vocab_size = TREES["two interleaved branches"], backend.config.vocab_size
    deepest = deepest_path(parents)
    for context in (15, 16, 31):
        for accepted in (deepest[:1], deepest[:5], deepest):
            request = subject.prefix(backend, context)
            request.run(plant(parents, subject.prompt[context:], vocab_size), parents)
            request.commit(accepted)
            end = context + len(accepted)
            assert_same_bits(
                request.extend(subject.prompt[end : end + 1])[0], subject.truth(subject.prompt[: end + 1])
            )


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_token_beside_fifteen_other_requests(subject: Subject, threads: int) -> None:
    requests = crowd(subject, subject.backends[threads], 16)
    logits = run(requests).logits.copy()
    expected = [
        subject.truth(
            [
                *subject.prompt[: request.context_length],
                *(request.tokens[n] for n in path_to(request.parents, row)),
            ]
        )
        for request in requests
        for row in range(len(request.tokens))
    ]
    assert_same_bits(logits, np.stack(expected))


def test_the_order_of_the_requests_does_not_matter(subject: Subject, backend: CpuBackend) -> None:
    requests = crowd(subject, backend, 6)
    forward = np.split(run(requests).logits.copy(), np.cumsum([len(r.tokens) for r in requests])[:-1])
    backward = np.split(
        run(requests[::-1]).logits.copy(), np.cumsum([len(r.tokens) for r in requests[::-1]])[:-1]
    )
    for first, second in zip(forward, backward[::-1], strict=True):
        assert_same_bits(first, second)


# Any partition, any tree ---------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[("qwen2-some-windows", "int8"), ("blocks", "native")], ids="-".join)
def drawn(request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Checkpoint]) -> Iterator[Subject]:
    name, quantization = request.param
    made = load(checkpoint_of(name), quantization, (1, 2), max_rows=192)
    yield made
    for backend in made.backends.values():
        backend.close()


@st.composite
def cuts(draw: st.DrawFn) -> list[int]:
    """Lengths of chunks that make up a prompt."""
    inner = sorted(draw(st.sets(st.integers(1, LENGTH - 1), max_size=12)))
    return [end - start for start, end in zip([0, *inner], [*inner, LENGTH], strict=True)]


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    """Parents of any tree, or forest, in topological order."""
    size = draw(st.integers(1, 24))
    return [draw(st.integers(-1, row - 1)) for row in range(size)]


ANY = settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@ANY
@given(lengths=cuts(), threads=st.sampled_from([1, 2]))
def test_any_split_of_a_prompt_into_chunks(drawn: Subject, lengths: list[int], threads: int) -> None:
    request, start = drive(drawn.backends[threads], PAGES)[0], 0
    for length in lengths:
        logits = request.extend(drawn.prompt[start : start + length])
        expected = [drawn.truth(drawn.prompt[:end]) for end in range(start + 1, start + length + 1)]
        assert_same_bits(logits, np.stack(expected))
        start += length


@ANY
@given(parents=trees(), context=st.integers(0, 45), threads=st.sampled_from([1, 2]), data=st.data())
def test_any_tree_anywhere(
    drawn: Subject, parents: list[int], context: int, threads: int, data: st.DataObject
) -> None:
    # few tokens, so that siblings and cousins are often the same
    tokens = data.draw(st.lists(st.integers(0, 3), min_size=len(parents), max_size=len(parents)))
    request = drawn.prefix(drawn.backends[threads], context)
    assert_tree_is_true(drawn, request, parents, tokens)


# The tests can fail ---------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", ["native", "none"])
def test_keys_in_another_order_are_noticed(
    checkpoint_of: Callable[[str], Checkpoint], quantization: str
) -> None:
    """Two full pages swapped: the same keys and values, added in another order. Only the last bits tell."""
    blocks = load(checkpoint_of("blocks"), quantization, (1,), max_rows=48)  # its attention looks far back
    request = blocks.prefix(blocks.backends[1], 40)
    request.pages[[0, 1]] = request.pages[[1, 0]]
    logits, expected = request.run(blocks.prompt[40:41])[0], blocks.truth(blocks.prompt[:41])
    with pytest.raises(AssertionError, match="floats differ"):
        assert_same_bits(logits, expected)
    assert np.abs(logits - expected).max() < (1e-4 if quantization == "none" else 0.1)


def test_a_wrong_page_is_noticed(drawn: Subject) -> None:
    request = drawn.prefix(drawn.backends[1], 40)
    request.pages[2] = request.pages[5]
    with pytest.raises(AssertionError, match="floats differ"):
        assert_same_bits(request.run(drawn.prompt[40:41])[0], drawn.truth(drawn.prompt[:41]))


def test_a_wrong_parent_is_noticed(drawn: Subject) -> None:
    request = drawn.prefix(drawn.backends[1], 20)
    logits = request.run([5, 5, 6, 7], [-1, 0, 0, 2])  # 2's parent should be 1, the same token one deeper
    with pytest.raises(AssertionError, match="floats differ"):
        assert_same_bits(logits[3], drawn.truth([*drawn.prompt[:20], 5, 5, 6, 7]))
