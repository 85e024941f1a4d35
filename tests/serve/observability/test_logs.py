"""Logs: one line per request with its statistics, and nothing confidential."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.serve.loading import announce
from paceline.serve.observability.logs import log_event, set_up_logs
from tests.serve.running import Client, serving, until
from tests.toy import ENDLESS, ToyBackend, toy_engine

SECRET = "my secret prompt"


class Log:
    """What the server has logged, as facts."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def requests(self, path: str) -> list[dict[str, Any]]:
        """The lines of requests to a path."""
        lines = [record.__dict__.get("facts", {}) for record in self._caplog.records]
        return [facts for facts in lines if facts.get("path") == path and "method" in facts]

    def request(self, path: str) -> dict[str, Any]:
        """The one log line of a request to a path, written right after its answer."""
        until(lambda: self.requests(path))
        (facts,) = self.requests(path)
        return facts


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    caplog.set_level(logging.INFO)
    return Log(caplog)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving() as made:
        yield made


def test_a_request_has_one_log_line_with_its_statistics(client: Client, log: Log) -> None:
    fields = {"prompt": SECRET, "max_tokens": 5, "n": 2, "ignore_eos": True, "segment": "eu", "user": "ann"}
    answer = client.post("/v1/completions", fields)
    line = log.request("/v1/completions")
    assert line["request_id"] == answer.headers["x-request-id"]
    assert answer.json["id"] == f"cmpl-{line['request_id']}"
    assert line["method"] == "POST"
    assert line["status"] == 200
    assert line["client"] == "127.0.0.1"
    assert line["segment"] == "eu"
    assert line["prompt_tokens"] == answer.json["usage"]["prompt_tokens"]
    assert line["completion_tokens"] == 10
    assert line["finish_reasons"] == ["length", "length"]
    assert line["duration_ms"] > 0
    assert line["ttft_ms"] > 0
    assert len(line["user"]) == 12
    text = json.dumps(line)
    assert "secret" not in text
    assert "ann" not in text
    assert answer.json["choices"][0]["text"] not in text


def test_a_stream_has_the_same_log_line(client: Client, log: Log) -> None:
    client.complete(max_tokens=5, stream=True, ignore_eos=True)
    line = log.request("/v1/completions")
    assert (line["status"], line["completion_tokens"], line["finish_reasons"]) == (200, 5, ["length"])
    assert "disconnected" not in line


def test_a_disconnected_client_is_logged(client: Client, log: Log) -> None:
    client.stream(max_tokens=ENDLESS, ignore_eos=True).close()
    assert log.request("/v1/completions")["disconnected"] is True


def test_a_disconnect_during_the_request_is_no_error(
    client: Client, log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    with client.connect() as connection:
        head = client.request("POST", "/v1/completions", b"{", {"Content_Length": "100"})
        connection.sendall(head)
    line = log.request("/v1/completions")
    assert line["disconnected"] is True
    assert "status" not in line
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_request_ids_are_ours_and_a_valid_client_id_is_returned(client: Client, log: Log) -> None:
    first, second = (client.get("/v1/models", X_Request_Id="mine-1") for _ in range(2))
    assert first.headers["x-client-request-id"] == second.headers["x-client-request-id"] == "mine-1"
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    until(lambda: len(log.requests("/v1/models")) == 2)
    assert {line["client_request_id"] for line in log.requests("/v1/models")} == {"mine-1"}


@pytest.mark.parametrize("own", ["a b", "a\tb", "\xe9", "x" * 129, '{"a": 1}', "a;b"])
def test_an_invalid_client_request_id_is_omitted(client: Client, log: Log, own: str) -> None:
    answer = client.get("/v1/models", X_Request_Id=own)
    assert answer.status == 200
    assert "x-client-request-id" not in answer.headers
    assert "client_request_id" not in log.request("/v1/models")


def test_errors_have_a_log_line_and_unexpected_ones_a_traceback(
    log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    backend = ToyBackend(max_rows=64)
    with serving(toy_engine(backend)) as client:
        backend.fail_next = MemoryError("no room in /srv/models/secret")
        answer = client.complete()
        assert answer.status == 500
        assert "secret" not in answer.body.decode()
        assert client.complete().status == 200  # the server lives
    tracebacks = [record for record in caplog.records if record.exc_info]
    assert any("no room" in str(record.exc_info) for record in tracebacks)
    assert [line["status"] for line in log.requests("/v1/completions")] == [500, 200]


def test_health_checks_are_not_logged_and_nothing_is_logged_twice(
    client: Client, log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    client.get("/health")
    client.get("/metrics")
    client.get("/v1/models")
    log.request("/v1/models")
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("process_stays_as_it_is")
def test_a_start_says_model_and_drafter_in_a_readable_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    limits = {"max_model_len": "8192", "max_num_seqs": "16", "max_num_batched_tokens": "512"}
    set_up_logs("info", "text")
    drafting = {"drafters": "suffix,eagle3", "draft_control": "auto"}
    announce({"model": "smollm2-135m", **drafting, **limits}, 2.04)
    model, drafter = capsys.readouterr().err.splitlines()
    assert "model name=smollm2-135m max_model_len=8192 max_num_seqs=16" in model
    assert drafter.endswith("drafter name=suffix,eagle3 control=auto")


@pytest.mark.usefixtures("process_stays_as_it_is")
@pytest.mark.parametrize("form", ["json", "text"])
def test_a_log_event_is_always_one_line(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("info", form)
    log_event(logging.getLogger("paceline.test"), "request", path="/a\nb\x1b[31m", status=200, segment=None)
    (line,) = capsys.readouterr().err.splitlines()
    assert "\x1b" not in line
    assert "segment" not in line
    if form == "json":
        fields = json.loads(line)
        assert fields["event"] == "request"
        assert fields["path"] == "/a\nb\x1b[31m"
        assert fields["time"].endswith("+00:00")
