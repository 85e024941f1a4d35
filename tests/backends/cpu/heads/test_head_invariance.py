"""A slot of a draft head has the same bits alone, in a chunk, in a tree, in a crowd, on any threads.

The truth is one thread, one request, one slot at a time. Acceptance must not depend on what else runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.backends.cpu import CpuBackend, CpuHeadRunner
from paceline.backends.heads import HeadOutput
from paceline.models.checkpoint import Checkpoint
from tests.backends.cpu.numbers import assert_same_bits
from tests.backends.cpu.random_heads import draft, extend, random_slots
from tests.backends.cpu.subject import TREES, path_to
from tests.models.heads.driver import DrivenHead, drive_heads, random_checkpoint, run_heads
from tests.models.heads.tiny_heads import CONFIGS

LENGTH = 60
PAGES = 6
KINDS = [("all flags", "int8"), ("eagle3", "none"), ("eagle with bias", "int8")]


class Subject:
    """One head on several numbers of threads, and its truth."""

    def __init__(self, name: str, backends: dict[int, CpuBackend]) -> None:
        head = random_checkpoint(CONFIGS[name])
        self.backends = backends
        self.runners = {
            threads: CpuHeadRunner(head, backend, max_rows=96) for threads, backend in backends.items()
        }
        self.tokens, self.features, self.states = random_slots(head.config, LENGTH)
        self.chain = self._alone()
        # of nodes that feed themselves: by the length before them, and their path's rows and tokens
        self._nodes: dict[tuple[int, tuple[tuple[int, int], ...]], HeadOutput] = {}

    def _alone(self) -> HeadOutput:
        """Every slot that the target feeds, one after the other."""
        request = drive_heads(self.runners[1], PAGES)[0]
        slots = zip(self.tokens, self.features, strict=True)
        return joined([extend(request, [token], feature[None]) for token, feature in slots])

    def prefix(self, threads: int, length: int) -> DrivenHead:
        """A request with `length` slots, computed at once and without a word."""
        request = drive_heads(self.runners[threads], PAGES)[0]
        if length:
            asked = request.ask(self.features[:length], self.tokens[:length])
            run_heads([asked], from_target=True, outputs=[])
        return request

    def node(self, length: int, tokens: Sequence[int], path: Sequence[int]) -> HeadOutput:
        """The last node of a path that feeds itself: its nodes alone, one after the other."""
        steps = tuple((row, tokens[row]) for row in path)
        if (length, steps) not in self._nodes:
            request = self.prefix(1, length)
            for depth, (row, token) in enumerate(steps, 1):
                self._nodes[length, steps[:depth]] = draft(request, [token], self.states[row : row + 1])
                request.length += 1
        return self._nodes[length, steps]


@pytest.fixture(scope="module", params=KINDS, ids=["-".join(kind) for kind in KINDS])
def subject(request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Checkpoint]) -> Iterator[Subject]:
    name, quantization = request.param
    target = checkpoint_of("llama-attention-bias")
    backends = {
        n: CpuBackend.load(target, quantization=quantization, threads=n, max_rows=8) for n in (1, 2, 3)
    }
    yield Subject(name, backends)
    for backend in backends.values():
        backend.close()


def joined(parts: Sequence[HeadOutput]) -> HeadOutput:
    return HeadOutput(np.concatenate([p.logits for p in parts]), np.concatenate([p.states for p in parts]))


def rows_of(output: HeadOutput, rows: slice | np.ndarray) -> HeadOutput:
    return HeadOutput(output.logits[rows], output.states[rows])


def assert_same(found: HeadOutput, expected: HeadOutput) -> None:
    assert_same_bits(found.logits, expected.logits)
    assert_same_bits(found.states, expected.states)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("chunk", [2, 3, 7, 8, 16, 17, LENGTH])
def test_a_row_in_a_chunk_of_any_size(subject: Subject, chunk: int, threads: int) -> None:
    request = drive_heads(subject.runners[threads], PAGES)[0]
    for start in range(0, LENGTH, chunk):
        part = slice(start, start + chunk)
        output = extend(request, subject.tokens[part], subject.features[part])
        assert_same(output, rows_of(subject.chain, part))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("parents", TREES.values(), ids=TREES)
def test_a_row_as_a_node_of_a_tree(subject: Subject, parents: list[int], threads: int) -> None:
    for length in (14, 15, 16, 31):
        assert_tree_is_true(subject, subject.prefix(threads, length), parents, subject.tokens)


def assert_tree_is_true(
    subject: Subject, request: DrivenHead, parents: list[int], tokens: Sequence[int]
) -> None:
    length, nodes = request.length - 1, len(parents)
    found = draft(request, tokens[:nodes], subject.states[:nodes], parents)
    paths = [path_to(parents, row) for row in range(nodes)]
    for path in sorted(paths, key=len, reverse=True):  # the others are on the way of these
        subject.node(length, tokens, path)
    assert_same(found, joined([subject.node(length, tokens, path) for path in paths]))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_beside_other_requests(subject: Subject, threads: int) -> None:
    lengths, counts = [0, 11, 16, 40, 31, 5], [20, 1, 3, 2, 1, 30]
    requests = drive_heads(subject.runners[threads], PAGES, len(lengths))
    parts = []
    for request, length, count in zip(requests, lengths, counts, strict=True):
        if length:
            extend(request, subject.tokens[:length], subject.features[:length])
        parts.append(slice(length, length + count))
        request.ask(subject.features[parts[-1]], subject.tokens[parts[-1]])
    rows = np.concatenate([np.arange(LENGTH)[part] for part in parts])
    wanted = [3, 19, 20, 23, 25, 26, 56]
    output = run_heads(requests, from_target=True, outputs=wanted)
    assert_same(output, rows_of(subject.chain, rows[wanted]))


@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data(), length=st.integers(0, 40), threads=st.sampled_from([1, 2]))
def test_any_tree_anywhere(subject: Subject, data: st.DataObject, length: int, threads: int) -> None:
    size = data.draw(st.integers(1, 16))
    parents = [data.draw(st.integers(-1, row - 1)) for row in range(size)]
    tokens = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    assert_tree_is_true(subject, subject.prefix(threads, length), parents, tokens)


def test_a_wrong_state_is_noticed(subject: Subject) -> None:
    request = subject.prefix(1, 20)
    states = subject.states[:4].copy()
    states[1, 0] += 0.1
    found = draft(request, subject.tokens[:4], states, [-1, 0, 0, 1])
    expected = subject.node(20, subject.tokens, [0, 1, 3])
    with pytest.raises(AssertionError, match="floats differ"):
        assert_same_bits(found.logits[3:], expected.logits)
