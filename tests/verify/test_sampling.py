"""Every option changes the token as documented; the compiled sampler is the readable one, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.logit_edits import BadWords, TokenCounts
from paceline.core.params import SamplingParams
from paceline.core.sampling import SamplingState
from paceline.core.truncation import KEEPS_ALL, Truncation
from paceline.errors import BackendError, ExhaustedError
from paceline.verify import kernels
from paceline.verify.choosing import choose_token
from paceline.verify.logprobs import token_logprobs
from paceline.verify.sampling import Sampler
from tests.verify.reference import choose_token_reference, gumbel_reference, log_normalizer_reference
from tests.verify.truncations import EXAMPLES, TRUNCATIONS


def choose(logits, temperature=1.0, truncation=KEEPS_ALL, seed=0, position=0):
    options, key = (float(temperature), truncation), (np.uint64(seed), np.uint64(position))
    size = len(logits)
    scratch = np.empty(size), np.empty(size, dtype=np.int64), np.empty(size, dtype=np.int64)
    return choose_token(logits, options, scratch, key)


def sample(logits, params, prompt=(), output=(), ending=(), seed=0, bad_words=()):
    """The token that follows `output`."""
    state = SamplingState(params, seed, prompt, ending, bad_words=bad_words)
    for token in output:
        state.advance(token)
    logits = np.asarray(logits, dtype=np.float32)
    return Sampler(len(logits)).sample(state, logits, len(prompt) + len(output), len(output))


def frequencies(logits, draws=4000, temperature=1.0, **options):
    truncation = Truncation(**options)
    tokens = [
        choose(np.asarray(logits, dtype=np.float32), temperature, truncation, position=position)
        for position in range(draws)
    ]
    return np.bincount(tokens, minlength=len(logits)) / draws


@given(
    size=st.integers(1, 700),
    spread=st.sampled_from([0.0, 0.01, 1.0, 5.0, 50.0, 1e7]),
    ties=st.booleans(),
    masked=st.booleans(),
    temperature=st.sampled_from([1e-5, 0.1, 0.7, 1.0, 2.0, 100.0]),
    truncation=TRUNCATIONS,
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 100_000),
)
@settings(max_examples=200)
def test_compiled_sampler_chooses_what_the_reference_chooses(
    size, spread, ties, masked, temperature, truncation, seed, position
):
    rng = np.random.default_rng(seed % 2**32)
    logits = (rng.normal(size=size) * spread).astype(np.float32)
    if ties:
        logits = np.round(logits)
    if masked:
        logits[rng.random(size) < 0.5] = -np.inf
    expected = choose_token_reference(logits, temperature, truncation, seed, position)
    assert choose(logits, temperature, truncation, seed, position) == expected


@pytest.mark.parametrize("truncation", EXAMPLES)
@pytest.mark.parametrize("spread", [3.0, 0.02])
def test_compiled_sampler_agrees_on_a_vocabulary_of_real_size(truncation, spread):
    logits = (np.random.default_rng(1).normal(size=151_936) * spread).astype(np.float32)
    assert choose(logits, 0.9, truncation, 5, 9) == choose_token_reference(logits, 0.9, truncation, 5, 9)


@given(
    size=st.integers(1, 500),
    places=st.integers(1, 8),
    named=st.booleans(),
    spread=st.sampled_from([0.0, 1.0, 5.0, 50.0, 1e7]),
    seed=st.integers(0, 2**64 - 1),
)
@settings(max_examples=100)
def test_gumbel_top_k_gives_the_largest_sums_of_logit_and_noise(size, places, named, spread, seed):
    rng = np.random.default_rng(seed % 2**32)
    logits = (rng.normal(size=size) * spread).astype(np.float32)
    logits[rng.random(size) < 0.2] = -np.inf
    names = rng.choice(50_000, size, replace=False) if named else np.empty(0, dtype=np.int64)
    best = np.empty(places, dtype=np.int64), np.empty(places)
    found = kernels.gumbel_top_k((logits, names), 0.8, (np.uint64(seed), np.uint64(7)), best)
    noise = gumbel_reference(seed, 7, names if named else np.arange(size))
    scores = logits.astype(np.float64) / 0.8 + noise
    expected = np.argsort(-scores, kind="stable")[: min(places, np.isfinite(scores).sum())]
    assert best[0][:found].tolist() == expected.tolist()
    assert np.array_equal(best[1][:found], scores[expected])


def test_greedy_takes_the_largest_logit_and_the_lowest_id_of_equals():
    assert sample([0, 3, 1, 3], SamplingParams(temperature=0)) == 1


def test_samples_follow_the_softmax():
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    assert np.abs(frequencies(np.log(probabilities)) - probabilities).max() < 0.03


def test_temperature_sharpens_and_flattens():
    logits = np.log([0.7, 0.2, 0.1])
    assert np.abs(frequencies(logits, temperature=2.0) - np.sqrt([0.7, 0.2, 0.1]) / 1.6).max() < 0.04
    assert frequencies(logits, temperature=0.1)[0] > 0.99


def test_top_k_keeps_exactly_k_and_ties_keep_the_lowest_ids():
    kept = frequencies([1, 2, 2, 2, 0], top_k=2) > 0
    assert kept.tolist() == [False, True, True, False, False]


def test_top_p_keeps_the_fewest_that_reach_it():
    logits = np.log([0.4, 0.1, 0.3, 0.2])
    assert (frequencies(logits, top_p=0.65) > 0).tolist() == [True, False, True, False]
    assert (frequencies(logits, top_p=0.75) > 0).tolist() == [True, False, True, True]
    assert (frequencies(logits, top_p=0.01) > 0).tolist() == [True, False, False, False]


def test_top_p_is_measured_on_what_top_k_kept():
    logits = np.log([0.4, 0.1, 0.3, 0.2])  # the two of top_k=2 have 4/7 and 3/7
    assert (frequencies(logits, top_k=2, top_p=0.56) > 0).tolist() == [True, False, False, False]
    assert (frequencies(logits, top_k=2, top_p=0.6) > 0).tolist() == [True, False, True, False]


def test_min_p_keeps_what_is_near_the_likeliest():
    logits = np.log([0.5, 0.24, 0.26])
    assert (frequencies(logits, min_p=0.5) > 0).tolist() == [True, False, True]


def test_equal_seed_and_position_choose_equally_and_others_do_not():
    logits = np.zeros(1000, dtype=np.float32)
    tokens = [choose(logits, seed=1, position=position) for position in range(50)]
    assert tokens == [choose(logits, seed=1, position=position) for position in range(50)]
    assert tokens != [choose(logits, seed=2, position=position) for position in range(50)]


def test_logit_bias_is_added():
    assert sample([5, 0, 0], SamplingParams(temperature=0, logit_bias={2: 6})) == 2
    assert sample([5, 4, 0], SamplingParams(temperature=0, logit_bias={0: -100})) == 1


def test_repetition_penalty_counts_prompt_and_output():
    params = SamplingParams(temperature=0, repetition_penalty=2)
    assert sample([3, 2, 1], params, prompt=[0]) == 1
    assert sample([3, 2, 1], params, output=[0]) == 1
    assert sample([-1, -1.5, -9], params, prompt=[0]) == 1  # negative logits are multiplied


def test_presence_and_frequency_penalties_count_the_output_only():
    presence = SamplingParams(temperature=0, presence_penalty=2)
    assert sample([3, 2, 0], presence, prompt=[0]) == 0
    assert sample([3, 2, 0], presence, output=[0]) == 1
    frequency = SamplingParams(temperature=0, frequency_penalty=1)
    assert sample([3, 1.5, 0], frequency, output=[0]) == 0
    assert sample([3, 1.5, 0], frequency, output=[0, 0]) == 1


def test_min_tokens_forbids_endings_until_reached():
    params = SamplingParams(temperature=0, min_tokens=2)
    assert sample([9, 1, 2], params, ending=[0]) == 2
    assert sample([9, 1, 2], params, output=[2], ending=[0]) == 2
    assert sample([9, 1, 2], params, output=[2, 2], ending=[0]) == 0


def test_only_allowed_ids_are_sampled():
    params = SamplingParams(temperature=0, allowed_token_ids=[1, 2])
    assert sample([9, 1, 2], params) == 2
    assert sample([9, 3, -np.inf], params) == 1
    drawn = {sample([9, 1, 2], SamplingParams(allowed_token_ids=[1, 2]), seed=seed) for seed in range(50)}
    assert drawn == {1, 2}


def test_the_last_token_of_a_bad_word_is_banned_where_the_others_precede_it():
    greedy = SamplingParams(temperature=0)
    assert sample([9, 1, 2], greedy, bad_words=[[0]]) == 2
    words = [[1, 2, 0], [2, 0]]
    assert sample([9, 1, 2], greedy, bad_words=words) == 0
    assert sample([9, 1, 2], greedy, output=[2], bad_words=words) == 2
    assert sample([9, 1, 2], greedy, output=[1, 2], bad_words=words) == 2
    assert sample([9, 1, 2], greedy, output=[2, 1], bad_words=words) == 0
    assert sample([9, 1, 2], greedy, prompt=[2], bad_words=words) == 0  # the prompt does not count
    assert BadWords(words).after((1, 2)) == [0, 0]


def test_a_branch_has_bad_words_of_its_own_path():
    state = SamplingState(SamplingParams(temperature=0), 0, (), (), bad_words=[[2, 0]])
    logits, sampler = np.array([9, 1, 2], dtype=np.float32), Sampler(3)
    branch = state.branch([2])
    states = (state, branch, branch.branch([1]))
    assert [sampler.sample(each, logits, 1, 1) for each in states] == [0, 2, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_options_that_leave_no_token_are_an_error_that_names_them(temperature):
    params = SamplingParams(temperature=temperature, allowed_token_ids=[0, 1])
    with pytest.raises(ExhaustedError, match="allowed_token_ids, bad_words"):
        sample([1, 2, 3], params, output=[2], bad_words=[[0], [2, 1]])


def test_options_leave_the_models_logits_alone():
    logits = np.arange(5, dtype=np.float32)
    options = {"logit_bias": {1: 5}, "presence_penalty": 1, "allowed_token_ids": [1, 2]}
    sample(logits, SamplingParams(**options), output=[1], bad_words=[[2]])
    assert logits.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_logits_are_an_error_and_never_a_token(temperature, bad):
    with pytest.raises(BackendError, match="position 0"):
        sample([1, bad, 2], SamplingParams(temperature=temperature))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_allows_nothing_is_an_error(temperature):
    with pytest.raises(BackendError):
        sample([-np.inf] * 3, SamplingParams(temperature=temperature))


def test_counts_of_many_distinct_tokens():
    tokens = np.random.default_rng(0).integers(0, 500, 3000).tolist()
    counts = TokenCounts(tokens)
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == {
        token: tokens.count(token) for token in set(tokens)
    }


def test_logprobs_are_of_the_raw_distribution_with_the_chosen_token_and_ranks():
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3], dtype=np.float32))
    entries = token_logprobs(logits, 0, 2)
    assert list(entries) == [0, 1, 3]
    assert [entries[token].rank for token in entries] == [4, 1, 2]
    assert np.allclose([np.exp(entries[token].logprob) for token in entries], [0.1, 0.4, 0.3], atol=1e-6)
    assert list(token_logprobs(logits, 1, 2)) == [1, 3]
    assert list(token_logprobs(logits, 2, 0)) == [2]


def test_log_normalizer_has_the_bits_of_its_reference():
    rng = np.random.default_rng(3)
    for size in (1, 7, 1000, 50_000):
        logits = (rng.normal(size=size) * 10).astype(np.float32)
        assert kernels.log_normalizer(logits, float(logits.max())) == log_normalizer_reference(logits)
