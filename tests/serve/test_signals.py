"""Signals: the first drains, the second stops at once, and a start after kill -9 is a normal one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.serve.http import draining
from paceline.serve.server import bind
from tests.serve import running
from tests.serve.running import PATIENCE, Client, read_answer, serving_process, until


def events_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def exit_code(process: ForkProcess) -> int | None:
    process.join(PATIENCE)
    return process.exitcode


def has_event(log: Path, event: str) -> bool:
    return f'"event": "{event}"' in log.read_text()


def ask(client: Client, max_tokens: int) -> socket.socket:
    """A connection on which a completion was requested."""
    connection = client.connect()
    body = {"prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True}
    connection.sendall(client.request("POST", "/v1/completions", body))
    until(lambda: b'num_requests_running{model_name="toy"} 1.0' in client.get("/metrics").body)
    return connection


@contextmanager
def hangups(handler: signal.Handlers) -> Iterator[None]:
    """Set a child's default handling of SIGHUP, which it inherits from its parent (which may be nohup)."""
    before = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_drains(tmp_path: Path, sig: int) -> None:
    log = tmp_path / "log"
    with hangups(signal.SIG_DFL), serving_process(log) as (process, client):
        running = ask(client, max_tokens=60)
        os.kill(process.pid or 0, sig)
        until(lambda: has_event(log, "draining"))
        health = client.get("/health")
        assert (health.status, health.json) == (503, {"status": "draining"})
        late = client.complete()
        assert late.status == 503
        assert late.headers["connection"] == "close"
        assert "retry-after" in late.headers
        answer = read_answer(running)
        assert answer.status == 200
        assert answer.json["usage"]["completion_tokens"] == 60
        assert exit_code(process) == 0
    assert [event["event"] for event in events_of(log)][-1] == "stopped"


def test_an_ignored_sighup_stays_ignored(tmp_path: Path) -> None:
    """As with `nohup paceline serve`."""
    with hangups(signal.SIG_IGN), serving_process(tmp_path / "log") as (process, client):
        os.kill(process.pid or 0, signal.SIGHUP)
        assert client.complete(max_tokens=2).status == 200
        process.terminate()
        assert exit_code(process) == 0
    assert [event["signal"] for event in events_of(tmp_path / "log") if "signal" in event] == ["SIGTERM"]


def test_requests_that_outlast_the_drain_get_an_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving_process(log, drain_timeout=0.2) as (process, client):
        running = ask(client, max_tokens=4000)
        streaming = client.stream(max_tokens=4000, ignore_eos=True)
        process.terminate()
        answer = read_answer(running)
        assert answer.status == 503
        assert "stopping" in answer.message
        seen = b""
        while b"[DONE]" not in seen:
            seen += streaming.recv(1 << 16)
        assert b"stopping" in seen
        assert exit_code(process) == 0
    assert has_event(log, "drain timed out")


def test_the_second_signal_stops_now(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving_process(log) as (process, client):
        running = ask(client, max_tokens=4000)
        process.terminate()
        until(lambda: has_event(log, "draining"))
        until(lambda: not process.is_alive() or process.terminate())  # type: ignore[func-returns-value]
        assert exit_code(process) == 128 + signal.SIGTERM
        with pytest.raises(ConnectionError):
            read_answer(running)
    assert has_event(log, "stopped now")


def test_the_same_signal_to_process_and_group_counts_once(tmp_path: Path) -> None:
    """As `timeout` and container runtimes do."""
    log = tmp_path / "log"
    with serving_process(log) as (process, client):
        running = ask(client, max_tokens=20)
        process.terminate()
        process.terminate()
        assert read_answer(running).status == 200
        assert exit_code(process) == 0


def test_the_port_can_be_reused_at_once_after_a_kill(tmp_path: Path) -> None:
    with serving_process(tmp_path / "first") as (process, client):
        running = client.stream(max_tokens=4000, ignore_eos=True)
        process.kill()
        process.join()
        with serving_process(tmp_path / "second", port=client.port) as (_, again):
            assert again.port == client.port
            assert again.complete(max_tokens=3).status == 200
        running.close()


def test_a_taken_port_is_reported_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"
        ):
            bind("127.0.0.1", port)


def test_nobody_can_connect_before_the_model_is_ready() -> None:
    """The port is bound before the model is loaded, but listened on only afterwards."""
    with bind("127.0.0.1", 0) as listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.getsockname())


def test_a_missing_library_is_named_with_the_remedy() -> None:
    program = "import sys; sys.modules['fastapi'] = None; sys.argv = ['paceline', 'serve']; "
    program += "from paceline.cli import main; main()"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr == (
        "error: `paceline serve` needs the module fastapi: run `pip install 'paceline[serve]'`.\n"
    )


def test_a_stuck_engine_does_not_keep_the_process_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that never ends cannot be interrupted: SIGTERM does not wait for the drain."""

    def hang(backend: object, batch: object) -> None:
        threading.Event().wait()

    monkeypatch.setattr(running.Slow, "forward", hang)
    monkeypatch.setattr(draining, "LAST_BYTES_SECONDS", 0.1)
    log = tmp_path / "log"
    with (
        serving_process(log, drain_timeout=3600, stuck_timeout=0.05) as (process, client),
        client.connect() as connection,
    ):
        connection.sendall(client.request("POST", "/v1/completions", {"prompt": "hello"}))
        until(lambda: client.get("/health").json == {"status": "stuck"})
        process.terminate()
        assert exit_code(process) == 128 + signal.SIGTERM
    assert "threading.Event().wait()" in log.read_text()  # where it hangs
