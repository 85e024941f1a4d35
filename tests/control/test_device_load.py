"""DeviceLoad: what the requests of device passes gain together."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np
import pytest

from paceline.control.controller import Load
from paceline.control.planner.device_load import DeviceLoad
from tests.control.simulation import SimulatedRequest
from tests.large import in_turn

LEFT = 60  # tokens of a request, mean


@dataclass
class Ending(SimulatedRequest):
    """A request that may end before its max_tokens."""

    has_ended: bool = False

    @property
    def finished(self) -> bool:
        return self.has_ended


def after_batches(requests: int, outputs: np.ndarray, limit: int) -> DeviceLoad:
    """The load of a batch of new requests, after batches whose output lengths in tokens are `outputs`."""
    load, names = DeviceLoad(), count()
    for number in range(0, len(outputs) + 1, requests):
        running = [Ending(str(next(names)), limit, num_pending=2) for _ in range(requests)]
        load.note(running, Load(requests, 0))
        for request, output in zip(running, outputs[number:], strict=False):
            request.num_output, request.has_ended = round(min(output, limit)), True
    return load


CHANCES = {"few": [0.4, 0.3], "many": [0.8] * 7, "seldom": [0.1, *[0.9] * 6]}
BATCHES = {
    f"{requests} of {spread} to {limit}": (spread, limit, requests)
    for spread, limit in ((0.0, LEFT), (0.3, 1000), (0.3, LEFT))
    for requests in (1, 4, 16, 64)
}


@pytest.mark.parametrize(("chances", "batch"), in_turn(CHANCES, BATCHES))
def test_a_batch_takes_as_many_passes_as_its_slowest_request(chances, batch):
    """Compared with batches of requests whose drafts are accepted by chance, in texts that are not equally
    hard. The last chances are those of a lookup that seldom finds something."""
    spread, limit, requests = batch
    rng = np.random.default_rng(0)
    outputs = rng.normal(LEFT, spread * LEFT, (400, requests)).clip(4, limit)
    passes = []
    for wanted in outputs:
        odds = np.array(chances) / (1 - np.array(chances)) * rng.lognormal(0, 0.2, (requests, 1, 1))
        right = rng.random((requests, int(wanted.max()) + 1, len(chances))) < odds / (1 + odds)
        tokens = 1 + np.cumprod(right, axis=2).sum(axis=2)  # [requests, passes]
        passes.append(1 + (np.cumsum(tokens, axis=1) < wanted[:, None]).sum(axis=1).max())
    drafts = 1 + np.cumprod(rng.random((20_000, len(chances))) < chances, axis=1).sum(axis=1)
    earlier = rng.normal(LEFT, spread * LEFT, 640).clip(4)
    expected = after_batches(requests, earlier, limit).tokens(drafts.mean(), drafts.var())
    assert expected == pytest.approx(outputs.max(axis=1).mean() / np.mean(passes), rel=0.12)


def test_where_others_follow_requests_that_end_every_accepted_token_counts():
    load = after_batches(16, np.full(64, LEFT), LEFT)
    load.replaced = 1.0
    assert load.tokens(1.8, 0.9) == pytest.approx(1.8)
