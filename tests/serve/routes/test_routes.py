"""Requests through rules, weights, cascades and fallbacks: who answers, what is sent, what is counted."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.serve.routes.kinds import CascadeRoute, FallbackRoute, Rule, RuleRoute, WeightRoute
from paceline.serve.service import Service
from tests.serve.routes.two_models import SMALL_CONTEXT, TwoModels

ROUTES = {
    "by-rule": RuleRoute(
        default="small",
        rules=(
            Rule(to="large", min_prompt_tokens=60),
            Rule(to="large", segments=("vip",)),
            Rule(to="large", keywords=r"(?i)\bproof\b"),
            Rule(to="large", structured=True),
        ),
    ),
    "by-weight": WeightRoute({"small": 1, "large": 1}),
    "careful": CascadeRoute(["small", "large"], min_logprob=-0.5),
    "strict": CascadeRoute(["small", "large"], verify=["schema"], must_not_match="sorry"),
    "lenient": CascadeRoute(["small", "large"], min_logprob=-900),
    "nested": RuleRoute(default="careful", rules=(Rule(to="by-weight", segments=("ab",)),)),
    "steady": FallbackRoute(["small", "large"]),
}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "x",
        "schema": {
            "type": "object",
            "properties": {"a": {"type": "string", "enum": ["abcdefghijklmnop"]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def api() -> Iterator[TwoModels]:
    made = TwoModels(ROUTES)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("text", "fields", "model"),
    [
        ("hello", {}, "small"),
        ("hello" * 12, {}, "large"),
        ("hello", {"segment": "vip"}, "large"),
        ("hello", {"segment": "other"}, "small"),
        ("a Proof of it", {}, "large"),
        ("it is waterproof", {}, "small"),
        ("hello", {"response_format": SCHEMA}, "large"),
    ],
)
def test_the_first_rule_that_matches_chooses_the_model(
    api: TwoModels, text: str, fields: dict[str, Any], model: str
) -> None:
    response = api.ask("by-rule", text, **fields)
    assert response.headers["x-routed-model"] == model
    assert response.json()["model"] == "by-rule"
    assert response.json()["choices"] == api.ask(model, text, **fields).json()["choices"]


def test_keywords_are_searched_in_what_the_user_wrote_only(api: TwoModels) -> None:
    system = {"role": "system", "content": "a proof"}
    messages = [system, {"role": "user", "content": "hello"}]
    body = {"model": "by-rule", "messages": messages, "max_tokens": 3}
    assert api.request("POST", "/v1/chat/completions", json=body).headers["x-routed-model"] == "small"
    for prompt in ("a proof", [ord(letter) for letter in "a proof"]):
        body = {"model": "by-rule", "prompt": prompt, "max_tokens": 3}
        assert api.request("POST", "/v1/completions", json=body).headers["x-routed-model"] == "large"


def test_a_user_always_gets_the_same_model_and_users_are_split(api: TwoModels) -> None:
    def model_of(user: str) -> str:
        return str(api.ask("by-weight", "x", user=user, max_tokens=1).headers["x-routed-model"])

    users = [f"user {number}" for number in range(12)]
    models = [model_of(user) for user in users]
    assert set(models) == {"small", "large"}
    assert [model_of(user) for user in users] == models


def test_a_session_is_split_by_its_header(api: TwoModels) -> None:
    def model_of(session: str) -> str:
        body = {"model": "by-weight", "prompt": "x", "max_tokens": 1}
        headers = {"X-Session-Id": session}
        response = api.request("POST", "/v1/completions", json=body, headers=headers)
        return str(response.headers["x-routed-model"])

    sessions = [str(number) for number in range(12)]
    models = [model_of(session) for session in sessions]
    assert set(models) == {"small", "large"}
    assert [model_of(session) for session in sessions] == models


def test_a_cascade_sends_what_is_sure_and_escalates_what_is_not(api: TwoModels) -> None:
    assert api.said("careful", "a statement") == api.said("small", "a statement") == "a statement"
    assert api.said("careful", "a question?") == api.said("large", "a question?") == "A QUESTION?"
    unsure = api.ask("careful", "a question?", return_metrics=True).json()
    routed = {"model": "large", "routes": ["careful"], "escalations": 1, "fallbacks": 0}
    assert unsure["metrics"]["routed"] == routed
    assert unsure["usage"] == api.ask("large", "a question?").json()["usage"]


@pytest.mark.parametrize("text", ["a statement", "a question?"])
def test_a_streamed_cascade_has_the_events_of_the_model_that_answers(api: TwoModels, text: str) -> None:
    def events(model: str, text: str) -> tuple[str, list[Any]]:
        body = {"messages": [{"role": "user", "content": text}], "stream": True, "temperature": 0}
        body |= {"max_tokens": 40, "model": model, "stream_options": {"include_usage": True}}
        response = api.request("POST", "/v1/chat/completions", json=body)
        chunks = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
        for chunk in chunks:
            assert chunk.pop("model") == model
            del chunk["id"], chunk["created"]
            if chunk["usage"]:
                del chunk["usage"]["prompt_tokens_details"]  # what is cached depends on what ran before
        return response.headers.get("x-routed-model", model), chunks

    answered_by, chunks = events("careful", text)
    assert answered_by == ("large" if "?" in text else "small")
    assert chunks == events(answered_by, text)[1]


def test_log_probabilities_that_only_the_cascade_needs_are_not_sent(api: TwoModels) -> None:
    for fields in ({}, {"stream": True}):
        body = {"model": "lenient", "prompt": "x", "max_tokens": 3, "temperature": 0, **fields}
        response = api.request("POST", "/v1/completions", json=body)
        assert response.headers["x-routed-model"] == "small"
        assert '"logprobs":null' in response.text
        assert '"token_logprobs"' not in response.text
    asked = api.ask("careful", "a statement", logprobs=True).json()["choices"][0]["logprobs"]
    assert asked == api.ask("small", "a statement", logprobs=True).json()["choices"][0]["logprobs"]
    assert asked["content"]


def test_seeded_sampling_has_the_bytes_of_the_chosen_model(api: TwoModels) -> None:
    for seed in range(5):
        fields = {"temperature": 1.5, "seed": seed, "n": 2}
        routed = api.ask("careful", "what is it?", **fields)
        alone = api.ask(routed.headers["x-routed-model"], "what is it?", **fields)
        assert routed.json()["choices"] == alone.json()["choices"]


def test_a_structured_answer_that_is_cut_off_is_escalated(api: TwoModels) -> None:
    whole = api.ask("strict", "x", response_format=SCHEMA)
    assert whole.headers["x-routed-model"] == "small"
    cut = api.ask("strict", "x", response_format=SCHEMA, max_tokens=8)
    assert cut.headers["x-routed-model"] == "large"
    assert api.ask("strict", "I am sorry").headers["x-routed-model"] == "large"
    assert api.ask("strict", "I am glad").headers["x-routed-model"] == "small"


def test_a_prompt_too_long_for_the_small_model_is_answered_by_the_large_one(api: TwoModels) -> None:
    text = "a" * (SMALL_CONTEXT + 10)
    assert api.ask("small", text).status_code == 400
    assert api.ask("careful", text).headers["x-routed-model"] == "large"
    assert api.ask("by-rule", text).headers["x-routed-model"] == "large"
    refused = api.ask("careful", "a" * 1000)
    assert refused.status_code == 400
    assert "the prompt has" in refused.json()["error"]["message"]


def test_an_answer_that_fails_is_escalated(api: TwoModels) -> None:
    failing = "bell \a"
    assert api.ask("small", failing).status_code == 500
    assert api.ask("careful", failing).status_code == 500  # the large model fails on it too
    before = api.samples()["escalations_total", 'route="careful"']
    api.ask("careful", failing)
    assert api.samples()["escalations_total", 'route="careful"'] == before + 1


def test_warnings_are_those_of_the_model_that_answers(api: TwoModels) -> None:
    fields = {"chat_template_kwargs": {"mood": "good"}}
    for text in ("a statement", "a question?"):
        (warning,) = api.ask("careful", text, **fields).json()["warnings"]
        assert "mood" in warning


def test_a_request_waits_in_the_queue_of_the_model_that_it_is_prepared_for(
    api: TwoModels, monkeypatch: Any
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    encode = Service.encode

    def held(service: Service, *arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return encode(service, *arguments)

    monkeypatch.setattr(Service, "encode", held)

    async def work() -> None:
        body = {"model": "large", "prompt": "x", "max_tokens": 1}
        answer = asyncio.ensure_future(api.send("POST", "/v1/completions", json=body))
        await asyncio.to_thread(begun.wait, 30)
        assert [front.num_requests for front in api.fronts] == [0, 1]
        go_on.set()
        assert (await answer).status_code == 200

    api.run(work)


def test_virtual_models_may_name_each_other(api: TwoModels) -> None:
    body = api.ask("nested", "really?", return_metrics=True).json()
    assert body["model"] == "nested"
    assert body["metrics"]["routed"] == {
        "model": "large",
        "routes": ["nested", "careful"],
        "escalations": 1,
        "fallbacks": 0,
    }
    assert "x-routed-model" in api.ask("nested", "x", segment="ab").headers
    assert "x-routed-model" not in api.ask("large", "x").headers


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "why?", "max_tokens": 4}),
        ("/v1/responses", {"input": "why?", "max_output_tokens": 20}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "why?"}], "max_tokens": 20}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_every_endpoint_takes_routed_names(api: TwoModels, path: str, body: Any, stream: bool) -> None:
    fields = {"model": "careful", "temperature": 0, "return_metrics": True, "stream": stream}
    response = api.request("POST", path, json=body | fields)
    assert response.headers["x-routed-model"] == "large"
    assert '"model":"careful"' in response.text
    assert '"routed":{"model":"large","routes":["careful"],"escalations":1' in response.text
    if path != "/v1/completions" and not stream:
        assert "WHY?" in response.text


def test_tokenizing_takes_routed_names_and_models_lists_them(api: TwoModels) -> None:
    tokens = api.post("/tokenize", {"model": "careful", "prompt": "abc"})["tokens"]
    assert api.post("/detokenize", {"model": "careful", "tokens": tokens})["prompt"] == "abc"
    counted = {"model": "nested", "messages": [{"role": "user", "content": "abc"}]}
    assert api.post("/v1/messages/count_tokens", counted)["input_tokens"] > 3
    listed = {model["id"]: model for model in api.get("/v1/models")["data"]}
    assert set(listed) == {"small", "large", *ROUTES}
    assert listed["careful"]["max_model_len"] == SMALL_CONTEXT
    assert api.get("/v1/models/careful") == listed["careful"]
    refused = api.refusal("/v1/completions", {"model": "huge", "prompt": "x"}, 404)
    assert "'careful'" in refused["message"]


def test_a_request_without_a_model_gets_the_default(api: TwoModels) -> None:
    assert api.said(None, "what?") == "what?"


def test_metrics_count_answers_escalations_latency_and_the_tokens_of_all_attempts() -> None:
    api = TwoModels({"careful": ROUTES["careful"]}, default="careful")
    try:
        zero = api.samples()
        assert zero["requests_total", 'model_name="large",route="careful"'] == 0
        for text in ("fine", "really?", "sure?"):
            api.said("careful", text)
        seen = api.samples()
        assert seen["requests_total", 'model_name="small",route="careful"'] == 1
        assert seen["requests_total", 'model_name="large",route="careful"'] == 2
        assert seen["escalations_total", 'route="careful"'] == 2
        assert seen["latency_seconds_count", 'route="careful"'] == 3
        both = len("fine.") + len("really?.") + len("sure?.")  # with the end-of-sequence token
        assert seen["generation_tokens_total", 'model_name="small",route="careful"'] == both
        large = len("really?.") + len("sure?.")
        assert seen["generation_tokens_total", 'model_name="large",route="careful"'] == large
        page = api.request("GET", "/metrics").text
        assert page.count("# TYPE paceline:generation_tokens_total counter") == 1
        assert f'paceline:generation_tokens_total{{model_name="small",segment=""}} {both}.0' in page
        assert f'paceline:generation_tokens_total{{model_name="large",segment=""}} {large}.0' in page
    finally:
        api.close()


def test_a_full_queue_falls_back_and_a_full_server_refuses() -> None:
    api = TwoModels({"steady": ROUTES["steady"]}, small_queue=0)
    small, large = api.fronts

    async def work() -> None:
        body = {"model": "steady", "prompt": "x", "max_tokens": 2}
        async with Contexts(small.preparing, 16):
            full = await api.send("POST", "/v1/completions", json=body)
            assert full.status_code == 200
            assert full.headers["x-routed-model"] == "large"
            direct = await api.send("POST", "/v1/completions", json={**body, "model": "small"})
            assert direct.status_code == 429
            async with Contexts(large.preparing, 116):
                assert (await api.send("POST", "/v1/completions", json=body)).status_code == 429
        again = await api.send("POST", "/v1/completions", json=body)
        assert again.headers["x-routed-model"] == "small"
        await small.drain()
        drained = await api.send("POST", "/v1/completions", json=body)
        assert drained.headers["x-routed-model"] == "large"

    try:
        api.run(work)
        assert api.samples()["fallbacks_total", 'route="steady"'] == 2
    finally:
        api.close()


def test_a_draining_server_lets_a_cascade_ask_its_next_model() -> None:
    api = TwoModels({"careful": ROUTES["careful"]})

    async def work() -> None:
        body = {"model": "careful", "prompt": "x", "max_tokens": 2, "temperature": 0}
        api.small_backend.open.clear()
        running = asyncio.ensure_future(api.send("POST", "/v1/completions", json=body))
        while not api.fronts[0].unfinished:
            await asyncio.sleep(0.001)
        drained = asyncio.ensure_future(api.models.engines.drain())
        while not api.models.engines.draining:
            await asyncio.sleep(0.001)
        refused = await api.send("POST", "/v1/completions", json=body)
        assert refused.status_code == 503
        api.small_backend.open.set()
        answer = await running
        assert (answer.status_code, answer.headers["x-routed-model"]) == (200, "large")
        await drained

    try:
        api.run(work)
    finally:
        api.close()


class Contexts:
    """Several contexts of one kind at once."""

    def __init__(self, make: Any, count: int) -> None:
        self._made = [make() for _ in range(count)]

    async def __aenter__(self) -> None:
        for made in self._made:
            made.__enter__()

    async def __aexit__(self, *_: object) -> None:
        for made in self._made:
            made.__exit__(None, None, None)


def test_many_requests_at_once_get_the_answers_of_their_models(api: TwoModels) -> None:
    texts = [f"number {number}{'?' * (number % 2)}" for number in range(24)]

    async def ask(text: str) -> str:
        messages = [{"role": "user", "content": text}]
        body = {"model": "careful", "messages": messages, "temperature": 0, "max_tokens": 30}
        response = await api.send("POST", "/v1/chat/completions", json=body)
        return str(response.json()["choices"][0]["message"]["content"])

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*map(ask, texts))

    assert api.run(all_of_them) == [text.upper() if "?" in text else text for text in texts]
    assert api.models.engines.num_requests == 0
