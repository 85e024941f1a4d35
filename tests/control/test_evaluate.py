"""The expected outcome of a candidate: compiled, and the same in numpy."""

import numpy as np
import pytest

from paceline.control.planner.evaluate import (
    best_rate,
    count_nodes,
    evaluate,
    evaluate_lengths,
    likely_nodes,
    play_cascade,
    worth_above,
)


def written_out(chances, sizes, most, costs, catch_up, spent, rate):
    """The numpy reference."""
    scenarios = len(chances)
    nodes = np.sort(chances.reshape(scenarios, -1), axis=-1)[:, ::-1]
    worth = np.concatenate([np.zeros((scenarios, 1)), np.cumsum(nodes, axis=-1)], axis=-1)
    stops = np.argmax(worth - rate * spent[: worth.shape[1]], axis=-1)
    seconds = spent[stops]
    for own, levels, (call, request, level, node, _), behind in zip(
        sizes, most, costs, catch_up, strict=True
    ):
        asked = own >= 0
        looked_at = np.minimum(np.maximum(own, 0).max(axis=-1) + 1, levels) * asked.any(axis=-1)
        drafted = np.maximum(own, 0).sum(axis=-1)
        seconds = seconds + call * asked.any(axis=-1) + request * asked.sum(axis=-1) + level * looked_at
        seconds = seconds + node * drafted + (asked * behind).sum(axis=-1)
    return np.take_along_axis(worth, stops[:, None], axis=-1).mean(), seconds.mean(), stops.mean()


@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("drafters", [0, 1, 2])
def test_equals_the_numpy_reference(requests, drafters):
    random = np.random.default_rng(requests + 10 * drafters)
    for _ in range(20):
        chances = random.uniform(size=(6, requests, 5)) * (random.uniform(size=(6, requests, 5)) < 0.7)
        sizes = random.integers(-1, 6, size=(drafters, 6, requests))
        most, costs = random.integers(1, 6, size=drafters), random.uniform(size=(drafters, 5))
        catch_up = random.uniform(size=(drafters, requests))
        spent = np.cumsum(random.uniform(size=5 * requests + 1))
        rate = random.uniform(0.2, 2.0)
        given = chances, sizes, most, costs, catch_up, spent, rate
        assert evaluate(*given) == pytest.approx(written_out(*given))


def drafts(nodes: int, seed: int = 0) -> np.ndarray:
    """Chances of drafts of different sizes: 6 scenarios, 3 requests."""
    random = np.random.default_rng(seed)
    is_drafted = np.arange(nodes) < random.integers(0, nodes + 1, size=(6, 3, 1))
    return -np.sort(-random.uniform(size=(6, 3, nodes))) * is_drafted


def test_lengths_are_candidates_of_shorter_drafts():
    chances, lengths = drafts(5), np.array([1, 2, 5])
    terms, behind, spent = np.array([3e-4, 1e-5, 2e-4, 1e-6, 0.0]), np.zeros(3), np.linspace(4e-3, 9e-3, 16)
    outcomes = evaluate_lengths(chances, lengths, 4, terms[None], behind[None], spent, 250.0)
    for length, outcome in zip(lengths, outcomes, strict=True):
        shorter = chances[:, :, :length]
        sizes = np.count_nonzero(shorter, axis=2)[None]
        given = sizes, [min(length, 4)], [terms], [behind], spent, 250.0
        assert outcome.tolist() == pytest.approx(written_out(shorter, *given))


def test_drafts_without_unlikely_nodes_and_what_they_are_worth():
    chances = drafts(5)
    likely = likely_nodes(chances, 0.4, 3)
    np.testing.assert_array_equal(likely, (chances * (chances >= 0.4))[:, :, :3])
    worth, sizes = worth_above(likely, 0.1)
    np.testing.assert_allclose(worth, np.maximum(likely - 0.1, 0.0).sum(axis=2).mean(axis=0))
    np.testing.assert_allclose(sizes, count_nodes(likely)[0].mean(axis=0))


def test_a_cascade_asks_the_second_where_the_first_has_too_little():
    one, other, enough = drafts(5), drafts(3, seed=1), np.array([0.3, 0.9, 2.0])
    chances, (first, second) = play_cascade(one, other, 0.1, enough)
    asked = np.maximum(one - 0.1, 0.0).sum(axis=2) < enough
    assert 0 < asked.sum() < asked.size
    np.testing.assert_array_equal(chances[~asked], one[~asked])
    np.testing.assert_array_equal(chances[asked][:, :3], other[asked])
    assert not chances[asked][:, 3:].any()
    np.testing.assert_array_equal(first, np.count_nonzero(one, axis=2))
    np.testing.assert_array_equal(second, np.where(asked, np.count_nonzero(other, axis=2), -1))


def test_the_best_rate_is_that_of_the_best_number_of_rows():
    spent = np.array([4e-3, 4.1e-3, 4.2e-3, 9e-3, 9.1e-3])
    tokens = 2.0 + np.array([0.0, 0.9, 0.9 + 0.9, 1.8 + 0.81, 2.61 + 0.81])  # of 2 requests
    best = (tokens / (spent + 1e-5 * tokens)).max()
    assert best_rate(spent, 2, 0.9, 2.0, 1e-5) == pytest.approx(best)
