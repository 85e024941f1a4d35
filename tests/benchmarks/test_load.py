"""The load run: a correct server passes, and each planted fault is found."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.server import gauges
from benchmarks.server.client_requests import INVALID_FIELDS
from benchmarks.server.cut_client import Cut, post_cut
from benchmarks.server.load import (
    Load,
    LoadOptions,
    mixed_requests,
    plain_requests,
    run_load,
)
from benchmarks.server.load_report import load_facts, load_notes
from paceline.bench.servers.client import Answer, Server, read_response
from paceline.bench.traffic.workloads import Prompt
from paceline.errors import ConfigError
from tests.bench.scripted_server import ScriptedServer, with_server

PROMPTS = [
    Prompt("1", "s", 8, text="the quick brown fox jumps over the lazy dog again and again"),
    Prompt("2", "s", 12, messages=[{"role": "user", "content": "one two three four five six"}]),
    Prompt("3", "s", 5, text="a b c d e f g"),
]
OPTIONS = LoadOptions(clients=10, requests=60, rounds=2)


def loaded(scripted: ScriptedServer, options: LoadOptions = OPTIONS) -> Load:
    return with_server(scripted, lambda server: run_load(server, PROMPTS, options))


def test_an_honest_server_passes() -> None:
    scripted = ScriptedServer()
    load = loaded(scripted)
    assert load.good
    facts = load_facts(load)
    for one in facts["results"]:
        assert (one["lost"], one["wrong"], one["misjudged"]) == (0, 0, 0)
        assert sum(one["statuses"].values()) == 60
        assert set(one["statuses"]) <= {0, 200, 400, 404}
        assert one["first_byte_ms"]["p50"] <= one["first_byte_ms"]["p99"]
        assert one["gap_ms"] is not None
        assert one["after"]["memory_bytes"] == 1.5e8
    assert scripted.left > 0  # some were cut in the middle of their own request
    assert "no request held a page" in load_notes(load)[-1]


class Forgets(ScriptedServer):
    """Sends no end for one of the concurrent requests, though it did when the request came alone."""

    def ending(self, body: dict[str, Any]) -> list[bytes]:
        return [] if len(self.seen) > 3 and body["seed"] == 2 else super().ending(body)


class Confuses(ScriptedServer):
    """With concurrent requests, one gets another's words."""

    def words(self, body: dict[str, Any]) -> list[str]:
        words = super().words(body)
        return words[::-1] if len(self.seen) > 3 and body["seed"] == 1 else words


class Breaks(ScriptedServer):
    """Streams an error event, with concurrent requests only."""

    def ending(self, body: dict[str, Any]) -> list[bytes]:
        error = b'{"error": {"message": "broken"}}'
        return [error, b"[DONE]"] if len(self.seen) > 3 and body["seed"] == 0 else super().ending(body)


class Swallows(ScriptedServer):
    """Accepts an invalid field."""

    def refusal(self, body: dict[str, Any]) -> int | None:
        return None if "no_such_field" in body else super().refusal(body)


class Fails(ScriptedServer):
    """Fails on invalid requests."""

    def refusal(self, body: dict[str, Any]) -> int | None:
        status = super().refusal(body)
        return 500 if status == 404 else status


@pytest.mark.parametrize(
    ("faulty", "counted"),
    [(Forgets, "lost"), (Breaks, "lost"), (Confuses, "wrong"), (Swallows, "misjudged"), (Fails, "misjudged")],
)
def test_a_planted_fault_is_counted_where_it_belongs(faulty: type[ScriptedServer], counted: str) -> None:
    load = loaded(faulty())
    assert not load.good
    sums = {
        name: sum(one[name] for one in load_facts(load)["results"]) for name in ("lost", "wrong", "misjudged")
    }
    assert sums.pop(counted) > 0
    assert set(sums.values()) == {0}


def test_leaked_pages_fail_a_load_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauges, "SETTLE_SECONDS", 0.0)
    scripted = ScriptedServer()
    scripted.held_after = 0.02
    load = loaded(scripted)
    assert not load.good
    assert "2.00% of the pages held" in load_notes(load)[-1]


class Full(ScriptedServer):
    """Answers every second concurrent request with 429."""

    def refusal(self, body: dict[str, Any]) -> int | None:
        return 429 if len(self.seen) > 3 and len(self.seen) % 2 else super().refusal(body)


def test_a_request_that_a_full_queue_turns_away_is_sent_again() -> None:
    load = loaded(Full(), LoadOptions(clients=1, requests=12, rounds=1, cut=0, bad=0))
    assert load.good
    (one,) = load.rounds
    assert one.turned_away > 0
    assert one.statuses == {200: 12}


def test_cut_and_invalid_requests_are_seeded_and_have_their_fractions() -> None:
    plain = plain_requests(PROMPTS, "m")
    many = LoadOptions(requests=4000, seed=5)
    mixed = mixed_requests(plain, many, 0)
    assert mixed == mixed_requests(plain, many, 0)
    assert mixed != mixed_requests(plain, many, 1)
    assert sum(one.cut is not None for one in mixed) / 4000 == pytest.approx(0.2, abs=0.02)
    assert sum(one.refusal is not None for one in mixed) / 4000 == pytest.approx(0.1, abs=0.02)
    cuts = {one.cut.reads for one in mixed if one.cut is not None}
    assert {-1, 0, 1, 5} <= cuts
    assert len({str(one.body) for one in mixed if one.refusal}) == len(INVALID_FIELDS) * len(PROMPTS)


def test_a_client_that_disconnects_has_only_what_it_read() -> None:
    body = plain_requests(PROMPTS, "scripted")[0].body

    async def work(server: Server) -> list[Answer]:
        cuts = [Cut(reads, reset) for reads in (-1, 0, 1) for reset in (False, True)]
        return [await post_cut(server, "/v1/completions", body, cut) for cut in cuts]

    answers = with_server(ScriptedServer(), work)
    assert [answer.status for answer in answers[:4]] == [0, 0, 0, 0]
    assert not any(answer.complete for answer in answers)


def test_pieces_have_the_time_of_their_completion() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    reads = [(1.0, head + b"3\r\nab"), (2.0, b"c\r\n2\r\nde"), (3.0, b"\r\n4;x=y\r\nf"), (4.0, b"ghi")]
    status, headers, pieces = read_response([*reads, (5.0, b"\r\n0\r\n\r\n")])
    assert (status, headers["transfer-encoding"]) == (200, "chunked")
    assert pieces == [(2.0, b"abc"), (2.0, b"de"), (4.0, b"fghi")]
    assert read_response(reads[:2])[2] == [(2.0, b"abc"), (2.0, b"de")]
    assert read_response([(1.0, b"HTTP/1.1 200 OK\r\nContent-")]) == (0, {}, [])
    assert read_response([]) == (0, {}, [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": 0}, "--clients"),
        ({"cut": -0.1}, "--cut"),
        ({"cut": 0.6, "bad": 0.4}, "no request to judge"),
    ],
)
def test_what_cannot_be_run_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoadOptions(**options)


def test_a_workload_that_fails_alone_is_reported_with_the_servers_reason() -> None:
    class Refuses(ScriptedServer):
        def refusal(self, body: dict[str, Any]) -> int | None:
            return 400

    with pytest.raises(ConfigError, match="fails even alone: no"):
        loaded(Refuses())


def test_addresses() -> None:
    assert Server.at("http://127.0.0.1:8000/v1/") == Server("127.0.0.1", 8000)
    assert Server.at("https://host/prefix") == Server("host", 443, "/prefix", tls=True)
    with pytest.raises(ConfigError, match="--url must be like"):
        Server.at("localhost:8000")
