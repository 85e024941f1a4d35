"""/health is right, and a failure in one request does not affect others."""

from __future__ import annotations

from paceline.engine.engine import Delta
from tests.serve.running import serving
from tests.toy import ToyBackend, toy_engine


def test_a_healthy_server_returns_200() -> None:
    with serving() as client:
        answer = client.get("/health")
        assert (answer.status, answer.json) == (200, {"status": "ok"})


def test_a_failed_pass_fails_its_requests_and_the_server_lives() -> None:
    backend = ToyBackend(max_rows=64)
    with serving(toy_engine(backend)) as client:
        expected = client.complete(max_tokens=4, seed=1).json["choices"]
        backend.fail_next = MemoryError("no room")
        answer = client.complete(max_tokens=4, seed=1)
        assert answer.status == 500
        assert answer.json["error"]["type"] == "server_error"
        backend.fail_next = MemoryError("no room")
        streamed = client.complete(max_tokens=4, stream=True)
        assert b"server_error" in streamed.body
        assert client.get("/health").status == 200
        assert client.complete(max_tokens=4, seed=1).json["choices"] == expected


def test_a_dead_engine_fails_every_request() -> None:
    engine = toy_engine()

    def die() -> list[Delta]:
        raise ZeroDivisionError("a bug of ours")

    engine.step = die  # type: ignore[method-assign]
    with serving(engine) as client:
        assert client.complete().status == 503  # it was running
        health = client.get("/health")
        assert (health.status, health.json) == (503, {"status": "dead"})
        late = client.complete()
        assert late.status == 503
        assert "restart" in late.message
        assert b'paceline:engine_healthy{model_name="toy"} 0.0' in client.get("/metrics").body
        assert client.get("/v1/models").status == 200
