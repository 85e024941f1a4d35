"""Tests with a real Ray cluster and a real model: `make test-scale` runs them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.scale.ray.harness import Answers, Server, asked_alone


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("PACELINE_TEST_SCALE") != "1":
        skip = pytest.mark.skip(reason="needs Ray: run it with `make test-scale`")
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def truth() -> Answers:
    """What one process answers."""
    return asked_alone()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    with Server(
        tmp_path_factory.mktemp("serve"), "--replicas", "2", "--threads", "1", "--drain-timeout", "90"
    ) as started:
        yield started
