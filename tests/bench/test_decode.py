"""`paceline bench decode`: real processes, a tiny model, and a fake llama.cpp."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.decode import measure
from paceline.bench.decode.measure import (
    Contest,
    DecodeOptions,
    FreshStart,
    Measured,
    handicap,
    measure_decode,
)
from paceline.bench.decode.view import decode_facts, decode_result
from paceline.bench.peers.contestants import ContestantError, start_llama_cpp, start_paceline
from paceline.bench.timing import Timing
from paceline.errors import ConfigError
from tests.large import REPEATS

Play = Callable[..., Contest]
Become = Callable[[str], None]


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


@pytest.fixture
def llama_cpp(tmp_path: Path, log_file: Path, monkeypatch: pytest.MonkeyPatch) -> Become:
    """Gives child processes a llama_cpp with a given behaviour."""
    shutil.copy(Path(__file__).with_name("fake_llama_cpp.py"), tmp_path / "llama_cpp.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_LLAMA_LOG", str(log_file))
    return lambda mode: monkeypatch.setenv("FAKE_LLAMA", mode)


@pytest.fixture
def play(llama_cpp: Become, tiny_gguf: Path) -> Play:
    """A short contest with a llama_cpp of a given behaviour."""

    def run(mode: str, **options: Any) -> Contest:
        llama_cpp(mode)
        short = {"tokens": 3, "prompt_tokens": 5, "prefill": 20, "rounds": 2, "threads": 1}
        settings = {**short, "settle_seconds": 0.0, **options}
        return measure_decode(DecodeOptions(model=str(tiny_gguf), **settings))

    return run


def test_both_contestants_do_the_same_jobs_alternately(play: Play, log_file: Path, tiny_gguf: Path) -> None:
    contest = play("sound")
    events = [json.loads(line) for line in log_file.read_text().splitlines()]
    load = events[0]
    assert (load["model"], load["n_threads"], load["n_threads_batch"]) == (str(tiny_gguf), 1, 1)
    assert (load["n_batch"], load["n_ctx"]) == (512, 21)
    # warm-up, then decode and prefill in each round, never on what an earlier turn left behind
    assert [event["event"] for event in events[1:]] == ["reset", "generate"] * 6
    prompts = [event["prompt"] for event in events if event["event"] == "generate"]
    assert [len(prompt) for prompt in prompts] == [20, 5, 5, 20, 5, 20]
    assert all(prompt == prompts[0][: len(prompt)] for prompt in prompts)
    assert all(event["temp"] == 0 for event in events if event["event"] == "generate")

    facts = decode_facts(contest)
    assert facts["peer"]["name"] == "llama.cpp"
    assert facts["peer"]["version"] == "0.0.fake"
    assert facts["peer_error"] is None
    assert facts["peer"]["system_info"] == "CPU : AVX2 = 1 | AMX_INT8 = 1"
    assert facts["peer_handicap"] is None
    for side in (facts["paceline"], facts["peer"]):
        for job, tokens in (("decode", 3), ("prefill", 20)):
            assert len(side[job]["seconds"]) == 2
            assert side[job]["tokens_per_second"]["best"] == tokens / min(side[job]["seconds"])
    best = [min(facts[side]["decode"]["seconds"]) for side in ("peer", "paceline")]
    assert facts["ratio"]["decode"]["best"] == best[0] / best[1]
    assert facts["paceline"]["overhead_ms"]["median"] > 0
    assert facts["paceline"]["start_to_first_token_seconds"] > 0
    assert facts["paceline"]["peak_memory_bytes"] > 10e6
    json.dumps(facts)
    assert decode_result(contest).tables[0].columns[2] == "llama.cpp 0.0.fake"
    assert any(note.startswith("both chose the same first") for note in decode_result(contest).notes)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("missing", r"No module named 'llama_cpp'\. Run `pip install 'paceline\[bench\]'.*--peer-python"),
        ("illegal", r"died \(SIGILL\).*fno-tree-dse.*pip install --force-reinstall"),
        ("aborts", r"died \(exit status 3\)\. Its last words: .*ggml: cannot go on"),
    ],
)
def test_a_peer_that_does_not_start_is_explained(
    llama_cpp: Become, tiny_gguf: Path, mode: str, message: str
) -> None:
    llama_cpp(mode)
    with pytest.raises(ContestantError, match=f"(?s){message}"):
        start_llama_cpp(tiny_gguf, threads=1, context=20, python=sys.executable)


@pytest.mark.parametrize(
    ("mode", "message"),
    [pytest.param("missing", "No module named", marks=REPEATS), ("late", r"died \(SIGSEGV\)")],
)
def test_a_failing_peer_does_not_stop_our_measurement(
    play: Play, mode: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "measure_fresh_start", lambda *_: FreshStart(1.0, 1))
    contest = play(mode)
    assert contest.peer is None
    assert len(contest.paceline.decode.seconds) == len(contest.paceline.prefill.seconds) == 2
    note = decode_result(contest).notes[-1]
    assert note.startswith("no numbers of llama.cpp: ")
    assert re.search(message, note)
    facts = decode_facts(contest)
    assert facts["peer"] is None
    assert facts["peer_error"] in note
    assert facts["ratio"]["decode"]["best"] is None
    assert decode_result(contest).tables[0].columns == ["tokens per second", "paceline"]


def test_a_peer_that_leaves_instructions_unused_is_reported() -> None:
    assert handicap({"system_info": "CPU : AVX512 = 1"}, amx=False) is None
    assert handicap({"system_info": "CPU : AMX_INT8 = 1"}, amx=True) is None
    unused = handicap({"system_info": "CPU : AVX512 = 1"}, amx=True)
    assert unused is not None
    second = Timing((1.0,))
    result = Measured({"version": "1", "quantization": "int8"}, second, second, second, [5])
    contest = Contest(DecodeOptions(), 1, result, FreshStart(1.0, 1), result, None, unused)
    assert f"llama.cpp ran under a handicap: {unused}" in decode_result(contest).notes


def test_agreement_ends_at_the_first_differing_token() -> None:
    def contest(ours: list[int], theirs: list[int]) -> Contest:
        results = [Measured({}, Timing(()), Timing(()), Timing(()), ids) for ids in (ours, theirs)]
        return Contest(DecodeOptions(), 1, results[0], FreshStart(1.0, 1), results[1], None)

    assert contest([5, 6, 7, 8], [5, 6, 9, 8]).agreeing_tokens == 2
    assert contest([5, 6], [5, 6]).agreeing_tokens == 2


def test_what_cannot_be_measured_is_refused(play: Play, tiny_gguf: Path) -> None:
    with pytest.raises(ConfigError, match="peer must be one of"):
        DecodeOptions(peer="vllm")
    with pytest.raises(ConfigError, match="rounds must be an integer from 1"):
        DecodeOptions(rounds=0)
    with pytest.raises(ConfigError, match="cannot be run"):
        play("sound", peer_python="no-such-python")
    with pytest.raises(ContestantError, match=r"paceline failed \(PromptTooLong\): .* 200 tokens"):
        play("sound", prefill=200)
    with pytest.raises(ContestantError, match=r"reads only \.gguf files"):
        start_llama_cpp(tiny_gguf.parent, threads=1, context=20, python=sys.executable)


def test_our_own_failure_is_reported(tiny_gguf: Path) -> None:
    with pytest.raises(ContestantError, match=r"paceline failed \(ConfigError\): quantization .* got 'int3'"):
        start_paceline(tiny_gguf, 1, "int3")
