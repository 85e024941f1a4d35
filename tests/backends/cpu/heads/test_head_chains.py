"""Chains drafted in one compiled call are those of one pass after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from paceline.backends.cpu import CpuBackend, CpuHeadRunner
from paceline.backends.head_chains import chains_by_passes
from paceline.backends.heads import ChainNoise, HeadBatch, HeadChains
from paceline.models.checkpoint import Checkpoint
from paceline.models.heads.checkpoint import HeadCheckpoint
from tests.backends.cpu.random_heads import extend, random_slots
from tests.models.heads.driver import batch_of, drive_heads, random_checkpoint
from tests.models.heads.tiny_heads import CONFIGS
from tests.verify.reference import gumbel_reference

PAGES = 6
# KV indices 17 and 33 begin pages; a request whose slots are all new, one with a single new one
LENGTHS, NEW = [12, 0, 29, 40], [3, 16, 4, 1]


@dataclass(frozen=True)
class Subject:
    """One head on several numbers of threads."""

    head: HeadCheckpoint
    runners: dict[int, CpuHeadRunner]

    def batch(self, threads: int, requests: Sequence[int]) -> HeadBatch:
        """A pass over the new tokens of these requests, the logits of whose last rows are wanted."""
        tokens, features, _ = random_slots(self.head.config, 60)
        driven = drive_heads(self.runners[threads], PAGES, len(LENGTHS))
        for request, length, new in zip(driven, LENGTHS, NEW, strict=True):
            if length:
                extend(request, tokens[:length], features[:length])
            request.ask(features[length : length + new], tokens[length : length + new])
        asked = [driven[number] for number in requests]
        ends = np.cumsum([NEW[number] for number in requests]) - 1
        return batch_of(asked, from_target=True, outputs=ends.tolist())

    def found(
        self,
        threads: int,
        requests: Sequence[int],
        most: Sequence[int],
        least: float,
        noise: ChainNoise | None = None,
    ) -> HeadChains:
        return self.runners[threads].run_chains(self.batch(threads, requests), most, least, noise)

    def expected(
        self, requests: Sequence[int], most: Sequence[int], least: float, noise: ChainNoise | None = None
    ) -> HeadChains:
        """The same, pass by pass, on one thread."""
        batch = self.batch(1, requests)
        return chains_by_passes(self.runners[1].run, batch, self.head.draft_ids, most, least, noise)


@pytest.fixture(scope="module", params=["all flags", "eagle3", "eagle with bias", "target's head"])
def subject(request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Checkpoint]) -> Iterator[Subject]:
    head, target = random_checkpoint(CONFIGS[request.param]), checkpoint_of("llama-attention-bias")
    backends = [CpuBackend.load(target, quantization="int8", threads=n, max_rows=8) for n in (1, 2, 3)]
    yield Subject(head, {b.threads: CpuHeadRunner(head, b, max_rows=96) for b in backends})
    for backend in backends:
        backend.close()


def assert_same(found: HeadChains, expected: HeadChains) -> None:
    assert found.lengths.tolist() == expected.lengths.tolist()
    for request, length in enumerate(expected.lengths):
        assert found.tokens[request, :length].tolist() == expected.tokens[request, :length].tolist()
        np.testing.assert_allclose(
            found.chances[request, :length], expected.chances[request, :length], rtol=1e-5
        )


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("requests", "most"), [([0], [6]), ([1], [1]), ([2, 3], [4, 9]), ([0, 1, 2, 3], [5, 2, 7, 1])]
)
def test_all_passes_in_one_call(subject, requests, most, threads):
    expected = subject.expected(requests, most, 0.0)
    assert expected.lengths.tolist() == most
    assert_same(subject.found(threads, requests, most, 0.0), expected)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("temperatures", [[3.0] * 4, [0.0, 4.0, 5.0, 0.0]])
def test_coupled_drafts_follow_the_noise_of_the_target(subject, temperatures, threads):
    every, most = range(4), [5, 2, 7, 4]
    noise = ChainNoise(np.array([1, 2, 3, 2**64 - 1], np.uint64), np.array(temperatures))
    expected = subject.expected(every, most, 0.0, noise)
    assert expected.lengths.tolist() == most
    assert_same(subject.found(threads, every, most, 0.0, noise), expected)
    likeliest = subject.expected(every, most, 0.0)
    follows = (likeliest.tokens != expected.tokens).any(axis=1)
    assert follows.tolist() == [temperature > 0.0 for temperature in temperatures]


def test_the_noise_of_a_drafted_token_is_that_of_its_position(subject):
    """A token drafted first is the token drafted after an accepted one."""
    request, noise = [2], ChainNoise(np.array([9], np.uint64), np.array([1.0]))
    first = subject.found(1, request, [1], 0.0, noise).tokens[0, 0]
    logits = subject.runners[1].run(subject.batch(1, request)).logits[0].astype(np.float64)
    ids = subject.head.draft_ids
    names = np.arange(len(logits)) if ids is None else ids
    position = LENGTHS[2] + NEW[2] + 1  # KV index 0 is no slot
    assert first == names[np.argmax(logits + gumbel_reference(9, position, names))]


def test_a_chain_ends_where_its_chance_becomes_too_small(subject):
    every, most = range(4), [9] * 4
    chances = np.sort(subject.expected(every, most, 0.0).chances.ravel())
    ends = set()
    for least in chances[::5] * 1.0001:  # between two chances, not at one
        expected = subject.expected(every, most, float(least))
        assert_same(subject.found(1, every, most, float(least)), expected)
        ends.add(tuple(expected.lengths.tolist()))
    assert len(ends) > 4
    assert any(0 in lengths for lengths in ends)


def test_a_pass_after_chains_is_a_plain_one(subject):
    runner = subject.runners[2]
    before = runner.run(subject.batch(2, [0, 2])).logits.copy()
    subject.found(2, [0, 2], [5, 5], 0.0)
    assert (runner.run(subject.batch(2, [0, 2])).logits == before).all()


def test_logits_of_nan_draft_no_token(subject):
    batch = subject.batch(1, [0, 3])
    batch.states[-1] = np.nan
    chains = subject.runners[1].run_chains(batch, [3, 3], 0.0)
    assert chains.lengths.tolist() == [3, 0]
