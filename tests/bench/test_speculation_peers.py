"""Peers with their own prompt lookup, compared with themselves; all of them optional."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from paceline.bench.peers import lookup
from paceline.bench.peers.contestants import Generation
from paceline.bench.peers.lookup import LOOKUP_TOKENS, PeerOptions, measure_peer, parse_peers, peer_row
from paceline.bench.run.engine_runner import Task
from paceline.core.params import SamplingParams
from paceline.errors import ConfigError

GREEDY = SamplingParams(temperature=0, max_tokens=5)
TASKS = [Task("one", "a", [3, 4, 5], GREEDY), Task("two", "a", [6, 7], GREEDY)]
LLAMA = PeerOptions("llama.cpp")


@pytest.fixture
def log_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gives child processes a llama_cpp that always says 7 and records its input."""
    package = tmp_path / "llama_cpp"
    package.mkdir()
    shutil.copy(Path(__file__).with_name("fake_llama_cpp.py"), package / "__init__.py")
    (package / "llama_speculative.py").write_text("class LlamaPromptLookupDecoding(dict):\n    pass\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_LLAMA_LOG", str(tmp_path / "log.jsonl"))
    monkeypatch.setattr(lookup, "SETTLE_SECONDS", 0.0)
    return tmp_path / "log.jsonl"


def test_a_peer_runs_each_prompt_without_lookup_and_with_it(log_file: Path, tiny_gguf: Path) -> None:
    (row,), error = measure_peer(LLAMA, tiny_gguf, 1, {"letters": TASKS}, frozenset({9}), rounds=2)
    assert error is None
    assert (row.workload, row.peer, row.version, row.prompts) == ("letters", "llama.cpp", "0.0.fake", 2)
    assert row.output_tokens == 10
    assert row.changed_prompts == []
    events = [json.loads(line) for line in log_file.read_text().splitlines()]
    loads = [event.get("draft_model") for event in events if event["event"] == "load"]
    assert loads == [None, {"num_pred_tokens": LOOKUP_TOKENS}]
    prompts = [event["prompt"] for event in events if event["event"] == "generate"]
    in_turns = [[3, 4, 5], [3, 4, 5], [6, 7], [6, 7]]
    assert prompts == [[3, 4, 5], [3, 4, 5], *in_turns, *in_turns]  # a warm-up, then two rounds


def test_a_peers_answer_ends_where_the_models_does(log_file: Path, tiny_gguf: Path) -> None:
    (row,), _ = measure_peer(LLAMA, tiny_gguf, 1, {"letters": TASKS}, frozenset({7}), rounds=1)
    assert row.output_tokens == 2


def test_a_missing_peer_is_reported(log_file: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_LLAMA", "missing")
    found, error = measure_peer(LLAMA, tiny_gguf, 1, {"letters": TASKS}, frozenset(), rounds=1)
    assert found == []
    assert error is not None
    assert "It is not installed for" in error
    assert "--peer-python llama.cpp=PATH" in error


def test_ratios_are_of_tokens_per_second_because_a_peers_lookup_may_change_its_answer() -> None:
    def runs(tokens: list[int], *times: tuple[float, float]) -> list[Generation]:
        return [Generation(first, rest, tokens, 0) for first, rest in times]

    pairs = [
        (runs([1, 2, 3], (1.0, 4.0), (2.0, 2.0)), runs([1, 2, 3], (1.0, 1.0), (1.0, 2.0))),
        (runs([1, 2, 3, 4, 5], (1.0, 4.0), (1.0, 4.0)), runs([1, 9, 9], (1.0, 1.0), (1.0, 1.0))),
    ]
    row = peer_row("w", "peer", "1", TASKS, pairs)
    assert row.decode_tokens_per_second == 6 / (2.0 + 4.0)
    assert row.lookup_decode_tokens_per_second == 4 / (1.0 + 1.0)
    assert row.decode_speedup == 2.0
    assert row.median_decode_speedup == 2.0
    assert row.tokens_per_second == 8 / (4.0 + 5.0)
    assert row.speedup == (6 / 4.0) / (8 / 9.0)
    assert row.changed_prompts == ["two"]


def test_peers_are_named_with_their_interpreters() -> None:
    assert parse_peers([], []) == ()
    assert parse_peers(["llama.cpp", "transformers"], [f"llama.cpp={sys.executable}"]) == (
        PeerOptions("llama.cpp", sys.executable),
        PeerOptions("transformers", sys.executable),
    )
    for names, pythons, message in (
        (["sglang"], [], "--against must name peers of transformers, llama.cpp, vllm"),
        (["vllm"], ["python3"], "write NAME=INTERPRETER"),
        (["vllm"], ["vllm=no-such-python"], "cannot be run"),
        ([], [f"vllm={sys.executable}"], "--against must name"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_peers(names, pythons)
