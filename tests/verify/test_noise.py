"""The noise is Philox, a pure function of (seed, position, id), and the same bits in both writings."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.verify import kernels
from paceline.verify.noise import STREAM_SEEDS, derive_seed
from tests.verify.reference import (
    exp_reference,
    gumbel_reference,
    log_reference,
    noise_bits_reference,
    philox_reference,
)

SEEDS = st.integers(0, 2**64 - 1)


def word(value: int) -> np.ndarray:
    return np.array([value], dtype=np.uint64)


# the known answers that the authors of Philox publish for 4x32 with 10 rounds
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
            (0xFFFFFFFF, 0xFFFFFFFF),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(counter, key, expected):
    words = philox_reference(tuple(word(value) for value in counter), key)
    assert tuple(int(value[0]) for value in words) == expected


@given(SEEDS, st.integers(0, 2**40), st.lists(st.integers(0, 300_000), min_size=1, max_size=50))
@settings(max_examples=50)
def test_compiled_gumbel_noise_has_the_bits_of_the_reference(seed, position, ids):
    ids = np.array(ids, dtype=np.int64)
    reference = gumbel_reference(seed, position, ids)
    compiled = kernels.gumbel(np.uint64(seed), np.uint64(position), ids)
    assert np.array_equal(reference.view(np.int64), compiled.view(np.int64))


def test_noise_of_an_id_does_not_depend_on_which_others_are_asked():
    everything = gumbel_reference(7, 3, np.arange(1000))
    some = np.array([1, 2, 500, 999])
    assert np.array_equal(gumbel_reference(7, 3, some), everything[some])


def test_seed_position_and_id_each_change_the_noise():
    base = noise_bits_reference(1, 1, np.arange(64))
    assert not (base == noise_bits_reference(2, 1, np.arange(64))).any()
    assert not (base == noise_bits_reference(1 + 2**32, 1, np.arange(64))).any()
    assert not (base == noise_bits_reference(1, 2, np.arange(64))).any()
    assert len(np.unique(base)) == 64


def test_gumbel_noise_is_finite_and_distributed_as_gumbel():
    noise = gumbel_reference(123, 0, np.arange(200_000))
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - 0.5772) < 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.02
    # the share under x is exp(-exp(-x))
    for x in (-1.0, 0.0, 1.0, 4.0):
        assert abs((noise < x).mean() - math.exp(-math.exp(-x))) < 0.005


def test_the_extreme_uniforms_give_finite_noise():
    for bits in (0, 2**64 - 1):
        value = kernels.gumbel_of_bits(np.uint64(bits))
        assert math.isfinite(value)
    assert 36 < kernels.gumbel_of_bits(np.uint64(2**64 - 1)) < 37.5


@given(st.floats(1e-300, 1e300))
def test_our_logarithm_is_right_to_the_last_places(x):
    expected = math.log(x)
    assert abs(float(log_reference(np.array(x))) - expected) <= 1e-15 * max(abs(expected), 1e-15)


@given(st.floats(-690, 0))
def test_our_exponential_is_right_to_the_last_places(x):
    assert abs(float(exp_reference(np.array(x))) / math.exp(x) - 1) < 1e-15


def test_compiled_logarithm_and_exponential_have_the_bits_of_the_reference():
    rng = np.random.default_rng(0)
    positive = np.concatenate([rng.random(2000), np.exp(rng.normal(size=2000) * 100), [1.0, 0.5, 2.0**-52]])
    negative = np.concatenate([-rng.random(2000) * 800, [0.0, -1e-300, -1e9]])
    log = np.array([kernels.log(float(x)) for x in positive])
    exp = np.array([kernels.exp(float(x)) for x in negative])
    assert np.array_equal(log.view(np.int64), log_reference(positive).view(np.int64))
    assert np.array_equal(exp.view(np.int64), exp_reference(negative).view(np.int64))


def test_derived_seeds_differ_and_repeat():
    seeds = [derive_seed(0, index) for index in range(1000)]
    assert len(set(seeds)) == 1000
    assert seeds == [derive_seed(0, index) for index in range(1000)]
    assert derive_seed(1, 0) != derive_seed(0, 0)


@given(seed=SEEDS, index=st.integers(0, 2**40))
def test_derived_seeds_are_the_noise_of_their_stream(seed: int, index: int) -> None:
    bits = noise_bits_reference(seed, index, np.zeros(1, dtype=np.int64), lane=STREAM_SEEDS)
    assert derive_seed(seed, index) == int(bits[0])
