"""Bad options of replicas are refused before anything is loaded, and each error names the remedy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.backends.options import BackendOptions
from paceline.cli import app
from paceline.errors import ConfigError
from paceline.scale.commands import serve_config
from paceline.scale.options import ScaleOptions
from paceline.scale.ray import cluster
from paceline.scale.ray.cluster import replica_resources


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"replicas": 0}, "replicas must be"),
        ({"replicas": 2, "autoscale": "1:2"}, "Use one of them"),
        ({"autoscale": "3:1"}, "MIN at most MAX"),
        ({"autoscale": "0:0"}, "MAX from 1"),
        ({"autoscale": "two"}, "such as 1:4"),
        ({"ray_address": "auto"}, "needs --replicas or --autoscale"),
        ({"replicas": 2, "replica_timeout": 0}, "replica_timeout must be"),
        ({"replica": 2}, "replicas"),
    ],
)
def test_a_bad_option_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ScaleOptions(**options)


def test_bounds() -> None:
    assert ScaleOptions(replicas=3).bounds == (3, 3)
    assert ScaleOptions(autoscale="0:4").bounds == (0, 4)
    assert not ScaleOptions().wanted


def test_replicas_share_the_cpus_of_the_cluster() -> None:
    cpu = BackendOptions(backend="cpu")
    total = {"CPU": 8.0}
    assert replica_resources([cpu], ScaleOptions(replicas=2), total)[0].for_actor() == {
        "num_cpus": 4,
        "num_gpus": 0,
    }
    assert replica_resources([cpu], ScaleOptions(replicas=3), total)[0].cpus == 2
    threads = BackendOptions(backend="cpu", threads=1)
    assert replica_resources([threads], ScaleOptions(replicas=2), total)[0].cpus == 1


def test_models_share_the_cluster() -> None:
    cpu, gpu = BackendOptions(backend="cpu"), BackendOptions(backend="torch", device="cuda")
    models, two = [cpu, cpu, gpu], ScaleOptions(replicas=2)
    shares = replica_resources(models, two, {"CPU": 10.0, "GPU": 2.0})
    assert [(share.cpus, share.gpus) for share in shares] == [(2, 0), (2, 0), (1, 1)]
    with pytest.raises(ConfigError, match="2 replicas with 2 CPUs and 2 CPUs and 1 CPU each need 10 CPUs"):
        replica_resources(models, two, {"CPU": 9.0, "GPU": 2.0})


def test_a_replica_of_several_ranks_needs_as_many_devices() -> None:
    cpu = BackendOptions(backend="torch", device="cpu", threads=2, tensor_parallel_size=3)
    assert replica_resources([cpu], ScaleOptions(replicas=2), {"CPU": 12.0})[0].cpus == 6
    gpu = BackendOptions(backend="torch", device="cuda", tensor_parallel_size=4)
    assert replica_resources([gpu], ScaleOptions(replicas=2), {"CPU": 8.0, "GPU": 8.0})[0].gpus == 4
    with pytest.raises(ConfigError, match="2 replicas with 4 GPUs each need 8 GPUs, but the cluster has 4"):
        replica_resources([gpu], ScaleOptions(replicas=2), {"CPU": 8.0, "GPU": 4.0})


@pytest.mark.parametrize(
    ("backend", "options", "words"),
    [
        (
            BackendOptions(backend="cpu", threads=4),
            {"replicas": 3},
            "3 replicas with 4 CPUs each need 12 CPUs",
        ),
        (BackendOptions(backend="cpu"), {"autoscale": "1:9"}, "9 replicas with 1 CPU each need 9 CPUs"),
        (BackendOptions(backend="cuda"), {"replicas": 2}, "need 2 GPUs, but the cluster has 0"),
    ],
)
def test_more_than_the_cluster_has_is_refused(
    backend: BackendOptions, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        replica_resources([backend], ScaleOptions(**options), {"CPU": 8.0})


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[ray\]'"):
        cluster.import_ray()


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:x", "127.0.0.1:1"])
def test_an_address_that_cannot_be_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"HOST:PORT|no Ray cluster answers"):
        cluster._check_reachable(address)


def test_a_cluster_that_does_not_start_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(cluster, "import_ray", lambda: SimpleNamespace(init=init))
    with (
        pytest.raises(ConfigError, match=r"Ray did not start .*timed out.* less busy, .*--ray-address auto"),
        cluster.cluster(ScaleOptions(replicas=2)),
    ):
        raise AssertionError("it did not start")


def test_the_command_line_refuses_more_replicas_at_least_than_at_most() -> None:
    result = CliRunner().invoke(app, ["serve", "--autoscale", "4:2"])
    assert isinstance(result.exception, ConfigError)
    assert "MIN at most MAX" in str(result.exception)


def test_a_file_for_serve_deploy_refuses_what_it_would_ignore() -> None:
    with pytest.raises(ConfigError, match="--port is for `paceline serve`"):
        serve_config("smollm2-135m", {"replicas": 2, "port": 9})
    with pytest.raises(ConfigError, match="an application for each model"):
        serve_config("smollm2-135m", {"replicas": 2, "routes": "routes.toml"})
    with pytest.raises(ConfigError, match="say how many replicas"):
        serve_config("smollm2-135m", {})
