"""A model and its truth, for the tests of batch invariance: each token alone, on one thread, in order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from paceline.backends.cpu import CpuBackend
from paceline.models.checkpoint import Checkpoint
from tests.backends.cpu.numbers import assert_same_bits
from tests.backends.driver import Driven, drive, run

LENGTH = 70  # four pages and a bit
PAGES = 7

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

    def __init__(self, backends: dict[int, CpuBackend], prompt: list[int], name: str = "") -> None:
        self.name = name
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
        if self._alone.states is not None and shared < len(self._said):
            shared = 0  # a state cannot go back
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


def copy_prefix(known: Driven, request: Driven, length: int) -> None:
    """Give a request the keys and values that another of the same pool has computed for the same tokens."""
    places = [np.array([one.place(index) for index in range(length)], np.int32) for one in (known, request)]
    request.backend.move(request.pool, *places)
    request.context_length = length


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


def assert_chunks_are_true(subject: Subject, backend: CpuBackend, chunk: int) -> None:
    """The whole prompt in chunks of this size: every token has the logits of the token alone."""
    request, prompt = drive(backend, PAGES)[0], subject.prompt
    logits = [request.extend(prompt[start : start + chunk]) for start in range(0, LENGTH, chunk)]
    expected = [subject.truth(prompt[: end + 1]) for end in range(LENGTH)]
    assert_same_bits(np.concatenate(logits), np.stack(expected))


def assert_seventh_is_true(subject: Subject, backend: CpuBackend, context: int) -> None:
    """The seventh row of a drafted chain has the logits of the token alone."""
    logits = subject.prefix(backend, context).run(subject.prompt[context : context + 7])
    assert_same_bits(logits[6], subject.truth(subject.prompt[: context + 7]))


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


def crowd(subject: Subject, backend: CpuBackend, count: int) -> list[Driven]:
    """Requests at different lengths: decodes, drafts as chains and as trees, and prefill chunks."""
    shapes = list(TREES.values())
    first, *requests = drive(backend, PAGES, count + 1)
    prefill(first, subject.prompt[:50])
    for number, request in enumerate(requests):
        length = (5 * number + 11) % 50
        if number % 4 != 3:  # every fourth begins with its prefill
            copy_prefix(first, request, length)
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


def load(
    checkpoint: Checkpoint, quantization: str, threads: Sequence[int], max_rows: int, name: str = ""
) -> Subject:
    backends = {
        count: CpuBackend.load(checkpoint, quantization=quantization, threads=count, max_rows=max_rows)
        for count in threads
    }
    vocab_size = checkpoint.config.vocab_size
    prompt = np.random.default_rng(17).integers(0, vocab_size, LENGTH).tolist()
    return Subject(backends, prompt, name)
