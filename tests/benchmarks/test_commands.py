"""`python -m benchmarks`: thin commands that print a table and write JSON with the machine in it."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from tests.benchmarks.cli import run, run_json


def test_rows(tmp_path: Path, tiny_gguf: Path) -> None:
    few = ("--rows", "4,2", "--rounds", "1", "--threads", "1", "--cpu-time")
    facts = run_json(tmp_path, "rows", str(tiny_gguf), *few)
    assert facts["clock"] == "process_time"
    assert (facts["model"], facts["threads"], facts["context"]) == (str(tiny_gguf), 1, 64)
    assert facts["quantization"] == "native"
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


def test_drafting_alone_is_timed_without_a_model(tmp_path: Path) -> None:
    few = ("--context", "200", "--responses", "20", "--response-tokens", "30")
    facts = run_json(tmp_path, "drafting", *few)
    assert [step["method"] for step in facts["steps"]] == ["ngram", "suffix"]
    assert all(step["tokens_per_step"] > 1 for step in facts["steps"]), "nothing was drafted right"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rows", "--rows", "1,two"), "--rows must be positive numbers"),
        (("rows", "--rows", "0"), "--rows must be positive numbers"),
        (("rows", "--cpu-time"), "add --threads 1"),
        (("concurrency", "--concurrency", ""), "--concurrency must be positive numbers"),
        (("rows", "--json", "no/such/folder/facts.json"), "give a file in a folder that exists"),
        (("grid", "--html", "no/such/folder/page.html"), "--html .* give a file in a folder that exists"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_loaded(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(*arguments)


def test_a_window_longer_than_the_context_is_refused(tiny_gguf: Path) -> None:
    with pytest.raises(ConfigError, match="context must be an integer from 2 to 128"):
        run("perplexity", str(tiny_gguf), "--context", "129")


def test_the_wheel_has_no_benchmarks_but_both_are_type_checked() -> None:
    tools = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["tool"]
    packages = tools["setuptools"]["packages"]["find"]["include"]
    assert not any(fnmatch("benchmarks", pattern) for pattern in packages)
    assert {"paceline", "benchmarks"} <= set(tools["mypy"]["files"])
