"""`paceline bench`: thin commands that print a table and write JSON with the machine in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.turns import take_turns
from paceline.bench.commands import MOVED
from paceline.bench.decode import measure
from paceline.bench.report.output import Report, busy_findings, machine_facts, machine_notes
from paceline.bench.report.result import Finding, Result
from paceline.errors import ConfigError
from paceline.machine import cpu_name, has_amx
from tests.bench.cli import run, run_json


def test_decode_without_a_peer_starts_none(
    tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "start_llama_cpp", None)
    monkeypatch.setattr(measure, "measure_fresh_start", lambda *_: measure.FreshStart(1.0, 1))
    short = ("--tokens", "2", "--prompt-tokens", "3", "--prefill", "9", "--rounds", "1", "--threads", "1")
    facts = run_json(tmp_path, "decode", str(tiny_gguf), *short, "--peer", "none", "--quantization", "int8")
    assert (facts["threads"], facts["quantization"], facts["rounds"]) == (1, "int8", 1)
    assert facts["paceline"]["decode"]["tokens_per_second"]["best"] > 0
    assert (facts["peer"], facts["peer_error"]) == (None, None)


@pytest.mark.parametrize("name", sorted(MOVED))
def test_a_command_that_has_moved_says_what_to_type_instead(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"In a checkout run `python -m benchmarks {name} --json 'a b'`\.$"
    ):
        run(name, "--json", "a b")


def test_tune_and_simulate_are_bench_commands_too() -> None:
    assert "--branching" in run("tune", "--help")
    assert "--gpu" in run("simulate", "--help")
    assert "speedup" in run("simulate", "--alpha", "0.8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("decode", "--json", "no/such/folder/facts.json"), "give a file in a folder that exists"),
        (("tune", "--lengths", "1,two"), "--lengths must be positive numbers"),
        (("simulate", "--html", "no/such/folder/page.html"), "give a file in a folder that exists"),
        (("serve", "localhost:8000"), "URL must be like http"),
        (("decode", "--peer", "vllm"), "peer must be one of llama.cpp, none"),
    ],
)
def test_a_users_mistake_is_refused_before_anything_is_loaded(
    arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(*arguments)


def test_the_machine_is_named_by_its_processor() -> None:
    assert cpu_name("processor : 0\nmodel name\t: Quick CPU 9\n") == "Quick CPU 9"
    assert cpu_name("processor : 0\nCPU part\t: 0xd0c\n") == "Arm Neoverse-N1"
    assert cpu_name("CPU part\t: 0xabc\n") == "Arm part 0xabc"
    assert cpu_name("")
    assert has_amx("flags\t: fpu amx_int8 avx\n")
    assert not has_amx("flags\t: fpu avx\nmodel name : amx_int8\n")
    assert machine_facts()["versions"]["numpy"]  # type: ignore[index]


def test_a_busy_machine_gives_a_warning() -> None:
    def notes(load: float, cores: int, timed: bool = True) -> list[str]:
        machine = {**machine_facts(), "usable_cores": cores, "load_average": load}
        warnings = [finding.text for finding in busy_findings(machine, timed)]
        return warnings + machine_notes(machine, 2, "int8", timed)[1:]

    assert notes(0.1, 2) == notes(0.5, 2) == notes(0.5, 16) == notes(1.5, 16) == []
    assert notes(0.7, 2) == ["Load average 0.7 at the start; timings may vary by a few percent."]
    assert "Measure again on a quiet machine" in notes(1.7, 2)[0]
    assert notes(1.7, 2, timed=False) == []


def test_a_busy_machine_is_named_before_the_verdicts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = {**machine_facts(), "usable_cores": 2, "load_average": 1.7}
    monkeypatch.setattr("paceline.bench.report.output.machine_facts", lambda: machine)
    Report(None).show(Result("t", [], {}, findings=[Finding("Not ready: 1 fail.", good=False)]))
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("Load average 1.7 of 2 cores")
    assert second == "Not ready: 1 fail."


def test_the_machine_line_says_what_ran() -> None:
    machine = {**machine_facts(), "gpu": "NVIDIA H200"}
    line = machine_notes(machine, None, "bfloat16")[0]
    assert "NVIDIA H200, bfloat16 weights" in line
    assert "threads" not in line
    assert "2 threads, int8 weights" in machine_notes({**machine, "gpu": None}, 2, "int8")[0]


def test_jobs_take_turns() -> None:
    order: list[str] = []
    jobs = {name: lambda name=name: order.append(name) or len(order) for name in "ab"}
    assert take_turns(jobs, 3) == {"a": [1, 3, 5], "b": [2, 4, 6]}
    assert "".join(order) == "ababab"
