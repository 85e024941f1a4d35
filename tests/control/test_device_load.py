"""DeviceLoad: what the requests of device passes gain together."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.control.controller import Load
from paceline.control.planner.device_load import DeviceLoad
from tests.control.simulation import SimulatedRequest

LEFT = 60  # tokens of each request


def load_of(requests: int) -> DeviceLoad:
    """A batch of new requests that nothing follows."""
    load = DeviceLoad()
    load.replaced = 0.0
    load.note([SimulatedRequest(str(number), 100) for number in range(requests)], Load(requests, 0))
    load.tokens_left = LEFT
    return load


@pytest.mark.parametrize("requests", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("chances", [[0.4, 0.3], [0.8] * 7, [0.1, *[0.95] * 14]])
def test_a_batch_takes_as_many_passes_as_its_slowest_request(chances, requests):
    """Compared with batches of requests whose drafts are accepted by chance. The last chances are those of a
    lookup that seldom finds something."""
    rng = np.random.default_rng(0)
    passes = []
    for _ in range(400):
        right = rng.random((requests, LEFT, len(chances))) < chances
        tokens = 1 + np.cumprod(right, axis=2).sum(axis=2)  # [requests, passes]
        passes.append(1 + (np.cumsum(tokens, axis=1) < LEFT).sum(axis=1).max())
    drafts = 1 + np.cumprod(rng.random((20_000, len(chances))) < chances, axis=1).sum(axis=1)
    expected = load_of(requests).tokens(drafts.mean(), drafts.var())
    assert expected == pytest.approx(LEFT / np.mean(passes), rel=0.12)


def test_where_others_follow_requests_that_end_every_accepted_token_counts():
    load = load_of(16)
    load.replaced = 1.0
    assert load.tokens(1.8, 0.9) == pytest.approx(1.8)
