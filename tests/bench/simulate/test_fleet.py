"""The fleet simulation: one simulated time, real routing, and what users get to see of it."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.run.engine_runner import EngineRunner, Task
from paceline.bench.simulate import fleet, fleet_check
from paceline.bench.simulate.capacity import smallest
from paceline.bench.simulate.costs import Call, Contention, PassSize, ServerCosts
from paceline.bench.simulate.fleet import run_fleet
from paceline.bench.simulate.fleet_check import ComparedFleet, ComputeClock
from paceline.bench.simulate.fleet_view import fleet_check_result
from paceline.bench.simulate.prompts import FleetRequest, SharedPrefixes, fleet_requests
from paceline.bench.simulate.run import Method, World, simulated_engine
from paceline.bench.simulate.world import Acceptance, VirtualClock
from paceline.bench.traffic.profiles import Profile
from paceline.bench.traffic.traces import Arrival
from paceline.cli import app
from paceline.core.params import SamplingParams
from paceline.engine.admission import Limits
from paceline.errors import ConfigError
from paceline.scale.remote.routing import LeastLoadedRouting

OFF = Method("off")


class RowCosts:
    """1 ms for a pass and 0.1 ms for each of its rows; drafts are free."""

    def pass_seconds(self, size: PassSize) -> float:
        return 0.001 + 0.0001 * size.rows

    def overhead_seconds(self, size: PassSize) -> float:
        return 0.0

    def draft_seconds(self, call: Call) -> float:
        return 0.0


def world(kv_tokens: int | None = None, **options: Any) -> World:
    return World(
        {label: RowCosts() for label in ("off", "auto")},
        {"chain": [Acceptance.constant(0.8, 8)]},
        max_num_batched_tokens=64,
        server_kv_tokens=kv_tokens,
        max_num_seqs=8,
        **options,
    )


def steady(count: int, every: float, prompt: int = 40, answer: int = 6) -> list[Arrival]:
    return [Arrival(every * number, prompt, answer) for number in range(count)]


def shared_prefixes(count: int) -> list[FleetRequest]:
    """Requests that begin with one of 12 prefixes of 512 tokens, all about as frequent."""
    chance = random.Random(0)
    return fleet_requests(
        [Arrival(0.01 * number, 512 + 24, 2, (chance.randrange(12),)) for number in range(count)]
    )


def test_a_fleet_of_one_takes_the_time_of_one_server() -> None:
    requests = fleet_requests(steady(20, 0.003), SharedPrefixes(2, 32))
    run = run_fleet(world(), OFF, 1, "prefix", requests)
    clock = VirtualClock()
    limits = Limits(4, 47, max_num_seqs=8, max_num_batched_tokens=64)
    engine = simulated_engine(world(), OFF, clock, limits, 8 * 46 // 16, Counter(), True)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    tasks = [Task(str(number), "", item.token_ids(), params) for number, item in enumerate(requests)]
    due = tuple(request.due for request in requests)
    alone = EngineRunner(engine, clock=clock).run(tasks, Profile("", None, due))
    assert [answer.ttft for answer in run.answers] == pytest.approx([answer.ttft for answer in alone.answers])
    assert [answer.e2e_seconds for answer in run.answers] == pytest.approx(
        [answer.e2e_seconds for answer in alone.answers]
    )
    assert run.seconds == pytest.approx(alone.seconds)
    assert run.hit_rate == pytest.approx(engine.kv.prefix_hits / engine.kv.prefix_queries)


def test_a_server_delays_requests_and_stretches_passes() -> None:
    """A prompt of 40 tokens waits 1 ms and 40 times 0.1 ms; its passes take 5 and 1.1 ms, and 2.5 ms more."""
    server = ServerCosts.parse("request=1,prompt_token=0.1,step=2,token=0.5")
    assert ServerCosts.parse(str(server)) == server
    run = run_fleet(world(server=server), OFF, 2, "prefix", fleet_requests(steady(2, 0.0, answer=2)))
    assert [answer.ttft for answer in run.answers] == pytest.approx(2 * [0.005 + 0.005 + 0.0025])
    assert [answer.tpot for answer in run.answers] == pytest.approx(2 * [0.0011 + 0.0025])


def test_a_step_beside_a_busy_replica_takes_longer() -> None:
    """Two replicas get a request each at once; a third request comes when both are idle. One of the two ends
    first, and the last step of the other is alone."""
    arrivals = [Arrival(due, 40, 2) for due in (0.0, 0.0, 1.0)]
    run = run_fleet(world(contention=Contention(1.5, 2.0)), OFF, 2, "prefix", fleet_requests(arrivals))
    assert [answer.ttft for answer in run.answers] == pytest.approx([1.5 * 0.005, 1.5 * 0.005, 0.005])
    assert [answer.tpot for answer in run.answers] == pytest.approx([2 * 0.0011, 0.0011, 0.0011])


def test_replicas_share_the_time_and_the_work() -> None:
    """Twice the requests at each moment on twice the replicas take the same times."""
    one = run_fleet(world(), OFF, 1, "prefix", fleet_requests(steady(20, 0.003)))
    twice = [arrival for arrival in steady(20, 0.003) for _ in range(2)]
    two = run_fleet(world(), OFF, 2, "prefix", fleet_requests(twice))
    assert two.requests == [20, 20]
    assert two.seconds == pytest.approx(one.seconds)
    assert two.utilization == pytest.approx(one.utilization)
    assert [answer.ttft for answer in two.answers[::2]] == pytest.approx(
        [answer.ttft for answer in one.answers]
    )


def test_a_run_repeats_itself() -> None:
    requests = shared_prefixes(24)
    assert run_fleet(world(), Method("auto"), 3, "prefix", requests) == run_fleet(
        world(), Method("auto"), 3, "prefix", requests
    )


def test_the_router_sees_a_request_end_when_its_last_pass_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of 40 rows takes 5 ms, one of a single row 1.1 ms: the first request ends at 6.1 ms."""
    seen: list[int] = []

    class Watching(LeastLoadedRouting):
        def rank(
            self, prefix_hashes: Sequence[int], session: str | None, loads: Mapping[str, int]
        ) -> list[str]:
            seen.append(sum(loads.values()))
            return super().rank(prefix_hashes, session, loads)

    monkeypatch.setattr(fleet, "ROUTINGS", {"prefix": lambda _: Watching()})
    arrivals = [Arrival(due, 40, 2) for due in (0.0, 0.0060, 0.0062, 0.0500)]
    run_fleet(world(), OFF, 3, "prefix", fleet_requests(arrivals))
    assert seen == [0, 1, 1, 0]


def test_hit_rates_are_those_of_one_big_process_and_random_routing_has_fewer() -> None:
    """A replica's cache has room for 3 prefixes and 3 requests, so 4 replicas can hold all prefixes."""
    here, requests = world(kv_tokens=6 * (512 + 32)), shared_prefixes(150)
    rates = {
        routing: run_fleet(here, OFF, 4, routing, requests).hit_rate
        for routing in ("pooled", "prefix", "least-loaded", "random")
    }
    assert rates["pooled"] > 0.8
    assert rates["prefix"] > 0.9 * rates["pooled"]
    assert max(rates["random"], rates["least-loaded"]) < 0.75 * rates["pooled"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 20, 21, None])
def test_the_smallest_fleet_is_found_without_trying_all(size: int | None) -> None:
    tried: list[int] = []

    def holds(number: int) -> bool:
        tried.append(number)
        return size is not None and number >= size

    assert smallest(holds, 1, 21) == size
    assert len(tried) == len(set(tried)) <= 9


def trace(path: Path, count: int = 24) -> str:
    lines = [f"{0.05 * number},{200 + number},{4 + number % 3}" for number in range(count)]
    (path / "trace.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines, ""]))
    return str(path / "trace.csv")


def test_the_command_finds_the_smallest_fleet_of_each_method(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    arguments = ["simulate", "--gpu", "l4", "--model", "llama-3.1-8b", "--trace", trace(tmp_path)]
    arguments += ["--replicas", "1..8", "--slo", "ttft=400,tpot=90", "--gpu-price", "0.8"]
    app([*arguments, "--json"], standalone_mode=False)
    facts = json.loads(capsys.readouterr().out)
    assert [(found["method"], found["routing"]) for found in facts["smallest"]] == [
        ("off", "prefix"),
        ("auto", "prefix"),
    ]
    by_size = {row["replicas"]: row for row in facts["rows"] if row["method"] == "off"}
    size = facts["smallest"][0]["replicas"]
    assert 1 < size < 8
    assert by_size[size]["good_share"] >= 0.9 > by_size[size - 1]["good_share"]
    assert by_size[size]["percentiles"]["ttft_ms"].keys() == {"p50", "p95", "p99"}
    cost = size * 0.8 / 3600 / by_size[size]["tokens_per_second"] * 1e6
    assert by_size[size]["cost_per_million_tokens"] == pytest.approx(cost)
    app([*arguments, "--html", str(tmp_path / "page.html")], standalone_mode=False)
    shown = capsys.readouterr().out
    assert f"off, prefix routing: {size} replicas hold ttft=400,tpot=90, at " in shown
    assert "By size of the fleet" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--replicas", "0"], "--replicas must be an integer from 1 to 4096, got 0"),
        (["--replicas", "4..2"], "the range is reversed. Write 2..4"),
        (["--replicas", "some"], "such as 4 or 1..16; got 'some'"),
        (["--replicas", "2", "--slo", "latency=5"], "of ttft, tpot and e2e; got 'latency=5'"),
        (["--replicas", "2", "--routing", "nearest"], "--routing must be one of prefix, "),
        (["--replicas", "2", "--limit", "0"], "--limit must be an integer from 1"),
        (["--replicas", "2", "--time-scale", "0"], "--time-scale must be a number above 0"),
        (["--replicas", "2", "--shared-prefixes", "32"], "such as 32x1024; got '32'"),
        (["--replicas", "2", "--rate", "4"], "--rate has no effect with --replicas"),
        (
            ["--replicas", "2", "--server", "tokens=1"],
            "with the names request, prompt_token, step, token, row; got 'tokens=1'",
        ),
        (["--replicas", "2", "--max-num-seqs", "0"], "--max-num-seqs must be an integer from 1"),
        (["--replicas", "2", "--gpu-price", "1", "--replica-price", "1"], "leave --gpu-price out"),
        (["--replicas", "2", "--check"], "--gpu has no effect with --check"),
        (["--replicas", "1..2", "--check"], "--check compares one fleet"),
        ([], "--trace is of a fleet: add --replicas"),
    ],
)
def test_flags_without_effect_or_meaning_are_refused(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    given = ["simulate", "--gpu", "h200", "--trace", trace(tmp_path), *arguments]
    with pytest.raises(ConfigError, match=message):
        app(given, standalone_mode=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no column TIMESTAMP"),
        ("TIMESTAMP\n1\n", "request 1 has no length"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n1,9000000,5\n",
            "of 9000005 tokens does not fit",
        ),
    ],
)
def test_a_trace_that_cannot_be_served_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "trace.csv").write_text(text)
    arguments = ["simulate", "--gpu", "h200", "--replicas", "2", "--trace", str(tmp_path / "trace.csv")]
    with pytest.raises(ConfigError, match=message):
        app(arguments, standalone_mode=False)


def test_a_fleet_needs_a_machine_and_a_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--replicas needs a machine"):
        app(["simulate", "--replicas", "2", "--trace", trace(tmp_path)], standalone_mode=False)
    with pytest.raises(ConfigError, match="--replicas needs the requests of a --trace"):
        app(["simulate", "--gpu", "h200", "--replicas", "2"], standalone_mode=False)


def test_a_request_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="a request of 46 tokens, but the model's context has 45"):
        run_fleet(world(max_model_len=45), OFF, 1, "prefix", fleet_requests(steady(1, 1.0)))


def test_a_fleet_of_real_engines_runs_beside_the_simulated_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_gguf: Path
) -> None:
    """How close the times are is not tested: that would time a busy machine."""
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", *(f"{number},48,4" for number in range(8))]
    (tmp_path / "trace.csv").write_text("\n".join(lines))
    arguments = ["simulate", str(tiny_gguf), "--trace", str(tmp_path / "trace.csv"), "--json", "--check"]
    app([*arguments, "--replicas", "2", "--shared-prefixes", "2x32"], standalone_mode=False)
    rows = {row["figure"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert all(row["measured"] > 0 and row["simulated"] > 0 for row in rows.values())
    hits = rows["prefix cache hits (%)"]
    assert hits["measured"] == hits["simulated"] == pytest.approx(100 * 6 / 8 * 32 / 48)
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,9999,1\n")
    with pytest.raises(ConfigError, match="the model's context has"):
        app([*arguments, "--replicas", "2"], standalone_mode=False)


def test_real_runs_that_differ_are_named() -> None:
    compared = [
        ComparedFleet("steady", (10.0, 11.0, 9.5), 11.0),
        ComparedFleet("not", (10.0, 12.0, 9.0), 13.0),
    ]
    result = fleet_check_result("two replicas", compared)
    assert result.title == "two replicas: 1 of 2 figures within 15%"
    assert [row[1:] for row in result.tables[0].rows] == [
        ("10.0", "11.0", "1.100", "0.950 to 1.100"),
        ("10.0", "13.0", "1.300", "0.900 to 1.200"),
    ]
    assert result.notes == ["Real runs differ by more than 15% from their median: not."]


def test_a_compute_clock_counts_cpu_time_only_while_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = iter([10.0, 10.5, 12.0])
    monkeypatch.setattr(fleet_check, "cpu_time", lambda: next(spent))
    clock = ComputeClock()
    clock.advance(3.0)
    with clock.counting():  # from 10
        assert clock() == 3.5
    assert clock() == 5.0  # until 12
