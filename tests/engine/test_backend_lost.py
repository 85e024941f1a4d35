"""A backend that can run no more passes ends the engine; any other failure of a pass ends its requests."""

from __future__ import annotations

import pytest

from paceline.core.forward import ForwardBatch, ForwardOutput
from paceline.core.params import SamplingParams
from paceline.errors import BackendError, BackendLostError
from tests.toy import ToyBackend, roomy_engine


class Failing(ToyBackend):
    error: Exception

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        raise self.error


def test_a_lost_backend_ends_the_engine() -> None:
    backend = Failing()
    backend.error = BackendLostError("a rank is gone")
    engine = roomy_engine(backend)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=3))
    with pytest.raises(BackendLostError, match="a rank is gone"):
        engine.step()


def test_another_failure_ends_the_requests_of_the_pass_only() -> None:
    backend = Failing()
    backend.error = BackendError("a pass failed")
    engine = roomy_engine(backend)
    (request,) = engine.add_request([1, 2, 3], SamplingParams(max_tokens=3))
    engine.step()
    assert request.finished
    assert not engine.has_unfinished
