"""The promise of the compiled backend: a token's logits depend, bit for bit, on its own prefix alone.

The truth is always the same: one thread, one request, one token at a time. Everything else, chunks,
drafts, trees, crowds, more threads, must give those bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.backends.cpu import CpuBackend
from paceline.models.checkpoint import Checkpoint
from tests.backends.cpu.numbers import assert_same_bits
from tests.backends.driver import Driven, drive, run

LENGTH = 70  # four pages and a bit
PAGES = 7
CHUNKS = (1, 2, 3, 5, 7, 8, 9, 16, 17, 31, 64, LENGTH)
EDGES = (15, 16, 17, 31, 32, 33)  # committed lengths around the ends of pages
REAL = "smollm2-135m"

# Every tree has the true continuation on one path; its other nodes are decoys.
TREES = {
    "chain": [-1, 0, 1, 2, 3, 4, 5, 6],
    "star": [-1, -1, -1, -1, -1],
    "comb": [-1, 0, 0, 1, 1, 3, 3, 5, 5],
    "two interleaved branches": [-1, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
    "binary": [-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6],
    "late branches": [-1, 0, 1, 2, 2, 4, 4, 1, 7, 0, 9],
}


class Subject:
    """One model, packed for several numbers of threads, and its truth."""

    def __init__(self, backends: dict[int, CpuBackend], prompt: list[int]) -> None:
        self.backends = backends  # by number of threads
        self.prompt = prompt
        self._alone = drive(backends[1], PAGES)[0]
        self._said: list[int] = []  # what `_alone` has committed
        self._remembered: dict[tuple[int, ...], np.ndarray] = {}

    def truth(self, tokens: Sequence[int]) -> np.ndarray:
        """The last token's logits, [vocab]: it and every token before it ran alone, on one thread."""
        key = tuple(tokens)
        if key not in self._remembered:
            self._run_alone(key)
        return self._remembered[key]

    def _run_alone(self, tokens: tuple[int, ...]) -> None:
        # go back to where the last text and this one part, then on from there
        same = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(self._said, tokens[:-1], strict=False)
        )
        shared = len(list(same))
        self._alone.context_length, self._said = shared, list(tokens)
        for end in range(shared, len(tokens)):
            self._remembered[tokens[: end + 1]] = self._alone.extend(tokens[end : end + 1])[0]

    def prefix(self, backend: CpuBackend, length: int) -> Driven:
        """A request with `length` tokens of the prompt committed."""
        request = drive(backend, PAGES)[0]
        prefill(request, self.prompt[:length])
        return request


def prefill(request: Driven, tokens: Sequence[int]) -> None:
    """Commit the tokens, in chunks of no particular size, and ask for no logits."""
    for start in range(0, len(tokens), 19):
        chunk = tokens[start : start + 19]
        run([request.ask(chunk)], logit_rows=[])
        request.commit(range(len(chunk)))


def path_to(parents: Sequence[int], row: int) -> list[int]:
    return [*path_to(parents, parents[row]), row] if row >= 0 else []


def deepest_path(parents: Sequence[int]) -> list[int]:
    return max((path_to(parents, row) for row in range(len(parents))), key=len)


def plant(parents: Sequence[int], tokens: Sequence[int], vocab_size: int) -> list[int]:
    """Tokens for a tree: the true continuation on the path to its deepest node, decoys elsewhere."""
    planted = [(7 * row + 3) % vocab_size for row in range(len(parents))]
    for depth, row in enumerate(deepest_path(parents)):
        planted[row] = tokens[depth]
    return planted


def assert_tree_is_true(
    subject: Subject, request: Driven, parents: Sequence[int], tokens: Sequence[int]
) -> None:
    """Every node of the tree has the logits of its own path run alone."""
    before = subject.prompt[: request.context_length]
    logits = request.run(tokens, parents)
    expected = [
        subject.truth([*before, *(tokens[n] for n in path_to(parents, row))]) for row in range(len(tokens))
    ]
    assert_same_bits(logits, np.stack(expected))


def load(checkpoint: Checkpoint, quantization: str, threads: Sequence[int], max_rows: int) -> Subject:
    backends = {
        count: CpuBackend.load(checkpoint, quantization=quantization, threads=count, max_rows=max_rows)
        for count in threads
    }
    vocab_size = checkpoint.config.vocab_size
    return Subject(backends, np.random.default_rng(17).integers(0, vocab_size, LENGTH).tolist())


MODELS = [
    ("blocks", "native"),
    ("blocks", "none"),
    ("uneven", "int8"),
    ("mistral-window", "int8"),
    ("qwen3", "none"),
    ("mixtral", "int8"),
]


@pytest.fixture(scope="module", params=MODELS, ids=["-".join(model) for model in MODELS])
def subject(request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Checkpoint]) -> Iterator[Subject]:
    name, quantization = request.param
    made = load(checkpoint_of(name), quantization, (1, 2, 3), max_rows=192)
    yield made
    for backend in made.backends.values():
        backend.close()


@pytest.fixture(params=[1, 2, 3], ids=["1 thread", "2 threads", "3 threads"])
def backend(request: pytest.FixtureRequest, subject: Subject) -> CpuBackend:
    return subject.backends[request.param]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_token_in_a_prefill_chunk_of_any_size(subject: Subject, backend: CpuBackend, chunk: int) -> None:
    request, prompt = drive(backend, PAGES)[0], subject.prompt
    logits = [request.extend(prompt[start : start + chunk]) for start in range(0, LENGTH, chunk)]
    expected = [subject.truth(prompt[: end + 1]) for end in range(LENGTH)]
    assert_same_bits(np.concatenate(logits), np.stack(expected))


def test_a_token_whose_logits_alone_are_wanted(subject: Subject, backend: CpuBackend) -> None:
    for wanted in ([LENGTH - 1], [0], [3, 40], [*range(0, LENGTH, 9)]):
        logits = run([drive(backend, PAGES)[0].ask(subject.prompt)], logit_rows=wanted).logits
        assert_same_bits(logits, np.stack([subject.truth(subject.prompt[: row + 1]) for row in wanted]))


@pytest.mark.parametrize("context", [0, 8, *EDGES])
def test_a_token_as_the_seventh_row_of_a_draft(subject: Subject, backend: CpuBackend, context: int) -> None:
    draft = subject.prompt[context : context + 7]
    logits = subject.prefix(backend, context).run(draft)
    assert_same_bits(logits[6], subject.truth(subject.prompt[: context + 7]))


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


def crowd(subject: Subject, backend: CpuBackend, count: int) -> list[Driven]:
    """Requests at different lengths: decodes, drafts as chains and as trees, and prefill chunks."""
    shapes = list(TREES.values())
    requests = drive(backend, PAGES, count)
    for number, request in enumerate(requests):
        length = (5 * number + 11) % 50
        if number % 4 != 3:  # every fourth begins with its prefill
            prefill(request, subject.prompt[:length])
        following = subject.prompt[request.context_length :]
        if number % 4 == 0:
            request.ask(following[:1])
        elif number % 4 == 1:
            parents = shapes[number % len(shapes)]
            request.ask(plant(parents, following, backend.config.vocab_size), parents)
        elif number % 4 == 2:
            request.ask(following[: 1 + number % 7])
        else:
            request.ask(following[: 3 * number])
    return requests


def test_a_token_beside_fifteen_other_requests(subject: Subject, backend: CpuBackend) -> None:
    requests = crowd(subject, backend, 16)
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
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@ANY
@given(lengths=cuts(), threads=st.sampled_from([1, 2]))
def test_any_cut_of_a_prompt(drawn: Subject, lengths: list[int], threads: int) -> None:
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


# A real model ---------------------------------------------------------------------------------------

# The numbers of threads that are held to the truth; float32 weights take 0.5 GB for each.
REAL_MODELS = {"auto": (1, 2, 3), "int8": (1, 2), "none": (1, 2)}


@pytest.fixture(scope="module", params=REAL_MODELS)
def real(request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Checkpoint]) -> Iterator[Subject]:
    made = load(checkpoint_of(REAL), request.param, REAL_MODELS[request.param], max_rows=192)
    yield made
    for backend in made.backends.values():
        backend.close()


@pytest.mark.real
@pytest.mark.parametrize("chunk", [7, 17, LENGTH])
def test_a_real_token_in_a_prefill_chunk(real: Subject, chunk: int) -> None:
    for backend in real.backends.values():
        test_a_token_in_a_prefill_chunk_of_any_size(real, backend, chunk)


@pytest.mark.real
def test_a_real_token_in_a_draft_and_in_a_tree(real: Subject) -> None:
    parents = TREES["comb"]
    for backend in real.backends.values():
        test_a_token_as_the_seventh_row_of_a_draft(real, backend, 26)
        tokens = plant(parents, real.prompt[31:], backend.config.vocab_size)
        assert_tree_is_true(real, real.prefix(backend, 31), parents, tokens)


@pytest.mark.real
def test_a_real_token_beside_fifteen_other_requests(real: Subject) -> None:
    for backend in real.backends.values():
        requests = crowd(real, backend, 16)
        logits = run(requests).logits
        start = 0
        for request in requests:
            for depth, row in enumerate(deepest_path(request.parents)):
                true = real.truth(real.prompt[: request.context_length + depth + 1])
                assert_same_bits(logits[start + row], true)
            start += len(request.tokens)
