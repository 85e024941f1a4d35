"""Whatever a client sends, it gets OpenAI's error body with the right status, and the server survives."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, strategies
from starlette.requests import Request

from paceline.errors import OverloadedError, UnavailableError
from paceline.serve.http.bodies import parse_json
from tests.serve.api import Api
from tests.serve.running import Gate
from tests.toy import toy_engine
from tests.toy_passes import BreakingToy

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
COMPLETION = {"prompt": "hello", "max_tokens": 30, "ignore_eos": True, "seed": 1}
JSON = {"content-type": "application/json"}


def error_of(api: Api, content: bytes, status: int = 400, path: str = PATHS[0], **headers: str) -> Any:
    response = api.request("POST", path, content=content, headers={**JSON, **headers})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"{", "not JSON"),
        (b"[1]", "should be an object"),
        (b"null", "should be an object"),
        (b'"text"', "should be an object"),
        (b'{"prompt": "a", "prompt": "b"}', "'prompt' twice"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN"),
        (b'{"prompt": "a", "temperature": -Infinity}', "-Infinity"),
        (b'{"prompt": "a", "temperature": 1e999}', "too large"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "5000 digits"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "a", "structured_outputs": {"\\uDFFF": 1}}', "surrogate"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b"[" + b"{}," * 30_000 + b"1]", "30001 lists and objects"),
        (b'{"prompt": ' + b"[" * 101 + b"]" * 101 + b"}", "in each other"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "in each other"),
        (b'{"structured_outputs": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001, "in each other"),
    ],
)
def test_a_body_that_is_not_plain_json_is_refused_everywhere(api: Api, content: bytes, message: str) -> None:
    for path in PATHS:
        error = error_of(api, content, path=path)
        assert error["param"] == "body"
        assert message in error["message"]
        assert len(error["message"]) < 400


@given(
    strategies.recursive(
        strategies.none()
        | strategies.booleans()
        | strategies.integers()
        | strategies.floats(allow_nan=False, allow_infinity=False)
        | strategies.text(),
        lambda inner: strategies.lists(inner) | strategies.dictionaries(strategies.text(), inner),
    )
)
def test_valid_json_is_read_unchanged(value: Any) -> None:
    for ascii_only in (True, False):
        assert parse_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


def test_a_pair_of_surrogates_is_a_character(api: Api) -> None:
    answer = api.request("POST", "/tokenize", content=b'{"prompt": "\\ud83d\\ude00"}', headers=JSON)
    assert answer.json()["count"] == 2


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_another_content_type_is_refused(api: Api, kind: str) -> None:
    for path in PATHS:
        error = error_of(api, json.dumps(COMPLETION).encode(), 415, path, **{"content-type": kind})
        assert "application/json" in error["message"]


def test_a_charset_in_the_content_type_is_accepted(api: Api) -> None:
    headers = {"content-type": "application/json; charset=utf-8"}
    assert api.request("POST", PATHS[0], json=COMPLETION, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1"),
        ("temperature", -0.1),
        ("temperature", 1e300),
        ("temperature", 10**400),
        ("temperature", True),
        ("top_p", 0),
        ("top_k", 1.5),
        ("top_k", -2),
        ("n", 129),
        ("n", 10**30),
        ("n", "2"),
        ("seed", 2**64),
        ("seed", 0.5),
        ("max_tokens", -1),
        ("max_tokens", 2**63),
        ("min_tokens", -1),
        ("presence_penalty", 3),
        ("repetition_penalty", 0),
        ("logit_bias", [1]),
        ("logit_bias", {"1": None}),
        ("logit_bias", {str(token): 1 for token in range(1025)}),
        ("stop", {"a": 1}),
        ("stop", [1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [1] * 65),
        ("ignore_eos", 1),
        ("stream", "true"),
        ("user", "x" * 257),
        ("segment", "x" * 257),
        ("speculative", 5),
        ("speculative", "x" * 100_000),
        ("speculative", {"method": "x" * 100_000}),
        ("speculative", {"num_speculative_tokens": 10**30}),
        ("structured_outputs", "json"),
    ],
)
def test_a_value_out_of_its_bounds_is_refused_by_name(api: Api, field: str, value: Any) -> None:
    for path, body in ((PATHS[0], COMPLETION), (PATHS[1], {"messages": [{"role": "user", "content": "a"}]})):
        error = api.refusal(path, {**body, field: value})
        assert error["param"].split(".")[0] == field
        assert len(error["message"]) < 1500


def test_an_integer_may_be_an_integral_float(api: Api) -> None:
    assert api.post(PATHS[0], {**COMPLETION, "max_tokens": 3.0})["usage"]["completion_tokens"] == 3


def test_unknown_paths_and_methods_give_openai_errors(api: Api) -> None:
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", PATHS[0], 405),
        ("PUT", "/tokenize", 405),
    ):
        response = api.request(method, path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_pass_is_a_500_or_an_event_and_the_next_request_is_served(stream: bool) -> None:
    api = Api(toy_engine(BreakingToy(3)))
    response = api.request("POST", PATHS[0], json={**COMPLETION, "stream": stream})
    if stream:
        assert response.status_code == 200
        *_, last, done = response.text.removesuffix("\n\n").split("\n\n")
        assert done == "data: [DONE]"
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == 500
    else:
        assert response.status_code == 500
        error = response.json()["error"]
    assert error["type"] == "server_error"
    assert "secret" not in response.text
    assert '"finish_reason":"error"' not in response.text
    assert api.post(PATHS[0], COMPLETION)["choices"][0]["finish_reason"] == "length"
    api.close()


def test_a_full_queue_is_a_429_with_retry_after() -> None:
    backend = Gate()
    api = Api(toy_engine(backend, max_num_seqs=2), max_queue=1)
    error = api.refusal(PATHS[0], {**COMPLETION, "n": 4})
    assert error["param"] == "n"  # this could never run

    async def send_four() -> list[int]:
        backend.open.clear()  # no request ends before the fourth has arrived
        tasks = [asyncio.ensure_future(api.send("POST", PATHS[0], json=COMPLETION)) for _ in range(4)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        backend.open.set()
        return [answer.status_code for answer in await asyncio.gather(*tasks)]

    assert sorted(api.run(send_four)) == [200, 200, 200, 429]
    response = api.request("POST", PATHS[0], json={**COMPLETION, "prompt": ["a", "b", "c", "d"]})
    assert response.status_code == 429  # and none of the four runs
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["type"] == "rate_limit_error"
    api.close()


def test_a_dead_engine_is_a_503() -> None:
    api = Api()

    def die() -> Any:
        raise ZeroDivisionError

    api.engine.step = die  # type: ignore[method-assign]
    for _ in range(2):
        response = api.request("POST", PATHS[0], json=COMPLETION)
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "service_unavailable_error"
    streamed = api.request("POST", PATHS[0], json={**COMPLETION, "stream": True})
    assert streamed.status_code == 503
    api.run(api.front.stop)


def test_every_kind_of_error_has_its_status() -> None:
    from paceline.serve.http.errors import response

    request = Request({"type": "http", "path": "/v1/completions"})
    assert response(request, OverloadedError("x")).status_code == 429
    assert response(request, UnavailableError("x")).headers["retry-after"] == "1"
    hidden = response(request, ZeroDivisionError("/home/someone"))
    assert hidden.status_code == 500
    assert b"someone" not in hidden.body
