"""`paceline bench`: thin commands that print a table and write JSON with the machine in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.bench.commands import app
from paceline.bench.machine import machine_facts
from paceline.bench.tables import machine_notes
from paceline.bench.timing import take_turns
from paceline.errors import ConfigError
from paceline.machine import cpu_name, has_amx


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def run_json(folder: Path, *arguments: str) -> dict[str, Any]:
    output = run(*arguments, "--json", str(folder / "facts.json"))
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    assert {"cpu", "cores", "isa", "versions"} <= set(facts["machine"])
    assert facts["machine"]["cpu"] in output
    return facts


def test_decode(tmp_path: Path, tiny_gguf: Path) -> None:
    short = ("--tokens", "2", "--prompt-tokens", "3", "--prefill", "9", "--rounds", "1", "--threads", "1")
    facts = run_json(tmp_path, "decode", str(tiny_gguf), *short, "--peer", "none", "--quantization", "int8")
    assert (facts["threads"], facts["quantization"], facts["rounds"]) == (1, "int8", 1)
    assert facts["paceline"]["decode"]["tokens_per_second"]["best"] > 0


def test_rows(tmp_path: Path, tiny_gguf: Path) -> None:
    facts = run_json(tmp_path, "rows", str(tiny_gguf), "--rows", "4,2", "--rounds", "1", "--threads", "1")
    assert (facts["model"], facts["threads"], facts["context"]) == (str(tiny_gguf), 1, 64)
    assert facts["quantization"] in ("native", "int8")
    assert [line["rows"] for line in facts["rows"]] == [1, 2, 4]
    assert all({"rows", "ms", "median_ms", "ratio"} <= set(line) for line in facts["rows"])


def test_concurrency(tmp_path: Path, tiny_gguf: Path) -> None:
    short = ("--concurrency", "3", "--tokens", "2", "--rounds", "1", "--threads", "1")
    facts = run_json(tmp_path, "concurrency", str(tiny_gguf), *short)
    assert facts["identical_to_alone"]
    assert [line["concurrency"] for line in facts["concurrency"]] == [1, 3]


def test_perplexity_with_float32_is_the_reference_backends(tmp_path: Path, tiny_gguf: Path) -> None:
    choice = ("--quantization", "none", "--against", "torch", "--context", "100", "--threads", "1")
    facts = run_json(tmp_path, "perplexity", str(tiny_gguf), *choice)
    assert (facts["quantization"], facts["against"]) == ("none", "torch")
    assert facts["perplexity"] == pytest.approx(facts["against_perplexity"], rel=1e-4)
    expected = 100 * (facts["perplexity"] / facts["against_perplexity"] - 1)
    assert facts["difference_percent"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rows", "--rows", "1,two"), "--rows must be positive numbers"),
        (("rows", "--rows", "0"), "--rows must be positive numbers"),
        (("concurrency", "--concurrency", ""), "--concurrency must be positive numbers"),
        (("rows", "--json", "no/such/folder/facts.json"), "give a file in a folder that exists"),
        (("decode", "--peer", "vllm"), "peer must be one of llama.cpp, none"),
    ],
)
def test_a_users_mistake_is_refused_before_anything_is_loaded(
    arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(*arguments)


def test_a_window_longer_than_the_context_is_refused(tiny_gguf: Path) -> None:
    with pytest.raises(ConfigError, match="context must be an integer from 2 to 128"):
        run("perplexity", str(tiny_gguf), "--context", "129")


def test_the_machine_is_named_by_its_processor() -> None:
    assert cpu_name("processor : 0\nmodel name\t: Quick CPU 9\n") == "Quick CPU 9"
    assert cpu_name("processor : 0\nCPU part\t: 0xd0c\n") == "Arm Neoverse-N1"
    assert cpu_name("CPU part\t: 0xabc\n") == "Arm part 0xabc"
    assert cpu_name("")
    assert has_amx("flags\t: fpu amx_int8 avx\n")
    assert not has_amx("flags\t: fpu avx\nmodel name : amx_int8\n")
    assert machine_facts()["versions"]["numpy"]  # type: ignore[index]


def test_a_machine_that_is_not_quiet_is_warned_of() -> None:
    quiet = {**machine_facts(), "load_average": 0.1}
    assert len(machine_notes(quiet, 2, "int8")) == 1
    assert "Measure again" in machine_notes({**quiet, "load_average": 1.7}, 2, "int8")[1]


def test_turns_go_round() -> None:
    order: list[str] = []
    jobs = {name: lambda name=name: order.append(name) or len(order) for name in "ab"}
    assert take_turns(jobs, 3) == {"a": [1, 3, 5], "b": [2, 4, 6]}
    assert "".join(order) == "ababab"
