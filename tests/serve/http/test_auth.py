"""Keys: every path but health checks and pages needs one, and nothing that a client sends bypasses that."""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Iterator

import pytest

from paceline.serve.http import middleware
from paceline.serve.options import ServeOptions
from tests.serve.running import Client, serving

KEYS = ("sk-first", "sk-second")
PATHS = (
    *("/v1/models", "/v1/models/toy", "/metrics", "/requests", "/version", "/load", "/openapi.json"),
    *("/nowhere", "//", "/static"),
    *(
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
    ),
)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving(api_key=KEYS) as made:
        yield made


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_without_a_key_every_path_answers_401(client: Client, path: str, method: str) -> None:
    answer = client.raw(client.request(method, path))
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json["error"]["code"] == "invalid_api_key"
    assert answer.json["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("path", ["/health", "/ping", "/docs"])
def test_what_holds_nothing_of_the_server_needs_no_key(client: Client, path: str) -> None:
    assert client.get(path).status == 200


@pytest.mark.parametrize("key", KEYS)
def test_each_of_several_keys_is_accepted(client: Client, key: str) -> None:
    assert client.get("/v1/models", Authorization=f"Bearer {key}").status == 200
    assert client.get("/v1/models", Authorization=f"bearer  {key}").status == 200


@pytest.mark.parametrize(
    "header",
    [
        *("", "Bearer", "Bearer ", "sk-first", "Basic sk-first", "Bearer sk-firs", "Bearer sk-first2"),
        *("Bearer SK-FIRST", "Bearer sk-first sk-second", "Bearer sk-first,sk-second", "Bearer \xff\xfe"),
    ],
)
def test_anything_but_a_whole_key_is_refused(client: Client, header: str) -> None:
    assert client.get("/v1/models", Authorization=header).status == 401


@pytest.mark.parametrize(
    "path",
    [
        *("/health/", "/health%0a", "/health%00", "/health/../v1/models", "//health", "/Health", "/health;a"),
        *("/v1/models?/health", "/v1/models#/health", "/health%2f..%2fv1%2fmodels", "/%68ealth/x"),
        *("http://localhost/v1/models", "http://a/health/../v1/models", "*", "/v1/models%3f/health"),
    ],
)
def test_a_path_that_is_like_health_is_not_health(client: Client, path: str) -> None:
    assert client.get(path).status in (400, 401)


@pytest.mark.parametrize("host", ["localhost/health", "a/health?", "a#/health", "/health", "", "a\t/health"])
def test_the_host_header_does_not_bypass_the_key(client: Client, host: str) -> None:
    """A server that builds a URL from this header, and looks at that URL's path, could be fooled."""
    assert client.get("/v1/models", Host=host).status in (400, 401)


@pytest.mark.parametrize("name", ["X-Forwarded-Prefix", "X-Original-URL", "X-Rewrite-URL", "X-Forwarded-For"])
def test_proxy_headers_do_not_bypass_the_key(client: Client, name: str) -> None:
    assert client.get("/v1/models", **{name: "/health"}).status == 401


def test_behind_a_proxy_the_paths_are_the_same() -> None:
    """The proxy serves this server under /llm and strips the prefix: only links in answers contain it."""
    with serving(api_key=KEYS, root_path="/llm") as client:
        assert client.get("/health").status == 200
        assert client.get("/v1/models").status == 401
        assert client.get("/llm/health").status == 401
        assert client.get("/v1/models", Authorization="Bearer sk-first").status == 200
        description = client.get("/openapi.json", Authorization="Bearer sk-first").json
        assert description["servers"] == [{"url": "/llm"}]


def test_the_answer_to_a_wrong_key_reveals_nothing_about_valid_ones(client: Client) -> None:
    answers = [
        client.get("/v1/models", Authorization=f"Bearer {key}").body for key in ("a", "sk-firs", "sk-firsX")
    ]
    assert len(set(answers)) == 1
    assert b"sk-" not in answers[0]


def test_keys_are_compared_in_constant_time_and_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By construction: digests of one length, compared by the library, for every key."""
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def compare(given: bytes, key: bytes) -> bool:
        compared.append((given, key))
        return real(given, key)

    monkeypatch.setattr(middleware.hmac, "compare_digest", compare)
    with serving(api_key=KEYS) as client:
        for key in (*KEYS, "x", "x" * 500):
            client.get("/v1/models", Authorization=f"Bearer {key}")
    assert len(compared) == 4 * len(KEYS)
    assert {len(digest) for pair in compared for digest in pair} == {32}


def test_a_body_is_not_read_before_the_key_is_checked(client: Client) -> None:
    head = client.request("POST", "/v1/completions", b"", {"Content_Length": "1000"})
    assert client.raw(head).status == 401


def test_no_key_is_ever_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with serving(api_key=KEYS) as client:
        client.get("/v1/models", Authorization="Bearer sk-first")
        client.get("/v1/models?key=sk-first", Authorization="Bearer sk-wrong")
        client.post("/v1/completions", b"{", Authorization="Bearer sk-first")
    logged = json.dumps([[record.getMessage(), getattr(record, "facts", {})] for record in caplog.records])
    assert '"status": 200' in logged
    assert "sk-" not in logged


def test_a_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "from-there")
    assert ServeOptions.from_flags({"api_key": ["from-here"]}).api_key == ("from-here", "from-there")
    assert ServeOptions.from_flags({"api_key": None}).api_key == ("from-there",)


# Other origins ---------------------------------------------------------------------------------------

PREFLIGHT = {
    "Origin": "https://chat.example.org",
    "Access_Control_Request_Method": "POST",
    "Access_Control_Request_Headers": "authorization, content-type",
}


def test_cors_is_off_unless_an_origin_is_named(client: Client) -> None:
    answer = client.raw(client.request("OPTIONS", "/v1/completions", headers=PREFLIGHT))
    assert answer.status == 401
    assert "access-control-allow-origin" not in answer.headers


def test_a_named_origin_may_call_and_still_needs_a_key() -> None:
    with serving(api_key=KEYS, cors_origin=("https://chat.example.org",)) as client:
        preflight = client.raw(client.request("OPTIONS", "/v1/completions", headers=PREFLIGHT))
        assert preflight.status == 200
        assert preflight.headers["access-control-allow-origin"] == "https://chat.example.org"
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        other = PREFLIGHT | {"Origin": "https://evil.example.org"}
        refused = client.raw(client.request("OPTIONS", "/v1/completions", headers=other))
        assert refused.status == 400
        assert "access-control-allow-origin" not in refused.headers
        answer = client.get("/v1/models", Origin="https://chat.example.org")
        assert answer.status == 401
        assert answer.headers["access-control-allow-origin"] == "https://chat.example.org"


def test_a_html_form_cannot_post(client: Client) -> None:
    """A page may send text/plain without a CORS preflight; such a body is refused."""
    key = {"Authorization": "Bearer sk-first", "Content_Type": "text/plain"}
    assert client.post("/v1/completions", {"prompt": "hello"}, **key).status == 415
