"""`paceline tune`: every shape is tried, tokens per second decide, and the gain is of other prompts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.run.contest import Contest, SpeculationOptions
from paceline.bench.run.rows import Row, rows
from paceline.bench.run.speculation import OFF
from paceline.bench.traffic.workloads import Prompt, Workload
from paceline.bench.tune import search as tune_room
from paceline.bench.tune.search import candidates, tune
from paceline.bench.tune.view import advice, sglang_flags, vllm_flags
from paceline.draft.speculative_config import parse_speculative_config
from paceline.errors import ConfigError
from tests.bench.test_speculation import made_up_runs

PROMPTS = tuple(Prompt(str(number), "s", 8, text="x") for number in range(5))


def test_candidates_are_all_lengths_and_the_shapes_that_a_method_can_draft() -> None:
    assert candidates(["ngram", "suffix"], [2, 4], [1, 3]) == [
        {"method": "ngram", "num_speculative_tokens": 2},
        {"method": "ngram", "num_speculative_tokens": 4},
        {"method": "suffix", "num_speculative_tokens": 2},
        {"method": "suffix", "num_speculative_tokens": 4},
        {"method": "suffix", "num_speculative_tokens": 4, "branching": 3},
    ]
    assert candidates(["eagle3:HEAD"], [5], [1]) == [
        {"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 5}
    ]
    assert candidates(["auto", "ngram"], [2, 4], [1])[0] == {"method": "auto"}, "it chooses lengths itself"
    assert len(candidates(["auto"], [2, 4], [1, 3])) == 1
    for method in (OFF, "telepathy"):
        with pytest.raises(ConfigError, match=r"nothing to tune|names no drafting method"):
            candidates([method], [4], [1])


def tuned(monkeypatch: pytest.MonkeyPatch, speeds: dict[int, float], gain: float) -> Any:
    """A tuning whose candidates have these speeds by length, and whose best has this gain."""
    plain, drafted = rows("toy", made_up_runs())
    asked: list[SpeculationOptions] = []

    def contest(options: SpeculationOptions, on_turn: Any, model: Any) -> Contest:
        asked.append(options)

        def row(label: str) -> Row:
            length = json.loads(label)["num_speculative_tokens"]
            longest = replace(drafted, method=label, mean_acceptance_length=float(length))
            return replace(longest, tokens_per_second=speeds[length], speedup_vs_off=gain)

        own = [row(label) for label in options.methods if label != OFF]
        return Contest(options, rows=[plain, *own])

    monkeypatch.setattr(tune_room, "run_contest", contest)
    options = SpeculationOptions((Workload("w", PROMPTS),), {}, model="m")
    return tune(options, candidates(["ngram"], list(speeds), [1])), asked


def test_the_fastest_is_chosen_and_its_gain_measured_on_other_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, (search, proof) = tuned(monkeypatch, {2: 30.0, 4: 50.0, 8: 40.0}, gain=1.4)
    assert found.best == {"method": "ngram", "num_speculative_tokens": 4}, "not the longest acceptance"
    assert found.chosen == found.best
    assert [prompt.id for prompt in search.workloads[0].prompts] == ["0", "2", "4"]
    assert [prompt.id for prompt in proof.workloads[0].prompts] == ["1", "3"]
    assert list(proof.methods) == [OFF, json.dumps(found.best)]
    text = "\n".join(advice(found))
    assert "1.40 times as fast as off" in text
    assert """vLLM: --speculative-config '{"method": "ngram", "num_speculative_tokens": 4}'""" in text


def test_a_candidate_that_does_not_gain_again_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = tuned(monkeypatch, {2: 30.0}, gain=0.97)
    assert found.chosen == OFF
    assert advice(found)[-1] == "No gain with ngram: leave drafting off. paceline serve m --draft off"


def test_flags_of_other_engines_are_equivalent_or_missing() -> None:
    tree = {"method": "eagle3", "num_speculative_tokens": 16, "branching": 4, "model": "H"}
    assert vllm_flags(tree) is None
    assert sglang_flags(tree) == (
        "--speculative-algorithm EAGLE3 --speculative-num-draft-tokens 17 "
        "--speculative-draft-model-path H --speculative-num-steps 4 --speculative-eagle-topk 4"
    )
    shipped = {"method": "eagle3", "num_speculative_tokens": 5}
    assert '"model": "HEAD"' in (vllm_flags(shipped) or ""), "a head that only paceline finds by itself"
    chain = {"method": "eagle3", "num_speculative_tokens": 5, "model": "H"}
    assert "--speculative-num-steps 5 --speculative-eagle-topk 1" in (sglang_flags(chain) or "")
    assert sglang_flags({"method": "suffix", "num_speculative_tokens": 8}) is None


def test_too_few_prompts_are_refused() -> None:
    options = SpeculationOptions((Workload("w", PROMPTS[:3]),), {})
    with pytest.raises(ConfigError, match="3 prompts are too few"):
        tune(options, candidates(["ngram"], [2], [1]))


def test_the_command_writes_a_file_for_config(tmp_path: Path, tiny_gguf: Path, paceline: Any) -> None:
    lines = [json.dumps({"prompt": "ab" * (number + 3), "max_tokens": 8}) for number in range(4)]
    (tmp_path / "letters.jsonl").write_text("\n".join(lines))
    code, out, err = paceline(
        *("tune", str(tiny_gguf), "--workload", str(tmp_path / "letters.jsonl"), "--methods", "ngram"),
        *("--lengths", "2,3", "--branching", "1", "--rounds", "1", "--threads", "1"),
        *("--out", str(tmp_path / "tuned.json")),
    )
    assert code == 0, err
    assert "best of 2 by tokens per second" in out
    written = json.loads((tmp_path / "tuned.json").read_text())
    assert written["model"] == str(tiny_gguf)
    chosen = written["speculative_config"]
    assert chosen == OFF or list(parse_speculative_config(chosen).drafters) == ["ngram"]


def test_without_methods_those_of_bench_are_tried(
    tiny_gguf: Path, paceline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Any] = []

    def stop(options: SpeculationOptions, configs: list[Any], *_: Any) -> None:
        tried.extend(dict.fromkeys(config["method"] for config in configs))
        raise ConfigError("enough")

    monkeypatch.setattr(tune_room, "tune", stop)
    monkeypatch.setattr("paceline.bench.run.contest.default_method", lambda _: "eagle3")
    code, _, err = paceline("tune", str(tiny_gguf), "--limit", "4", "--threads", "1")
    assert (code, "enough" in err) == (2, True)
    assert tried == ["auto", "ngram", "suffix", "eagle3"]
