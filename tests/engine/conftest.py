"""What the tests of the engine compare with."""

from __future__ import annotations

import pytest

from tests.engine.test_exactness import requests, result
from tests.toy import drain, toy_engine


@pytest.fixture(scope="session")
def alone():
    """Each request's result when it has an engine without drafts to itself."""
    results = []
    for ids, params in requests():
        engine = toy_engine(enable_prefix_caching=False)
        (request,) = engine.add_request(ids, params)
        drain(engine)
        results.append(result(request))
    return results
