"""A soak checks that the last answer is as right as the first, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.server.client_requests import ClientRequest
from benchmarks.server.gauges import Gauges, Sample, memory_slope
from benchmarks.server.soak import Soak, SoakOptions, run_soak, seconds_of
from benchmarks.server.soak_report import soak_facts, soak_notes, soak_result
from benchmarks.server.soak_traffic import KINDS, comparable, mixed_traffic
from paceline.bench.servers.client import Answer, Server
from paceline.bench.traffic.workloads import Prompt
from paceline.core.forward import ForwardBatch, ForwardOutput
from paceline.engine.engine import Engine
from paceline.errors import ConfigError
from tests.serve.running import serving
from tests.toy import ToyBackend, toy_engine

PROMPTS = [Prompt("p", "s", 4, text="HELLO THERE"), Prompt("q", "s", 6, text="AND YOU")]


def soaked(backend: ToyBackend, seconds: float = 1.0, **options: Any) -> Soak:
    """A short soak of the toy model."""
    engine: Engine = toy_engine(backend, max_model_len=2048, num_pages=4000)
    with serving(engine, api_key=("a", "b")) as client:
        servers = [Server("127.0.0.1", client.port, api_key=key) for key in ("a", "b")]
        own = SoakOptions(**{"seconds": seconds, "clients": 4, **options})
        return asyncio.run(run_soak(servers, PROMPTS, own))


def test_a_sound_server_gives_every_request_the_bytes_that_it_has_alone() -> None:
    soak = soaked(ToyBackend(max_rows=64))
    assert soak.good
    assert soak.examples == []
    facts = soak_facts(soak)
    assert json.loads(json.dumps(facts))["good"] is True
    assert (facts["lost"], facts["wrong"], facts["misjudged"], facts["leaked_files"]) == (0, 0, 0, 0)
    assert facts["answers"] > 10
    assert facts["cut_by_clients"] > 0
    assert facts["refused"] > 0
    assert sum(facts["statuses"].values()) == facts["requests"]
    assert facts["after"]["kv_usage"] == 0
    assert set(facts["left_out"]) <= {name for name, _, _ in KINDS if "tools" in name or "schema" in name}
    assert facts["parts"][-1]["memory_bytes"] > 0
    assert soak_result(soak).tables[0].columns[1] == "0 to 0.2 s"
    assert any("0 pages leaked" in note for note in soak_notes(soak))


class Drifts(ToyBackend):
    """Another model in batches of more than two requests."""

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        output = super().forward(batch)
        if batch.num_requests > 2:
            output.logits[:] = output.logits[:, ::-1].copy()
        return output


class Fails(ToyBackend):
    """Raises in batches of more than two requests."""

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        if batch.num_requests > 2:
            self.fail_next = RuntimeError("lost")
        return super().forward(batch)


@pytest.mark.parametrize(("backend", "counted"), [(Drifts, "wrong"), (Fails, "lost")])
def test_a_planted_fault_is_counted_and_shown(backend: type[ToyBackend], counted: str) -> None:
    soak = soaked(backend(max_rows=64), seconds=0.5, cut=0.0, bad=0.0)
    facts = soak_facts(soak)
    assert not soak.good
    assert facts[counted] > 0
    assert facts["examples"]
    assert facts["misjudged"] == 0


def sample(second: float, memory: float, files: float = 10) -> Sample:
    return Sample(second, memory, files, 5, 0, 0, 0)


def empty(**changes: Any) -> Soak:
    return replace(Soak("m", SoakOptions(60), {}, 1), **changes)


def test_leaked_pages_or_files_fail_a_soak() -> None:
    assert empty(after=Gauges(0, 0, 0, 1)).good
    held = empty(after=Gauges(0, 0, 0.02, 1))
    assert not held.good
    assert "2.00% of the pages held" in soak_notes(held)[-1]
    open_files = empty(samples=[sample(0, 1, files=10), sample(60, 1, files=60)])
    assert not open_files.good
    assert open_files.leaked_files == 50


def test_the_slope_of_memory_is_that_of_the_second_half() -> None:
    filling = [sample(second, 1e6 * second) for second in range(10)]
    flat = [sample(second, 9e6) for second in range(10, 21)]
    assert memory_slope([*filling, *flat]) == pytest.approx(0, abs=1)
    assert memory_slope(filling) == pytest.approx(3600e6)
    assert memory_slope(filling[:2]) is None


def test_every_kind_of_request_has_a_seed_and_there_are_several_salts() -> None:
    traffic = mixed_traffic(PROMPTS, "m")
    assert {kind for kind, _ in traffic} == {name for name, _, _ in KINDS}
    assert len({asked.body["seed"] for _, asked in traffic}) == len(traffic)
    assert len({asked.body.get("cache_salt") for _, asked in traffic}) > 2


def answer(*events: dict[str, Any] | str, status: int = 200) -> Answer:
    data = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return Answer(0.0, status, {}, tuple((1.0, f"data: {one}\n\n".encode()) for one in data), 2.0)


def chunk(text: str, finish: str | None = None, name: str = "x") -> dict[str, Any]:
    return {"id": name, "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}


STREAM = ClientRequest("/v1/chat/completions", {"stream": True}, 0)
WHOLE = ClientRequest("/v1/chat/completions", {}, 0)


def test_where_a_stream_is_cut_into_events_and_its_id_do_not_matter() -> None:
    first = comparable(STREAM, answer(chunk("ab"), chunk("c", "stop"), "[DONE]"))
    assert first is not None
    assert comparable(STREAM, answer(chunk("a", name="y"), chunk("bc"), chunk("", "stop"), "[DONE]")) == first
    assert comparable(STREAM, answer(chunk("abd", "stop"), "[DONE]")) != first
    assert comparable(STREAM, answer(chunk("abc", "length"), "[DONE]")) != first


def test_incomplete_answers_cannot_be_compared() -> None:
    assert comparable(STREAM, answer(chunk("ab"), "[DONE]")) is None  # no end of the choice
    assert comparable(STREAM, answer(chunk("ab", "stop"))) is None  # no end of the stream
    assert comparable(STREAM, answer(chunk("ab", "stop"), {"error": {"message": "broken"}}, "[DONE]")) is None
    assert comparable(WHOLE, Answer(0.0, 200, {}, ((1.0, b'{"choices": ['),), 2.0)) is None
    assert comparable(WHOLE, Answer(0.0, 500, {}, ((1.0, b"{}"),), 2.0)) is None


def test_pieces_of_a_call_are_put_together() -> None:
    def call(**function: str) -> dict[str, Any]:
        calls = [{"index": 0, "id": "call_1", "function": function}]
        return {"choices": [{"index": 0, "delta": {"tool_calls": calls}}]}

    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
    one = comparable(STREAM, answer(call(name="f", arguments='{"a"'), call(arguments=": 1}"), end, "[DONE]"))
    other = comparable(STREAM, answer(call(name="f", arguments='{"a": 1}'), end, "[DONE]"))
    assert one == other
    assert '{\\"a\\": 1}' in str(one)


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("30m", 1800), ("1.5h", 5400)])
def test_durations(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-5", "0", "30 minutes", "1d"])
def test_invalid_durations_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--duration"):
        seconds_of(text)
