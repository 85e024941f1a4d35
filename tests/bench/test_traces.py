"""Recorded traces: both formats, and clear errors for everything else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.bench.traffic.traces import Arrival, read_trace
from paceline.errors import ConfigError

MOONCAKE = [
    {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]},
    {"timestamp": 3500, "input_length": 1, "output_length": 0},
]


def test_csv_has_times_and_lengths(tmp_path: Path) -> None:
    (tmp_path / "azure.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n7,374,44\n8.5,0,0\n")
    assert read_trace(tmp_path / "azure.csv", 2.0) == [Arrival(0.0, 374, 44), Arrival(3.0, 1, 1)]


def test_json_lines_also_tell_what_prompts_share(tmp_path: Path) -> None:
    (tmp_path / "mooncake.jsonl").write_text("\n".join(map(json.dumps, MOONCAKE)) + "\n\n")
    assert read_trace(tmp_path / "mooncake.jsonl") == [Arrival(0.0, 600, 5, (0, 7)), Arrival(0.5, 1, 1)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "", "has no column TIMESTAMP"),
        ("t.csv", "TIMESTAMP,ContextTokens\n1,long\n", "line 2: ContextTokens must be a count, got 'long'"),
        ("t.csv", "TIMESTAMP\nnan\n", "a time is not finite"),
        ("t.jsonl", "\n", "is empty. Give a file with at least one request"),
        ("t.jsonl", "{", "line 1 is not JSON"),
        ("t.jsonl", "[]", "line 1 must be an object"),
        ("t.jsonl", '{"timestamp": "now"}', "timestamp must be milliseconds, got 'now'"),
        ("t.jsonl", '{"timestamp": 1, "input_length": -1}', "input_length must be a count of tokens, got -1"),
        ("t.jsonl", json.dumps(MOONCAKE[0] | {"hash_ids": ["a"]}), "hash_ids must be a list of counts"),
        ("t.jsonl", json.dumps(MOONCAKE[1]) + "\n" + json.dumps(MOONCAKE[0]), "not in order"),
    ],
)
def test_an_invalid_trace_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(tmp_path / name)


def test_a_missing_trace_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(Path("missing.csv"))
