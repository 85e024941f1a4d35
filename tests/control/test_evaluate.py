"""The expected outcome of a candidate: compiled, and the same in numpy."""

import numpy as np
import pytest

from paceline.control.planner.evaluate import evaluate


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
