"""Two models behind one port: the whole server, and the bench that compares its models and routes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.bench.run.contest import SpeculationOptions
from paceline.bench.run.view import contest_result
from paceline.bench.servers.contest import run_served
from paceline.bench.traffic.workloads import Prompt, Workload
from paceline.errors import ConfigError
from paceline.serve.loading import ServedModel
from paceline.serve.routes.file import RouteTable
from paceline.serve.routes.kinds import CascadeRoute
from tests.serve.echo import byte_tokenizer
from tests.serve.routes.two_models import LARGE_CONTEXT, SMALL_CONTEXT, Shouting, Unsure, engine_of
from tests.serve.running import Client, serving, until

TEXTS = ("fine", "1 + 1", "really?", "why not?")


@pytest.fixture(scope="module")
def small() -> Unsure:
    return Unsure(byte_tokenizer(), max_rows=256)


@pytest.fixture(scope="module")
def client(small: Unsure) -> Iterator[Client]:
    tokenizer = byte_tokenizer()
    engines = {
        "small": engine_of(small, tokenizer, SMALL_CONTEXT),
        "large": engine_of(Shouting(tokenizer, max_rows=256), tokenizer, LARGE_CONTEXT),
    }
    served = [
        ServedModel((name,), engine, tokenizer, {"model_name": name}) for name, engine in engines.items()
    ]
    routes = {"careful": CascadeRoute(["small", "large"], min_logprob=-0.5)}
    with serving(models=(served, RouteTable(("small", "large"), routes, "careful"))) as made:
        yield made


def test_both_models_answer_and_the_server_is_one(client: Client) -> None:
    def said(model: str) -> str:
        body = {"messages": [{"role": "user", "content": "hello"}], "model": model, "temperature": 0}
        answer = client.post("/v1/chat/completions", body)
        return str(answer.json["choices"][0]["message"]["content"])

    assert [said(name) for name in ("small", "large", "careful")] == ["hello", "HELLO", "hello"]
    assert client.get("/health").json == {"status": "ok"}
    assert client.get("/load").json == {"server_load": 0}
    assert client.get("/requests").json == {"requests": []}
    page = client.get("/metrics").body.decode()
    for name in ("small", "large"):
        assert f'paceline:engine_healthy{{model_name="{name}"}} 1.0' in page
    assert page.count("# TYPE paceline:http_requests_total counter") == 1


def test_every_series_is_there_once_also_under_names_of_vllm() -> None:
    tokenizer = byte_tokenizer()
    served = [
        ServedModel(
            (name,), engine_of(Shouting(tokenizer, 256), tokenizer, 64), tokenizer, {"model_name": name}
        )
        for name in ("a", "b")
    ]
    with serving(models=(served, RouteTable.of("a", "b")), metrics_prefix="vllm") as client:
        lines = client.get("/metrics").body.decode().splitlines()
    series = [line.rpartition(" ")[0] for line in lines if line and not line.startswith("#")]
    assert len(set(series)) == len(series)
    for name in ("a", "b"):
        assert f'vllm:num_requests_running{{model_name="{name}"}}' in series


def test_a_client_that_leaves_before_its_answer_is_judged_ends_it(client: Client, small: Unsure) -> None:
    small.open.clear()
    body = {"model": "careful", "prompt": "x", "stream": True}
    with client.connect() as connection:
        connection.sendall(client.request("POST", "/v1/completions", body))
        until(lambda: client.get("/requests").json["requests"])
    until(lambda: client.get("/load").json == {"server_load": 0})  # though the pass has not ended
    small.open.set()
    assert client.post("/v1/completions", {"model": "large", "prompt": "x"}).status == 200


def options(*models: str) -> SpeculationOptions:
    prompts = [Prompt(text, "one", 30, ({"role": "user", "content": text},)) for text in TEXTS]
    return SpeculationOptions((Workload("texts", tuple(prompts)),), {}, models=models, rounds=1)


def test_the_bench_measures_a_route_as_it_measures_a_method(client: Client) -> None:
    url = {"server": f"http://127.0.0.1:{client.port}"}
    contest = run_served(options("large", "small", "careful"), url, {}, None, None)
    shares = {row.method: row.equal_share for row in contest.rows}
    assert shares == {"large": 1.0, "small": 0.25, "careful": 0.75}  # "1 + 1" has no letters
    assert {row.method: row.answered_by for row in contest.rows} == {
        "large": {},
        "small": {},
        "careful": {"small": 0.5, "large": 0.5},
    }
    assert contest.identical  # other models may answer otherwise
    result = contest_result(contest)
    assert result.findings[0].text == "Answers equal to those of large: small 25%, careful 75%."
    (table,) = (table for table in result.tables if table.title == "Answers, by model")
    assert ("careful", "75%", "small 50%, large 50%") in [tuple(line) for line in table.rows]


def test_the_bench_refuses_models_that_it_cannot_compare(client: Client) -> None:
    url = {"server": f"http://127.0.0.1:{client.port}"}
    with pytest.raises(ConfigError, match="'huge' is not served here"):
        run_served(options("large", "huge"), url, {}, None, None)
    with pytest.raises(ConfigError, match="--models are of one server"):
        run_served(options("large", "small"), {**url, "b": "http://127.0.0.1:9"}, {}, None, None)
    with pytest.raises(ConfigError, match="the reference first"):
        options("large")
