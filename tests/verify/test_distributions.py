"""The target's distribution and its best candidates are those that the sampler itself draws from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.core.params import SamplingParams
from paceline.core.sampling import SamplingState
from paceline.core.truncation import KEEPS_ALL
from paceline.errors import BackendError
from paceline.verify.draws import draw, uniform
from paceline.verify.noise import STREAM_ACCEPT, STREAM_DRAFT, STREAM_RESIDUAL
from paceline.verify.sampling import Sampler
from tests.verify.reference import (
    draw_reference,
    gumbel_reference,
    probabilities_reference,
    uniform_reference,
)
from tests.verify.truncations import TRUNCATIONS

OPTIONS = st.sampled_from([0.1, 0.7, 1.0, 2.0]), TRUNCATIONS  # temperature, truncation


def some_logits(seed, size, spread=2.0, ties=False, masked=False):
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=size) * spread).astype(np.float32)
    if ties:
        logits = np.round(logits)
    if masked:
        logits[rng.random(size) < 0.5] = -np.inf
        logits[0] = 0.0
    return logits


def state_of(seed=0, prompt=(), ending=(), **options):
    return SamplingState(SamplingParams(**options), seed, prompt, ending)


@given(*OPTIONS, st.integers(1, 700), st.booleans(), st.booleans(), st.integers(0, 2**32 - 1))
@example(0.7, KEEPS_ALL, 160, True, False, 187)
@settings(max_examples=150)
def test_the_distribution_is_what_the_sampler_draws_from(temperature, truncation, size, ties, masked, seed):
    logits = some_logits(seed, size, ties=ties, masked=masked)
    sampler = Sampler(size)
    target = state_of(seed, temperature=temperature, **truncation._asdict())
    probs = sampler.probabilities(target, logits, 0)
    reference = probabilities_reference(logits, temperature, truncation)
    assert np.array_equal(probs > 0, reference > 0)
    assert np.abs(probs - reference).max() < 1e-15
    assert abs(probs.sum() - 1) < 1e-12
    kept = np.flatnonzero(probs)
    gumbel_top_k = np.log(probs[kept]) + gumbel_reference(seed, 9, kept)
    assert kept[np.argmax(gumbel_top_k)] == sampler.sample(target, logits, 9, 0)


@given(*OPTIONS, st.integers(1, 700), st.integers(1, 9), st.booleans(), st.integers(0, 2**32 - 1))
@settings(max_examples=150)
def test_candidates_are_the_best_of_the_distribution(temperature, truncation, size, count, coupled, seed):
    logits = some_logits(seed, size)
    sampler = Sampler(size)
    target = state_of(seed, temperature=temperature, **truncation._asdict())
    ids, log_probs = sampler.candidates(target, logits, 9, 0, count, coupled)
    probs = sampler.probabilities(target, logits, 0)
    kept = np.flatnonzero(probs)
    gumbel_top_k = np.log(probs[kept]) + (gumbel_reference(seed, 9, kept) if coupled else 0.0)
    assert ids.tolist() == kept[np.argsort(-gumbel_top_k, kind="stable")][:count].tolist()
    assert np.abs(log_probs - np.log(probs[ids])).max() < 1e-12
    if coupled:
        assert ids[0] == sampler.sample(target, logits, 9, 0)


def test_at_temperature_0_the_distribution_is_one_hot_and_candidates_go_by_the_logits():
    logits = np.array([1, 5, 5, -np.inf, 3], dtype=np.float32)
    target, sampler = state_of(temperature=0), Sampler(5)
    assert sampler.probabilities(target, logits, 0).tolist() == [0, 1, 0, 0, 0]
    for coupled in (False, True):
        ids, log_probs = sampler.candidates(target, logits, 0, 0, 9, coupled)
        assert ids.tolist() == [1, 2, 4, 0]
        assert np.allclose(np.exp(log_probs), np.exp([5, 5, 3, 1]) / np.exp([5, 5, 3, 1]).sum())


def test_the_distribution_knows_bias_endings_and_penalties_of_the_path():
    logits = np.zeros(4, dtype=np.float32)
    sampler = Sampler(4)
    target = state_of(min_tokens=2, ending=[0], logit_bias={1: np.log(2.0)}, presence_penalty=np.log(3.0))
    assert np.allclose(sampler.probabilities(target, logits, 0), [0, 0.5, 0.25, 0.25])
    after = target.branch([3, 3])
    assert np.allclose(sampler.probabilities(after, logits, 2) * 13, [3, 6, 3, 1])
    assert np.allclose(sampler.probabilities(target, logits, 2) * 5, [1, 2, 1, 1]), "the branch changed it"


def test_a_branch_costs_nothing_where_the_path_does_not_matter():
    target = state_of(top_k=5)
    assert target.branch([1, 2, 3]) is target


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[1, np.nan], [np.inf, 0], [-np.inf, -np.inf]])
def test_unusable_logits_are_an_error(temperature, bad):
    logits, sampler = np.array(bad, dtype=np.float32), Sampler(2)
    target = state_of(temperature=temperature)
    with pytest.raises(BackendError, match="damaged"):
        sampler.probabilities(target, logits, 0)
    with pytest.raises(BackendError, match="damaged"):
        sampler.candidates(target, logits, 0, 0, 1, True)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 2**24 - 1))
@settings(max_examples=50)
def test_compiled_uniforms_have_the_bits_of_the_reference(seed, position, node):
    for stream in (STREAM_DRAFT, STREAM_ACCEPT, STREAM_RESIDUAL):
        assert uniform(seed, position, stream, node) == uniform_reference(seed, position, stream, node)


def test_every_part_of_the_key_gives_other_noise():
    keys = [(s, p, t, n) for s in (0, 1) for p in (0, 1, 2**33) for t in (2, 3, 4) for n in (0, 1, 256)]
    assert len({uniform(*key) for key in keys}) == len(keys)


@given(st.integers(0, 2**32 - 1), st.integers(1, 300), st.integers(0, 5))
@settings(max_examples=80)
def test_compiled_draws_are_those_of_the_reference_and_never_of_probability_0(seed, size, num_taken):
    rng = np.random.default_rng(seed)
    probs = rng.random(size) * (rng.random(size) < 0.5)
    taken = rng.integers(0, size, num_taken).tolist()
    for node in range(5):
        token = draw(probs, seed, 7, STREAM_DRAFT, node, taken)
        assert token == draw_reference(probs, taken, uniform(seed, 7, STREAM_DRAFT, node))
        assert (token == -1) == (np.delete(probs, taken).sum() == 0)
        assert token == -1 or (probs[token] > 0 and token not in taken)


def test_draws_without_replacement_follow_what_is_left():
    probs = np.array([0.5, 0.2, 0.0, 0.3])
    tokens = [draw(probs, 3, position, STREAM_DRAFT, 0, [0]) for position in range(20_000)]
    assert np.abs(np.bincount(tokens, minlength=4) / 20_000 - [0, 0.4, 0, 0.6]).max() < 0.01


@given(*OPTIONS, st.booleans(), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_candidates_among_known_ids_are_those_of_a_row_where_nothing_else_is_possible(
    temperature, truncation, coupled, seed
):
    known = np.sort(np.random.default_rng(seed).permutation(3000)[:1100])  # more than one block of noise
    logits = some_logits(seed, len(known))
    row = np.full(3000, -np.inf, dtype=np.float32)
    row[known] = logits
    target, sampler = state_of(seed, temperature=temperature, **truncation._asdict()), Sampler(3000)
    ids, log_probs = sampler.candidates(target, logits, 9, 0, 7, coupled, known)
    expected, expected_log_probs = sampler.candidates(target, row, 9, 0, 7, coupled)
    assert ids.tolist() == expected.tolist()
    assert np.abs(log_probs - expected_log_probs).max() < 1e-12
