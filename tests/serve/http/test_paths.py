"""Paths beside the API itself: HEAD, unknown paths, /docs, /ping, /load and /tokenizer_info."""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator

import pytest

from paceline.serve.openai.tokens import TokenizerInfo
from tests.serve.api import Api
from tests.serve.running import Client, Gate, serving
from tests.toy import toy_engine


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving() as made:
        yield made


def test_every_get_path_answers_head_with_the_headers_of_get_and_no_body(api: Api, client: Client) -> None:
    described = api.get("/openapi.json")["paths"]
    paths = [path.replace("{name}", "toy") for path, operations in described.items() if "get" in operations]
    assert {"/health", "/ping", "/load", "/tokenizer_info", "/v1/models/toy"} < set(paths)
    connection = http.client.HTTPConnection("127.0.0.1", client.port)
    for path in [*paths, "/", "/docs", "/openapi.json", "/metrics", "/v1/models/other"]:
        connection.request("HEAD", path)  # all on one connection: a body would break the next answer
        answer = connection.getresponse()
        assert answer.read() == b""
        got = client.get(path)
        assert (answer.status, answer.headers["content-type"]) == (got.status, got.headers["content-type"])
        if path not in ("/metrics", "/"):  # its numbers change
            assert answer.headers["content-length"] == got.headers["content-length"]
    connection.close()


def test_head_is_logged_and_counted_under_its_path(client: Client) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", client.port)
    connection.request("HEAD", "/version")
    connection.getresponse().read()
    connection.close()
    assert b'http_requests_total{model_name="toy",path="/version"' in client.get("/metrics").body


def test_head_on_a_path_that_only_takes_posts_is_405(api: Api) -> None:
    answer = api.request("HEAD", "/v1/completions")
    assert (answer.status_code, answer.headers["allow"], answer.content) == (405, "POST", b"")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/chat/completions", "use /v1/chat/completions. OpenAI's clients need a base URL that ends in /v1."),
        ("/v1/v1/chat/completions", "use /v1/chat/completions."),
        ("/openai/v1/completions", "use /v1/completions."),
        ("/v1/chat/completion", "use /v1/chat/completions."),
        ("/models", "use /v1/models."),
        ("/v1/health", "use /health."),
        ("/api/chat", "use /v1/chat/completions."),
        (
            "/v1/embeddings",
            "/v1/embeddings is not served: this server generates text, and has no embeddings.",
        ),
        ("/embeddings", "has no embeddings"),
        ("/v1/load_lora_adapter", "adapters are loaded at the start, by --lora-modules NAME=FOLDER"),
        ("/v1/audio/transcriptions", "has no audio"),
        ("/somewhere/else", "there is no /somewhere/else here. See /docs for all paths."),
        ("/" + "x" * 500, "See /docs"),
    ],
)
def test_an_unknown_path_says_what_to_use(api: Api, path: str, message: str) -> None:
    error = api.refusal(path, {}, 404)
    assert message in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "unknown_url")
    assert len(error["message"]) < 250


def test_a_method_that_a_path_does_not_take_is_named_with_the_one_that_it_does(api: Api) -> None:
    answer = api.request("GET", "/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    error = answer.json()["error"]
    assert error["message"] == "/v1/chat/completions does not take GET: use POST."


def test_the_docs_page_describes_the_api_and_loads_nothing_from_elsewhere(api: Api) -> None:
    answer = api.request("GET", "/docs")
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert not re.search(r"(?:src|href|url)\s*[=(]\s*[\"']?(?:https?:)?//", answer.text)
    assert 'fetch("openapi.json"' in answer.text  # relative: it works behind --root-path too
    assert "innerHTML" not in answer.text


def test_ping_is_the_health(api: Api) -> None:
    assert api.get("/ping") == api.get("/health") == {"status": "ok"}
    assert api.request("POST", "/ping").json() == {"status": "ok"}  # as SageMaker may ask


def test_load_counts_the_outputs_that_run_or_wait() -> None:
    backend = Gate()
    with serving(toy_engine(backend)) as client:
        assert client.get("/load").json == {"server_load": 0}
        stream = client.stream(max_tokens=40, n=2, ignore_eos=True)
        backend.open.clear()
        assert client.get("/load").json == {"server_load": 2}
        backend.open.set()
        stream.close()


def test_tokenizer_info_has_what_lm_eval_reads(api: Api) -> None:
    info = api.get("/tokenizer_info")
    TokenizerInfo.model_validate(info, extra="forbid")
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<bos>", "<eos>", None)
    assert info["chat_template"] is None
    assert (info["vocab_size"], info["model_max_length"]) == (97, 400)
