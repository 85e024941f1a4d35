"""DeviceLoad: what the requests of device passes gain together."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from paceline.control.controller import Load
from paceline.control.planner.device_load import DeviceLoad
from tests.control.simulation import SimulatedRequest

LEFT = 60  # tokens of a request, mean


def after_batches(requests: int, outputs: np.ndarray) -> DeviceLoad:
    """The load of a batch of new requests, after batches with outputs of so many tokens."""
    load, named = DeviceLoad(), count()

    def batch() -> list[SimulatedRequest]:
        return [SimulatedRequest(str(next(named)), 1000, num_pending=2) for _ in range(requests)]

    for number in range(0, len(outputs), requests):
        running = batch()
        load.note(running, Load(requests, 0))
        for request, output in zip(running, outputs[number:], strict=False):
            request.num_output = request.max_output = round(output)  # it has ended
    load.note(batch(), Load(requests, 0))
    return load


def lengths(spread: float, shape: tuple[int, ...]) -> np.ndarray:
    """Tokens of outputs, of this relative standard deviation."""
    return np.random.default_rng(1).normal(LEFT, spread * LEFT, shape).clip(4)


@pytest.mark.parametrize("requests", [1, 4, 16, 64])
@pytest.mark.parametrize("spread", [0.0, 0.3])
@pytest.mark.parametrize("chances", [[0.4, 0.3], [0.8] * 7, [0.1, *[0.95] * 14]])
def test_a_batch_takes_as_many_passes_as_its_slowest_request(chances, spread, requests):
    """Compared with batches of requests whose drafts are accepted by chance. The last chances are those of a
    lookup that seldom finds something."""
    rng, batches = np.random.default_rng(0), 400
    outputs = lengths(spread, (batches, requests))
    drafted = []
    for wanted in outputs:
        right = rng.random((requests, int(wanted.max()) + 1, len(chances))) < chances
        tokens = 1 + np.cumprod(right, axis=2).sum(axis=2)  # [requests, passes]
        drafted.append(1 + (np.cumsum(tokens, axis=1) < wanted[:, None]).sum(axis=1).max())
    drafts = 1 + np.cumprod(rng.random((20_000, len(chances))) < chances, axis=1).sum(axis=1)
    load = after_batches(requests, lengths(spread, (640,)))
    expected = load.tokens(drafts.mean(), drafts.var())
    assert expected == pytest.approx(outputs.max(axis=1).mean() / np.mean(drafted), rel=0.12)


def test_where_others_follow_requests_that_end_every_accepted_token_counts():
    load = after_batches(16, lengths(0.0, (64,)))
    load.replaced = 1.0
    assert load.tokens(1.8, 0.9) == pytest.approx(1.8)
