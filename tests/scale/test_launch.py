"""What is launched on a cluster is removed from it, and nothing else."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.scale.options import ScaleOptions
from paceline.scale.ray import launch as launching
from paceline.serve.options import ServeOptions
from paceline.serve.routes.file import ModelEntry, RoutesFile, RouteTable


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The applications of a cluster, one of which is another server's."""
    names = {"paceline-others"}
    serve = SimpleNamespace(
        status=lambda: SimpleNamespace(applications=dict.fromkeys(names)), delete=names.remove
    )
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=serve))

    def run(name: str, *_: object) -> Any:
        if name.endswith("-broken"):
            raise ConfigError("the replicas did not start")
        names.add(name)

    monkeypatch.setattr(launching, "_launch", run)
    return names


def launch(*names: str) -> list[launching.RemoteModel]:
    entry = ModelEntry(EngineConfig.from_options(model="toy", backend="cpu", threads=1))
    table = RouteTable(names, {}, names[0])
    declared = RoutesFile(table, {(name,): entry for name in names})
    tokenizers: list[Any] = [None] * len(names)
    return launching.launch(declared, tokenizers, ServeOptions(), ScaleOptions(replicas=1), {"CPU": 8})


def test_a_server_removes_its_own_models(running: set[str]) -> None:
    models = launch("a", "b")
    assert running == {"paceline-others", "paceline-a", "paceline-b"}
    launching.remove(models)
    assert running == {"paceline-others"}


def test_if_one_model_does_not_start_those_before_it_are_removed(running: set[str]) -> None:
    with pytest.raises(ConfigError, match="did not start"):
        launch("a", "broken")
    assert running == {"paceline-others"}
