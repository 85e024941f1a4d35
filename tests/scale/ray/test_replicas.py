"""Replicas that die, hang, restart or scale under load: every answer is, byte for byte, one process's."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx

from benchmarks.server.replicas import children, redeploy
from tests.scale.ray.harness import (
    MODEL,
    Answers,
    Clients,
    Server,
    asked_alone,
    disturbed,
    free_port,
    kill,
    pause,
)


def test_the_answers_are_those_of_one_process(server: Server, truth: Answers) -> None:
    server.wait_for_replicas(2)
    assert asyncio.run(Clients(server.url).run()) == truth


def test_killed_under_fifty_streaming_clients(server: Server, truth: Answers) -> None:
    server.wait_for_replicas(2)
    victim = server.replicas()[0]["pid"]
    asyncio.run(disturbed(server.url, lambda: kill(victim), truth))
    assert server.get("/replicas")["resumed"] > 0
    server.wait_for_replicas(2, without=frozenset([victim]))


def test_rolling_restart_under_fifty_streaming_clients(server: Server, truth: Answers) -> None:
    server.wait_for_replicas(2)
    before = frozenset(replica["pid"] for replica in server.replicas())

    restart = partial(redeploy, server.process.pid, MODEL, max_num_seqs=15)
    asyncio.run(disturbed(server.url, restart, truth))
    server.wait_for_replicas(2, without=before)
    assert asyncio.run(Clients(server.url).run()) == truth


def test_metrics_are_added_up_and_told_apart(server: Server, truth: Answers) -> None:
    asyncio.run(Clients(server.url, 8).run())
    total = httpx.get(server.url + "/metrics").text
    apart = httpx.get(server.url + "/metrics/replicas").text
    assert value(total, "paceline:request_success_total") >= 8
    steps = [line for line in apart.splitlines() if line.startswith("paceline:engine_steps_total")]
    assert len(steps) == 2
    assert all('replica="' in line for line in steps)
    assert value(total, "paceline:engine_steps_total") >= sum(float(line.split()[-1]) for line in steps)


def value(page: str, name: str) -> float:
    lines = [line for line in page.splitlines() if line.startswith(name)]
    return sum(float(line.split()[-1]) for line in lines)


def test_hung_under_fifty_streaming_clients(server: Server, truth: Answers) -> None:
    server.wait_for_replicas(2)
    resumed, victim = server.get("/replicas")["resumed"], server.replicas()[0]["pid"]
    asyncio.run(disturbed(server.url, lambda: pause(victim), truth))
    assert server.get("/replicas")["resumed"] > resumed
    server.wait_for_replicas(2, without=frozenset([victim]))  # the health check has replaced it


def test_an_upgrade_of_the_weights_under_fifty_streaming_clients(server: Server, truth: Answers) -> None:
    """Answers end with the weights that they began with; later ones have the new weights."""
    server.wait_for_replicas(2)
    before = frozenset(replica["pid"] for replica in server.replicas())
    (old,) = {replica["weights"] for replica in server.replicas()}
    upgrade = partial(redeploy, server.process.pid, MODEL, quantization="int8")
    later = asked_alone("--quantization", "int8")
    assert later != truth
    asyncio.run(disturbed(server.url, upgrade, truth, later))
    server.wait_for_replicas(2, without=before)
    (new,) = {replica["weights"] for replica in server.replicas()}
    assert new != old
    assert asyncio.run(Clients(server.url, 10).run()) == later[:10]


ROUTES = """
[models.small]
model = "smollm2-135m"
[models.large]
model = "smollm2-135m"
quantization = "int8"
[routes.careful]
kind = "cascade"
models = ["small", "large"]
must_match = "a sentence that no model says"
"""


def test_routes_and_cascades_over_models_on_replicas(tmp_path: Path, truth: Answers) -> None:
    """Each model has a replica of its own; one dies while it answers."""
    file = tmp_path / "routes.toml"
    file.write_text(ROUTES)
    flags = ["--routes", str(file), "--replicas", "1", "--threads", "1"]
    with Server(tmp_path, *flags, model=None) as server:
        server.wait_for_replicas(2)
        pids = {replica["model"]: replica["pid"] for replica in server.replicas()}
        assert pids.keys() == {"small", "large"}
        info = httpx.get(server.url + "/metrics").text.split("\npaceline:server_info{")[1:]
        assert len(info) == 2
        assert 'model_name="small"' in info[0]

        async def main() -> tuple[Answers, Answers]:
            escalated = asyncio.create_task(Clients(server.url, 10, model="careful").run())
            large = Clients(server.url, 10, model="large")
            alone = asyncio.create_task(large.run())
            while not large.num_characters:
                await asyncio.sleep(0.01)
            kill(pids["large"])
            return await alone, await escalated

        alone, escalated = asyncio.run(main())
        assert alone == escalated != truth[:10]
        assert asyncio.run(Clients(server.url, 10, model="small").run()) == truth[:10]


def test_running_answers_do_not_need_the_head(tmp_path: Path, truth: Answers) -> None:
    """The control service of Ray's head dies: without it nothing is started or scaled, but tokens flow."""
    with Server(tmp_path, "--replicas", "2", "--threads", "1") as server:
        server.wait_for_replicas(2)
        (head,) = children(server.process.pid, "gcs_server")
        asyncio.run(disturbed(server.url, lambda: kill(head), truth))


def test_a_burst_scales_from_one_to_two_and_back(tmp_path: Path, truth: Answers) -> None:
    flags = "--autoscale 1:2 --threads 1 --target-ongoing-requests 4 --upscale-delay 1 --downscale-delay 2"
    with Server(tmp_path, *flags.split()) as server:
        server.wait_for_replicas(1)
        clients, seen = Clients(server.url, 32), []

        async def main() -> None:
            assert await Clients(server.url, 1).run() == truth[:1]
            assert len(await asyncio.to_thread(server.replicas)) == 1
            while len(seen) < 2:  # until the second replica is there
                answers = await Clients(server.url, 32).run()
                assert answers == truth[:32]
                seen[:] = await asyncio.to_thread(server.replicas)
            assert await clients.run() == truth[:32]

        asyncio.run(asyncio.wait_for(main(), 300))
        server.wait_for_replicas(1)


def test_an_address_without_a_cluster_is_refused_at_once(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "paceline", "serve", MODEL, "--port", "0", "--replicas", "2"]
    ended = subprocess.run(
        [*command, "--ray-address", address], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 2
    assert f"no Ray cluster answers at {address}" in ended.stderr


def test_more_cpus_than_there_are_is_refused_before_loading(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline", "serve", MODEL, "--port", "0", "--threads", "1"]
    ended = subprocess.run(
        [*command, "--replicas", "1000"], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 2
    assert "1000 replicas with 1 CPU each need 1000 CPUs" in ended.stderr
