"""The law of acceptance: it finds what data and layers bring, and says how sure it is."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from paceline.errors import ConfigError
from paceline.train.plan.choose import StepCosts, choices
from paceline.train.plan.law import Law, Pilot

LAYERS, TOKENS = (1, 2, 5), (1e5, 2e5, 4e5)


def survival(layers: float, tokens: float, noise: float = 0.0) -> tuple[float, ...]:
    """Of heads that follow the law: three positions, each harder than the one before."""
    bases = np.array([-4.0, -4.6, -5.0])
    logits = bases + 0.35 * np.log(tokens) + 0.3 * np.log(layers) + noise
    return tuple((1 / (1 + np.exp(-logits))).cumprod().tolist())


def pilots(noises: np.ndarray | None = None) -> list[Pilot]:
    sizes = list(product(LAYERS, TOKENS))
    noises = np.zeros(len(sizes)) if noises is None else noises
    return [
        Pilot(layers, 64, int(tokens), survival(layers, tokens, noise), seconds_per_token=1e-3 * layers)
        for (layers, tokens), noise in zip(sizes, noises, strict=True)
    ]


def test_a_head_that_follows_the_law_is_predicted_exactly() -> None:
    law = Law(pilots())
    predicted = law.predict(8, 1e7)
    assert predicted.length == pytest.approx(1 + sum(survival(8, 1e7)), abs=1e-3)
    assert predicted.low < predicted.length < predicted.high


def test_the_interval_is_wider_for_noisy_pilots_and_far_from_them() -> None:
    noisy = Law(pilots(np.random.default_rng(0).normal(0, 0.15, 9)))
    exact = Law(pilots())

    def width(law: Law, tokens: float) -> float:
        predicted = law.predict(2, tokens)
        return predicted.high - predicted.low

    assert width(noisy, 2e5) > 2 * width(exact, 2e5)
    assert width(noisy, 1e7) > 1.5 * width(noisy, 2e5)


def test_the_interval_holds_the_truth_nine_times_of_ten() -> None:
    random = np.random.default_rng(1)
    truth = 1 + sum(survival(5, 2e6))
    hits = 0
    for _ in range(100):
        predicted = Law(pilots(random.normal(0, 0.1, 9))).predict(5, 2e6)
        hits += predicted.low <= truth <= predicted.high
    assert hits >= 85


def test_pilots_as_many_as_the_terms_of_the_law_tell_nothing_of_its_error() -> None:
    two = [pilot for pilot in pilots() if pilot.layers == 2][:2]
    predicted = Law(two).predict(2, 1e7)
    assert (predicted.low, predicted.high) == (1.0, 4.0)
    assert Law(two).predict(2, 1e7, drafts=2).high == 3.0
    assert not Law(two).has_interval
    assert Law([pilot for pilot in pilots() if pilot.layers == 2]).has_interval


def test_one_size_of_head_is_enough_but_one_amount_of_data_is_not() -> None:
    one_size = [pilot for pilot in pilots() if pilot.layers == 2]
    assert Law(one_size).predict(2, 1e6).length == pytest.approx(1 + sum(survival(2, 1e6)), abs=1e-3)
    with pytest.raises(ConfigError, match="give two or more numbers of --steps"):
        Law([pilot for pilot in pilots() if pilot.tokens == 1e5])


def test_positions_that_never_or_always_match_have_a_finite_law() -> None:
    extremes = [Pilot(1, 64, tokens, (1.0, 0.0, 0.0), 1e-3) for tokens in (1000, 2000)]
    assert 1.9 < Law(extremes).predict(1, 1e6).length < 2.1


def test_the_fastest_head_is_not_the_best_guesser_where_its_step_is_slow() -> None:
    law, costs = Law(pilots()), StepCosts(plain=0.010, drafted={1: {64: {3: 0.013}}, 5: {64: {3: 0.030}}})
    found = choices({64: law}, pilots(), costs, answered_tokens=1_000_000, epochs=(1, 3))
    assert [(choice.layers, choice.epochs) for choice in found] == [(1, 3), (1, 1), (5, 3), (5, 1)]
    best, deep = found[0], found[2]
    assert deep.acceptance.length > best.acceptance.length
    assert best.speedup == pytest.approx(best.acceptance.length * 0.010 / 0.013)
    assert best.hours == pytest.approx(3 * 1_000_000 * 1e-3 / 3600)
    assert best.more_data > 1


def test_a_block_ends_where_a_further_token_is_not_worth_its_rows() -> None:
    law, pilot = Law(pilots()), [each for each in pilots() if each.layers == 1]
    lengths = [law.predict(1, 1e6, drafts).length for drafts in (1, 2, 3)]
    assert lengths == sorted(lengths)
    assert lengths[-1] == law.predict(1, 1e6).length

    def block(slowest: float) -> int:
        costs = StepCosts(plain=0.010, drafted={1: {64: {1: 0.012, 3: slowest}}})
        return choices({64: law}, pilot, costs, answered_tokens=1_000_000, epochs=(1,))[0].drafts

    assert (block(0.0121), block(0.100)) == (3, 1)


def test_a_larger_vocabulary_is_chosen_where_it_is_worth_its_time() -> None:
    own = [each for each in pilots() if each.layers == 1]
    small = [
        replace(each, vocabulary=16, survival=tuple(0.8 * rate for rate in each.survival)) for each in own
    ]
    laws = {16: Law(small), 64: Law(own)}
    gain = laws[64].predict(1, 1e6, 3).length / laws[16].predict(1, 1e6, 3).length

    def chosen(slowest: float) -> tuple[int, float]:
        costs = StepCosts(plain=0.010, drafted={1: {16: {3: 0.012}, 64: {3: slowest}}})
        best = choices(laws, [*small, *own], costs, answered_tokens=1_000_000, epochs=(1,))[0]
        return best.vocabulary, best.step_seconds

    assert chosen(0.99 * gain * 0.012) == (64, 0.99 * gain * 0.012)
    assert chosen(1.01 * gain * 0.012) == (16, 0.012)


def test_times_of_vocabularies_between_the_timed_ones_are_interpolated() -> None:
    costs = StepCosts(0.010, {1: {16: {2: 0.012, 3: 0.014}, 64: {2: 0.020, 3: 0.022}}})
    assert dict(costs.of(1, 40)) == pytest.approx({2: 0.016, 3: 0.018})
