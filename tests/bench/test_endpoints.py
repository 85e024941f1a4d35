"""`paceline bench --endpoint`: servers of any engine, by streamed requests and their counters."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from paceline.bench.report.page import html_page
from paceline.bench.run.contest import Contest, SpeculationOptions
from paceline.bench.run.slices import alone
from paceline.bench.run.speculation import OFF
from paceline.bench.run.view import contest_result
from paceline.bench.servers.client import ClientError, Server
from paceline.bench.servers.contest import parse_addresses, run_served
from paceline.bench.servers.counters import read_counters
from paceline.bench.servers.endpoints import Endpoint, EndpointRunner, served_task
from paceline.bench.traffic.profiles import Profile, closed
from paceline.bench.traffic.workloads import Prompt, Workload
from paceline.errors import ConfigError
from tests.bench import scripted_server
from tests.bench.scripted_server import ScriptedServer, with_server

VLLM = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 4.0
"""
TWO = (Prompt("a", "short", 4, text="one two three"), Prompt("b", "long", 9, text="a b c d e f"))


class Drafting(ScriptedServer):
    """Reports two drafts of three tokens for every answer, of which one was accepted."""

    owner = "another"

    def refusal(self, body: dict[str, Any]) -> int | None:
        return None

    def _metrics(self) -> bytes:
        asked = len(self.seen)
        return (
            f'vllm:spec_decode_num_drafts_total{{e="0"}} {2 * asked}\n'
            f'vllm:spec_decode_num_draft_tokens_total{{e="0"}} {6 * asked}\n'
            f'vllm:spec_decode_num_accepted_tokens_total{{e="0"}} {2 * asked}\n'
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {2 * asked}\n'
        ).encode()


def measure(
    server: ScriptedServer,
    monkeypatch: pytest.MonkeyPatch,
    *profiles: Profile,
    methods: dict[str, Any] | None = None,
    metrics: bool = False,
    owner: str = "another",
) -> Contest:
    """All rows, by a scripted server; the bench runs in its own thread, as it would in a process."""
    models = json.dumps({"data": [{"id": "scripted", "owned_by": owner}]}).encode()
    monkeypatch.setattr(scripted_server, "MODELS", models)
    options = SpeculationOptions(
        (Workload("mixed", TWO),), methods or {}, rounds=1, profiles=profiles or (closed(1),)
    )

    async def work(at: Server) -> Contest:
        url = f"http://{at.host}:{at.port}"
        pages = {"server": f"{url}/metrics"} if metrics else {}
        return await asyncio.to_thread(run_served, options, {"server": url}, pages, None, None)

    return with_server(server, work)


def test_a_server_gets_the_workload_and_its_stream_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Drafting()
    contest = measure(server, monkeypatch)
    warm_up, first, second = server.seen
    assert (warm_up["max_tokens"], first["max_tokens"], second["max_tokens"]) == (4, 4, 9)
    assert (first["model"], first["prompt"], first["seed"], second["seed"]) == ("scripted", TWO[0].text, 0, 1)
    assert first["stream"] is True
    assert not {"speculative", "segment", "cache_salt"} & set(first), "another engine gets nothing of ours"
    short, long, every = contest.rows
    assert [(row.segment, row.prompts, row.output_tokens) for row in contest.rows] == [
        ("short", 1, 3),
        ("long", 1, 6),
        ("all", 2, 9),
    ]
    assert (short.method, short.cache, short.profile) == ("server", "server", "x1")
    assert short.speedup_vs_off is None
    assert short.identical is None, "there was no off to compare with"
    found = long.percentiles["ttft_ms"], long.percentiles["e2e_ms"]
    assert all(value is not None and value["p50"] > 0 for value in found)
    assert every.seconds == pytest.approx(short.seconds + long.seconds)
    assert contest.options.model == "scripted"
    assert any("restart them" in remark for remark in contest.remarks), "it keeps what it has seen"


def test_acceptance_is_what_the_counters_grew_by(monkeypatch: pytest.MonkeyPatch) -> None:
    for row in measure(Drafting(), monkeypatch, metrics=True).rows:
        assert (row.mean_acceptance_length, row.draft_acceptance_rate) == (2.0, pytest.approx(1 / 3))
        assert row.acceptance_per_position == [1.0]
        assert (row.draft_tokens_per_step, row.tokens_per_pass) == (3.0, None)


def test_with_mixed_segments_counters_cover_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short, long, every = measure(Drafting(), monkeypatch, Profile("9/s", None, (0.0, 0.01))).rows
    assert (short.mean_acceptance_length, long.mean_acceptance_length) == (None, None)
    assert every.mean_acceptance_length == 2.0


def test_a_paceline_server_reports_acceptance_by_segment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Ours(Drafting):
        """Three tokens for each draft: of `short` all are accepted, of `long` none."""

        def _metrics(self) -> bytes:
            lines = []
            for segment, share in (("short", 3), ("long", 0)):
                asked = sum(body.get("segment") == segment for body in self.seen)
                lines += [
                    f'paceline:spec_decode_num_{name}_total{{segment="{segment}"}} {value * asked}'
                    for name, value in (("drafts", 1), ("draft_tokens", 3), ("accepted_tokens", share))
                ]
            return "\n".join(lines).encode()

    mixed = Profile("9/s", None, (0.0, 0.01))
    short, long, every = measure(Ours(), monkeypatch, mixed, metrics=True, owner="paceline").rows
    assert (short.draft_acceptance_rate, long.draft_acceptance_rate) == (1.0, 0.0)
    assert every.draft_acceptance_rate == 0.5
    names = read_counters('paceline:spec_decode_num_drafts_total{segment="a\\"b"} 1\n')
    assert names is not None
    assert list(names.segments) == ['a"b']


def test_metrics_without_counters_are_refused_if_named_and_noted_if_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Silent(Drafting):
        def _metrics(self) -> bytes:
            return b"up 1\n"

    contest = measure(Silent(), monkeypatch)
    assert contest.rows[0].mean_acceptance_length is None
    assert any("no acceptance figures" in remark for remark in contest.remarks)
    with pytest.raises(ClientError, match=r"has neither .*spec_decode_num_drafts .*name the right page"):
        measure(Silent(), monkeypatch, metrics=True)


def test_methods_are_sent_to_a_paceline_server(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = {OFF: OFF, "ngram n=3": '{"method": "ngram", "num_speculative_tokens": 3}'}
    server = Drafting()
    contest = measure(server, monkeypatch, methods=methods, owner="paceline")
    asked = {json.dumps(body["speculative"]) for body in server.seen}
    assert asked == {'"off"', '{"strict": true, "method": "ngram", "num_speculative_tokens": 3}'}
    assert {body["segment"] for body in server.seen} == {"short", "long"}
    salts = {(json.dumps(body["speculative"]), body["cache_salt"]) for body in server.seen}
    assert len({salt for _, salt in salts}) == len(salts) == 4, "no method finds prefixes that another left"
    assert not any("restart them" in remark for remark in contest.remarks)
    assert [row.method for row in contest.rows[:2]] == list(methods)
    assert contest.rows[1].identical
    assert contest.rows[1].speedup_vs_off is not None
    with pytest.raises(ConfigError, match=r"this server is none\. Start one server for each method"):
        measure(Drafting(), monkeypatch, methods=methods)


def test_failed_requests_are_counted_and_a_refusing_server_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Picky(Drafting):
        def refusal(self, body: dict[str, Any]) -> int | None:
            return 503 if body["max_tokens"] == 9 else None

    contest = measure(Picky(), monkeypatch)
    assert [(row.segment, row.failed) for row in contest.rows] == [("short", 0), ("long", 1), ("all", 1)]
    result = contest_result(contest)
    note = "mixed all x1 server, server: 1 of 2 requests got no complete answer."
    assert note in result.notes
    page = html_page(result)
    assert "Outputs were not compared" in page
    assert note in page

    class Closed(Drafting):
        def refusal(self, body: dict[str, Any]) -> int | None:
            return 503

    with pytest.raises(ConfigError, match="does not answer the first request: status 503: no"):
        measure(Closed(), monkeypatch)
    runner = EndpointRunner(Endpoint(Server("127.0.0.1", 9), None), "salt")
    turn = alone(runner.slices([served_task(TWO[0], "m", 0, 0.0, True)] * 3, closed(2)))
    assert ["nothing answers" in (answer.error or "") for answer in turn.answers] == [True] * 3


def test_counters_are_read_under_every_engines_names() -> None:
    found = read_counters(VLLM)
    assert found is not None
    nothing = read_counters("llamacpp:spec_decode_num_drafts 0\n")
    assert nothing is not None
    grown = found.since(nothing)
    assert (grown.steps, grown.drafted, grown.accepted) == (10, 30, 12)
    assert grown.accepted_per_position == (8, 4)
    assert read_counters(VLLM.replace("vllm:", "llamacpp:").replace("_total{", "{")) == found
    assert read_counters(VLLM.replace("vllm:", "paceline:") + VLLM) == found, "counted once"
    gauges = 'sglang:spec_accept_length{tp_rank="0"} 2.5\nsglang:spec_accept_length{tp_rank="1"} 3.5\n'
    sglang = read_counters(gauges + 'sglang:spec_accept_rate{tp_rank="0"} 0.6\n')
    assert sglang is not None
    acceptance = sglang.since(sglang)
    assert (acceptance.length, acceptance.rate) == (3.0, 0.6)
    assert read_counters("vllm:num_requests_running 3\n") is None


def test_addresses_may_have_labels() -> None:
    given = ["off=http://a:1", "eagle3=http://b:2/v1"]
    assert parse_addresses("--endpoint", given) == {"off": "http://a:1", "eagle3": "http://b:2/v1"}
    assert parse_addresses("--endpoint", ["http://a:1/?x=y"]) == {"server": "http://a:1/?x=y"}
    with pytest.raises(ConfigError, match="given twice for 'server': name each"):
        parse_addresses("--endpoint", ["http://a:1", "http://b:1"])
    with pytest.raises(ConfigError, match="--metrics must be like http"):
        parse_addresses("--metrics", ["localhost:8000"])
    options = SpeculationOptions((Workload("mixed", TWO),), {})
    two = parse_addresses("--endpoint", given)
    with pytest.raises(ConfigError, match="--metrics names 'of', but --endpoint does not"):
        run_served(options, two, {"of": "http://a:1"}, None, None)
    with pytest.raises(ConfigError, match="--methods are of one server"):
        run_served(replace(options, methods={OFF: OFF, "ngram": "ngram"}), two, {}, None, None)
    with pytest.raises(ClientError, match=r"nothing answers at .*, port 9"):
        run_served(options, {"server": "http://127.0.0.1:9"}, {}, None, None)
