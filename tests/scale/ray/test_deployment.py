"""The whole server as a Serve application, behind Serve's own proxy."""

from __future__ import annotations

import json
import subprocess
import sys

import yaml

from paceline.scale.commands import serve_config
from tests.scale.ray.harness import MODEL, Answers, body, free_port

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


def test_a_deployment_answers_as_one_process(truth: Answers) -> None:

    command = [sys.executable, "-c", PROGRAM, str(free_port()), json.dumps(body(0))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    answer = next(line for line in ended.stdout.splitlines() if line.startswith("ANSWER "))
    assert json.loads(answer.removeprefix("ANSWER ")) == truth[0][0]


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
