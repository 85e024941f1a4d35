"""Limits: what is too large, too many or too slow gets a clear answer, and does not affect other clients."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator

import pytest

from paceline.serve.http.connections import MAX_HEAD_BYTES, MAX_HEADERS
from tests.serve.running import PATIENCE, Client, Gate, read_answer, serving, until
from tests.toy import ENDLESS, toy_engine

HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving(max_body_bytes=2000) as made:
        yield made


# Sizes ---------------------------------------------------------------------------------------------


def test_a_large_content_length_is_refused_before_the_body_is_sent(client: Client) -> None:
    head = client.request("POST", "/v1/completions", b"", {"Content_Length": "2001"})
    answer = client.raw(head)
    assert answer.status == 413
    assert "2000 bytes" in answer.message


def test_a_chunked_body_is_refused_once_it_is_too_large(client: Client) -> None:
    headers = {"Transfer_Encoding": "chunked", "Content_Type": "application/json"}
    head = client.request("POST", "/v1/completions", headers=headers)
    chunk = b"3e8\r\n" + b" " * 1000 + b"\r\n"
    assert client.raw(head + 2 * chunk + b"0\r\n\r\n").status == 400  # not JSON, but small enough
    assert client.raw(head + 3 * chunk).status == 413


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param(f"X-Long: {'a' * MAX_HEAD_BYTES}\r\n\r\n", id="one long"),
        pytest.param("".join(f"X-{n}: a\r\n" for n in range(MAX_HEADERS + 1)) + "\r\n", id="many"),
        pytest.param(f"X-Endless: {'a' * (MAX_HEAD_BYTES + 1000)}", id="one without an end"),
    ],
)
def test_headers_that_are_too_large_or_too_many_are_refused(client: Client, headers: str) -> None:
    answer = client.raw(f"GET /health HTTP/1.1\r\nHost: a\r\n{headers}".encode())
    assert answer.status == 431
    assert f"{MAX_HEADERS} headers" in answer.message
    assert answer.headers["connection"] == "close"


def test_a_long_path_counts_against_the_limit_on_headers(client: Client) -> None:
    assert client.get("/" + "a" * MAX_HEAD_BYTES).status == 431
    assert client.get("/" + "a" * 5000).status == 404


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: a\x00b\r\n\r\n",
    ],
)
def test_invalid_or_ambiguous_http_is_refused(client: Client, data: bytes) -> None:
    answer = client.raw(data)
    assert answer.status == 400
    assert answer.json["error"]["type"] == "invalid_request_error"


# Numbers -------------------------------------------------------------------------------------------


def test_requests_beyond_the_queue_get_429_with_retry_after() -> None:
    backend = Gate()
    backend.open.clear()
    with serving(toy_engine(backend, max_num_seqs=1), max_queue=1) as client:
        held = []
        for _ in range(2):  # one runs, one waits
            connection = client.connect()
            body = {"prompt": "hello", "max_tokens": 2}
            connection.sendall(client.request("POST", "/v1/completions", body))
            held.append(connection)
        until(lambda: client.get("/load").json["server_load"] == 2)  # else the third could wait instead
        answer = client.complete(max_tokens=1)
        assert answer.status == 429
        assert answer.headers["retry-after"] == "1"
        assert answer.json["error"]["type"] == "rate_limit_error"
        backend.open.set()
        assert [read_answer(connection).status for connection in held] == [200, 200]
        assert client.complete(max_tokens=1).status == 200


def test_pipelined_requests_are_bounded(client: Client) -> None:
    with client.connect() as connection:
        connection.sendall(client.request("GET", "/v1/models") * 3)
        assert [read_answer(connection).status] == [200]
    with client.connect() as connection:
        connection.sendall(client.request("GET", "/v1/models") * 50)
        with pytest.raises(ConnectionError):
            read_answer(connection)


# Time ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "beginning",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-Slow: ",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{",
    ],
    ids=["headers", "body"],
)
def test_a_request_that_does_not_arrive_times_out(beginning: bytes) -> None:
    with serving(client_timeout=0.05) as client:
        answer = client.raw(beginning)
    assert answer.status == 408
    assert "0.05 seconds" in answer.message


def test_an_idle_connection_is_closed() -> None:
    with serving(timeout_keep_alive=1) as client, client.connect() as connection:
        connection.sendall(client.request("GET", "/health"))
        assert read_answer(connection).status == 200
        assert connection.recv(1) == b""


def test_a_request_beyond_its_timeout_gets_504() -> None:
    backend = Gate()
    backend.open.clear()
    engine = toy_engine(backend)
    with serving(engine, request_timeout=0.1) as client:
        answer = client.complete(max_tokens=100)
        assert answer.status == 504
        assert "0.1 seconds" in answer.message
        assert answer.headers["x-should-retry"] == "false"
        backend.open.set()
        until(lambda: not engine.has_unfinished)
        assert engine.kv.usage == 0


def test_a_stream_beyond_its_timeout_ends_with_an_error_event() -> None:
    endless = {"max_tokens": ENDLESS, "ignore_eos": True}
    with serving(request_timeout=1.5) as client, client.stream(**endless) as stream:
        seen = b""
        while b"[DONE]" not in seen:
            received = stream.recv(1 << 16)
            assert received
            seen += received
    assert b"timeout_error" in seen


# Clients that do not read ---------------------------------------------------------------------


def has_answered(client: Client) -> bool:
    """Whether the server has finished a completion, in one way or another."""
    return b'path="/v1/completions"' in client.get("/metrics").body


def test_a_client_that_does_not_read_is_disconnected() -> None:
    """Its answer is far larger than the system's buffers; another client's answer is not delayed."""
    engine = toy_engine(max_model_len=400)
    patient = 2.0  # seconds: the engine takes a tenth of them for the answer, a third beside other work
    with serving(engine, send_buffer=4096, client_timeout=patient) as client, socket.socket() as connection:
        connection.settimeout(PATIENCE)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(("127.0.0.1", client.port))
        body = {"prompt": "hello", "stream": True, "max_tokens": 300, "ignore_eos": True, "logprobs": 20}
        connection.sendall(client.request("POST", "/v1/completions", body))
        assert client.post("/v1/chat/completions", HELLO).status == 200
        until(lambda: not engine.has_unfinished)
        assert not has_answered(client)  # it was not aborted, but computed to its end
        until(lambda: has_answered(client))
        assert not engine.has_unfinished
        with pytest.raises(ConnectionError):
            read_answer(connection)


def test_one_slow_client_does_not_delay_the_others(client: Client) -> None:
    answers: list[int] = []
    with client.connect() as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 900\r\n\r\n{")
        threads = [
            threading.Thread(target=lambda: answers.append(client.complete(max_tokens=2).status))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == [200] * 8


def test_answers_on_one_connection_come_in_order(client: Client) -> None:
    with client.connect() as connection:
        for count in (1, 2, 3):
            body = {"prompt": "hello", "max_tokens": count, "ignore_eos": True}
            connection.sendall(client.request("POST", "/v1/completions", body))
            assert json.loads(read_answer(connection).body)["usage"]["completion_tokens"] == count
