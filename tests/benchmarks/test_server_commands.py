"""`python -m benchmarks load` and `overhead`, each with its own server around a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.bench.servers.client import ClientError
from paceline.errors import ConfigError
from tests.benchmarks.cli import run, run_json
from tests.large import REPEATS


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "short.jsonl"
    lines = [{"prompt": text, "max_tokens": 6} for text in ("abc abc abc", "one two", "a b a b a b a")]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_load(tmp_path: Path, tiny_gguf: Path, workload: Path) -> None:
    few = (
        "--clients",
        "8",
        "--requests",
        "24",
        "--rounds",
        "2",
        "--workload",
        str(workload),
        "--threads",
        "1",
    )
    facts = run_json(tmp_path, "load", str(tiny_gguf), *few, "--draft", "ngram", "--api-key", "k")
    assert facts["good"]
    assert [sum(one["statuses"].values()) for one in facts["results"]] == [24, 24]
    assert all(one["after"]["kv_usage"] == 0 for one in facts["results"])
    assert facts["before"]["memory_bytes"] > 0


@REPEATS
def test_overhead(tmp_path: Path, tiny_gguf: Path) -> None:
    short = ("--concurrency", "3", "--tokens", "4", "--rounds", "1", "--threads", "1")
    facts = run_json(tmp_path, "overhead", str(tiny_gguf), *short)
    assert (facts["concurrency"], facts["tokens"]) == (3, 12)
    assert facts["ratio"] == pytest.approx(
        facts["server_tokens_per_second"] / facts["offline_tokens_per_second"]
    )


def test_an_unreachable_server_is_reported_in_one_line() -> None:
    with pytest.raises(ClientError, match=r"nothing answers at 127\.0\.0\.1, port 9"):
        run("load", "--url", "http://127.0.0.1:9")


def test_an_unknown_workload_is_reported_before_a_server_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is neither a file nor built in"):
        run("load", "--workload", str(tmp_path / "none"))
