"""The whole server as a Serve application, behind Serve's own proxy."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from paceline.scale.commands import serve_config
from tests.scale.ray.harness import MODEL, Answers, Clients, body, free_port, healthy, wait_until

PROGRAM = """
import json, sys
import httpx, ray
from ray import serve
from paceline.scale import application

port, body = int(sys.argv[1]), json.loads(sys.argv[2])
ray.init(address="local", include_dashboard=False, num_cpus=2)
serve.start(http_options={"port": port})
serve.run(application({"model": "smollm2-135m", "replicas": 1, "threads": 1, "api_key": ["sk-one"]}))
url = f"http://127.0.0.1:{port}"
assert httpx.get(url + "/health").json() == {"status": "ok"}
assert httpx.post(url + "/v1/completions", json=body).status_code == 401
text = ""
headers = {"Authorization": "Bearer sk-one"}
with httpx.stream("POST", url + "/v1/completions", json=body, headers=headers, timeout=120) as response:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            text += json.loads(line[6:])["choices"][0]["text"]
print("ANSWER " + json.dumps(text))
assert len(httpx.get(url + "/replicas", headers=headers).json()["replicas"]) == 1
serve.shutdown()
"""
COMPOSED = """
import json, sys
import ray
from ray import serve
from paceline.scale import deployment

@serve.deployment(ray_actor_options={"num_cpus": 0})
class Asker:
    def __init__(self, server):
        self.server = server

    async def ask(self, body):
        whole = await self.server.post.remote("/v1/completions", {**body, "stream": False})
        chunks = self.server.options(stream=True).stream.remote("/v1/completions", body)
        text = "".join([chunk["choices"][0]["text"] async for chunk in chunks])
        long = {"prompt": 4 * body["prompt"], "max_tokens": 1}
        answers = [await self.server.post.remote("/v1/completions", long) for _ in range(6)]
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        return whole["choices"][0]["text"], text, cached

ray.init(address="local", include_dashboard=False, num_cpus=2)
serve.start(http_options={"location": "NoServer"})
handle = serve.run(Asker.bind(deployment("smollm2-135m", replicas=2, threads=1)), route_prefix=None)
print("ANSWER " + json.dumps(handle.ask.remote(json.loads(sys.argv[1])).result(timeout_s=120)))
serve.shutdown()
"""


def answer_of(program: str, *arguments: str) -> Any:
    """What a program prints as its answer."""
    command = [sys.executable, "-c", program, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    answer = next(line for line in ended.stdout.splitlines() if line.startswith("ANSWER "))
    return json.loads(answer.removeprefix("ANSWER "))


def test_a_deployment_answers_as_one_process(truth: Answers) -> None:
    assert answer_of(PROGRAM, str(free_port()), json.dumps(body(0))) == truth[0][0]


def test_another_deployment_asks_through_a_handle_and_is_routed_by_prefix(truth: Answers) -> None:
    whole, streamed, cached = answer_of(COMPOSED, json.dumps(body(0)))
    assert whole == streamed == truth[0][0]
    assert min(cached[1:]) > max(16, cached[0])  # each went to the replica that had the prompt


def test_the_file_is_deployed_on_a_cluster(tmp_path: Path, truth: Answers) -> None:
    """`ray start`, `paceline scale config`, `serve deploy`: the three commands of the guide."""
    port, head, dashboard = free_port(), free_port(), free_port()
    text = serve_config(MODEL, {"replicas": 2, "threads": 1})
    file = tmp_path / "serve.yaml"
    file.write_text(text.replace("port: 8000", f"port: {port}"))
    programs = Path(sys.executable).parent
    ports = [f"--port={head}", f"--dashboard-port={dashboard}", "--dashboard-agent-listen-port=0"]
    start = [programs / "ray", "start", "--head", "--block", "--num-cpus=2", "--disable-usage-stats", *ports]
    deploy = [programs / "serve", "deploy", "--address", f"http://127.0.0.1:{dashboard}", str(file)]
    url = f"http://127.0.0.1:{port}"
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}  # of this cluster
    environment = {**os.environ, **token}

    def deployed() -> bool:
        assert cluster.poll() is None, (tmp_path / "ray.log").read_text()[-2000:]
        return subprocess.run(deploy, capture_output=True, env=environment, check=False).returncode == 0

    with (tmp_path / "ray.log").open("wb") as log:
        cluster = subprocess.Popen(start, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        wait_until(deployed)
        wait_until(lambda: healthy(url))
        assert asyncio.run(Clients(url, 10).run()) == truth[:10]
    finally:
        cluster.terminate()
        cluster.wait(120)


def test_the_file_for_serve_deploy_is_what_serve_takes() -> None:
    from ray.serve.schema import ServeDeploySchema

    text = serve_config(MODEL, {"autoscale": "1:4", "threads": 2, "api_key": ["sk-one"]})
    schema = ServeDeploySchema.model_validate(yaml.safe_load(text))
    (application,) = schema.applications
    assert application.import_path == "paceline.scale:application"
    assert application.args == {"model": MODEL, "autoscale": "1:4", "threads": 2, "api_key": ["sk-one"]}
    replica = next(one for one in application.deployments if one.name == "Replica")
    assert replica.ray_actor_options.num_cpus == 2
    assert replica.autoscaling_config["max_replicas"] == 4
