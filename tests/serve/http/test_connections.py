"""Connections: trailers, the Host header, the limit on connections, half-closed and closed clients."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import uvloop

from paceline.engine.engine import Engine
from paceline.serve.http.connections import HEALTH_CONNECTIONS, MAX_HEAD_BYTES, MAX_HEADERS
from tests.serve.running import Client, Gate, read_answer, serving, until
from tests.toy import ENDLESS, roomy_engine, toy_engine

KEY = "sk-test-1"
READ_BYTES = 1 << 18  # per read of an event loop
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
LONG = {"prompt": "hello", "max_tokens": ENDLESS, "ignore_eos": True}
LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving(api_key=(KEY,)) as made:
        yield made


# Trailers ----------------------------------------------------------------------------------------------


def chunked(client: Client, trailers: str, body: bytes = b"{}", **headers: str) -> bytes:
    framing = {"Transfer_Encoding": "chunked", "Content_Type": "application/json"}
    head = client.request("POST", "/v1/completions", headers=framing | headers)
    return head + b"%x\r\n%s\r\n0\r\n%s" % (len(body), body, trailers.encode())


def test_a_trailer_cannot_carry_a_key(client: Client) -> None:
    assert client.raw(chunked(client, f"Authorization: Bearer {KEY}\r\n\r\n")).status == 401


def test_a_trailer_changes_no_header(client: Client) -> None:
    body = b'{"prompt": "hello", "max_tokens": 1}'
    trailers = "Authorization: Bearer wrong\r\nX-Request-Id: yours\r\n\r\n"
    with client.connect() as connection:
        for _ in range(2):  # nor where the next request begins
            connection.sendall(chunked(client, trailers, body, **AUTHORIZED, X_Request_Id="mine"))
            answer = read_answer(connection)
            assert answer.status == 200
            assert answer.headers["x-client-request-id"] == "mine"


@pytest.mark.parametrize(
    "trailers",
    [
        pytest.param("".join(f"X-{n}: a\r\n" for n in range(MAX_HEADERS)) + "\r\n", id="many"),
        pytest.param(f"X-Long: {'a' * MAX_HEAD_BYTES}\r\n\r\n", id="one long"),
        pytest.param(f"X-Endless: {'a' * (MAX_HEAD_BYTES + READ_BYTES)}", id="one without an end"),
    ],
)
def test_trailers_count_as_headers(client: Client, trailers: str) -> None:
    assert client.raw(chunked(client, trailers, **AUTHORIZED)).status == 431


def test_a_chunk_extension_without_an_end_is_refused(client: Client) -> None:
    headers = {"Transfer_Encoding": "chunked", **AUTHORIZED}
    head = client.request("POST", "/v1/completions", headers=headers)
    assert client.raw(head + b"2;" + b"a" * (MAX_HEAD_BYTES + 1000)).status == 431


def test_a_large_body_before_the_next_request_is_not_its_head(client: Client) -> None:
    body = b'{"prompt": "hello", "max_tokens": 1%s}' % (b" " * 2 * MAX_HEAD_BYTES)
    first = client.request("POST", "/v1/completions", body, AUTHORIZED)
    second = client.request("GET", "/health")
    with client.connect() as connection:
        connection.sendall(first + second[:20])
        assert read_answer(connection).status == 200
        connection.sendall(second[20:])
        assert read_answer(connection).status == 200


# Host --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("HTTP/1.1\r\nHost: a", 200),
        ("HTTP/1.1\r\nHost: [::1]:8000", 200),
        ("HTTP/1.1\r\nHost:", 200),  # of a URL without a host
        ("HTTP/1.0", 200),
        ("HTTP/1.1", 400),
        ("HTTP/1.1\r\nHost: a\r\nHost: a", 400),
        ("HTTP/1.0\r\nHost: a\r\nHost: b", 400),
        ("HTTP/1.1\r\nHost: a b", 400),
        ("HTTP/1.1\r\nHost: a/health", 400),
    ],
)
def test_a_request_has_one_host_which_http_1_0_may_leave_out(client: Client, head: str, status: int) -> None:
    assert client.raw(f"GET /health {head}\r\n\r\n".encode()).status == status


# Places ------------------------------------------------------------------------------------------------


@contextmanager
def full_server(max_connections: int) -> Iterator[Client]:
    """A server whose connections are all taken by running requests."""
    backend = Gate()
    engine = roomy_engine(backend)
    held: list[socket.socket] = []

    def hold() -> bool:
        """Whether one more request runs; not if an earlier connection has not ended yet."""
        connection = client.connect()
        connection.sendall(client.request("POST", "/v1/completions", LONG))
        until(lambda: running(engine) > len(held) or select.select([connection], [], [], 0)[0])
        held.append(connection)
        if running(engine) < len(held):
            held.pop().close()
        return len(held) == max_connections

    with serving(engine, max_connections=max_connections) as client:
        try:
            until(hold)
            backend.open.clear()
            yield client
        finally:
            for connection in held:
                connection.close()
            backend.open.set()


def running(engine: Engine) -> int:
    return len(engine.scheduler.running) + len(engine.scheduler.waiting)


def test_connections_above_the_limit_get_503_except_for_health() -> None:
    with full_server(max_connections=2) as client:
        answer = client.get("/v1/models")
        assert answer.status == 503
        assert "2 connections" in answer.message
        assert answer.headers["retry-after"] == "1"
        health = client.get("/health")
        assert (health.status, health.json) == (200, {"status": "ok"})
        assert health.headers["connection"] == "close"
        # a request that may keep sending is refused
        assert client.raw(client.request("GET", "/health", headers={"Content_Length": "9"})).status == 503


def test_idle_connections_are_closed_to_make_room() -> None:
    """As many connections are open and idle as are read at all: the oldest are closed for new ones."""
    with serving(max_connections=2) as client:
        idle = [client.connect() for _ in range(2 * 2 + HEALTH_CONNECTIONS)]
        until(lambda: answers(client, "/health"))
        until(lambda: answers(client, "/v1/models"))
        assert idle[0].recv(1) == b""  # closed
        for connection in idle:
            connection.close()


def answers(client: Client, path: str) -> bool:
    try:
        return client.get(path).status == 200
    except ConnectionError:
        return False


# Half-closed connections, and disconnects ----------------------------------------------------------------


@LOOPS
@pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/1.0"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_half_closed_connection_gets_its_answer(
    new_loop: Callable[[], asyncio.AbstractEventLoop], version: str, stream: bool
) -> None:
    backend = Gate()
    backend.open.clear()
    body = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True, "stream": stream}
    with serving(toy_engine(backend), new_loop=new_loop) as client, client.connect() as connection:
        request = client.request("POST", "/v1/completions", body)
        connection.sendall(request.replace(b"HTTP/1.1", version.encode()))
        connection.shutdown(socket.SHUT_WR)
        beginning = connection.recv(2, socket.MSG_WAITALL)  # before the first pass
        backend.open.set()
        answer = read_answer(connection, beginning)
        assert answer.status == 200
        assert b'"finish_reason":"length"' in answer.body
        assert answer.body.count(b"data: [DONE]") == stream
        assert connection.recv(1) == b""


@LOOPS
def test_pipelined_requests_on_a_half_closed_connection_are_answered(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    with serving(new_loop=new_loop) as client, client.connect() as connection:
        body = {"prompt": "hello", "max_tokens": 2}
        connection.sendall(client.request("POST", "/v1/completions", body))
        connection.sendall(client.request("GET", "/health") + b"GET /he")  # the last one is incomplete
        connection.shutdown(socket.SHUT_WR)
        data = b""
        while received := connection.recv(1 << 16):
            data += received
        assert data.count(b"HTTP/1.1 200 OK\r\n") == 2
        assert data.endswith(b'{"status":"ok"}')


@LOOPS
@pytest.mark.parametrize("how", ["whole", "stream", "pipelined"])
def test_a_disconnect_is_noticed_before_the_next_pass(
    new_loop: Callable[[], asyncio.AbstractEventLoop], how: str
) -> None:
    backend = Gate()
    engine = roomy_engine(backend)
    with serving(engine, new_loop=new_loop) as client:
        connection = client.connect()
        connection.sendall(client.request("POST", "/v1/completions", {**LONG, "stream": how == "stream"}))
        until(lambda: backend.batches)
        if how == "pipelined":
            connection.sendall(client.request("GET", "/health"))
        backend.open.clear()
        passes = len(backend.batches)
        connection.close()
        until(lambda: b'path="/v1/completions"' in client.get("/metrics").body)
        backend.open.set()
        until(lambda: not engine.has_unfinished)
        assert len(backend.batches) <= passes + 2  # the one at the gate, and one that had passed it


def test_a_bad_pipelined_request_does_not_take_the_answer_of_the_one_before() -> None:
    backend = Gate()
    backend.open.clear()
    with serving(toy_engine(backend)) as client, client.connect() as connection:
        connection.sendall(client.request("POST", "/v1/completions", LONG) + b"nonsense\r\n\r\n")
        with pytest.raises(ConnectionError):
            read_answer(connection)
        backend.open.set()
