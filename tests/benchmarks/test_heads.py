"""`python -m benchmarks head`: one head here and in vLLM, which a stand-in plays."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.engine.heads import Drafted, HeadOptions, HeadRow, compare_head
from paceline.bench.traffic.workloads import Prompt, Workload
from paceline.errors import ConfigError
from paceline.models.heads.checkpoint import write_head
from tests.benchmarks.cli import run_json
from tests.draft.model.test_draft_model_cpu import save_model
from tests.models.heads.driver import random_checkpoint
from tests.models.heads.tiny_heads import DFLASH, EAGLE3, P_EAGLE


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with a tiny model; child processes find a vllm."""
    (tmp_path / "vllm").mkdir()
    shutil.copy(Path(__file__).with_name("fake_vllm.py"), tmp_path / "vllm" / "__init__.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_VLLM_LOG", str(tmp_path / "log.json"))
    write_head(random_checkpoint(EAGLE3), tmp_path / "head", "sglang")
    return save_model(tmp_path / "model")


def test_the_peer_gets_the_head_as_we_export_it_and_both_are_counted(tmp_path: Path, model: str) -> None:
    lines = [json.dumps({"prompt": text, "max_tokens": 9}) for text in ("abc", "bcd", "cde")]
    (tmp_path / "letters.jsonl").write_text("\n".join(lines))
    files = ("--workload", str(tmp_path / "letters.jsonl"), "--limit", "2", "--format", "speculators")
    facts = run_json(tmp_path, "head", model, str(tmp_path / "head"), *files)
    received = json.loads((tmp_path / "log.json").read_text())
    assert (received["method"], received["num_speculative_tokens"], received["dtype"]) == (
        "eagle3",
        5,
        "float32",
    )
    assert received["files"] == ["config.json", "model.safetensors"]
    assert (facts["version"], facts["form"]) == ("0.0.fake", "speculators")
    letters, total = facts["rows"]
    assert (letters["workload"], letters["prompts"], letters["same_tokens"]) == ("letters", 2, 0)
    assert letters["ours"]["drafts"] > 0
    assert len(letters["ours"]["accepted"]) == 5
    peer = letters["peer"]
    assert (peer["drafts"], peer["accepted"]) == (4, [4, 2, 0])
    assert (peer["acceptance_length"], peer["acceptance_per_position"]) == (2.5, [1.0, 0.5, 0.0])
    assert {**total, "workload": "letters"} == letters


def test_a_parallel_head_drafts_whole_blocks_in_both(tmp_path: Path, model: str) -> None:
    (tmp_path / "letters.jsonl").write_text(json.dumps({"prompt": "abc", "max_tokens": 9}))
    write_head(random_checkpoint(DFLASH), tmp_path / "block", "sglang")
    facts = run_json(
        tmp_path, "head", model, str(tmp_path / "block"), "--workload", str(tmp_path / "letters.jsonl")
    )
    received = json.loads((tmp_path / "log.json").read_text())
    assert (received["method"], received["num_speculative_tokens"]) == ("dflash", 4)
    assert facts["num_speculative_tokens"] == 4
    assert facts["rows"][0]["ours"]["drafts"] > 0


def test_a_p_eagle_head_drafts_in_parallel_in_both(tmp_path: Path, model: str) -> None:
    (tmp_path / "letters.jsonl").write_text(json.dumps({"prompt": "abc", "max_tokens": 9}))
    write_head(random_checkpoint(P_EAGLE), tmp_path / "masked", "sglang")
    workload = ("--workload", str(tmp_path / "letters.jsonl"), "--backend", "cpu")
    facts = run_json(tmp_path, "head", model, str(tmp_path / "masked"), *workload)
    received = json.loads((tmp_path / "log.json").read_text())
    assert (received["method"], received["parallel_drafting"]) == ("eagle3", True)
    assert (facts["backend"], facts["num_speculative_tokens"]) == ("cpu", 5)
    assert facts["rows"][0]["ours"]["drafts"] > 0


def test_lengths_include_the_bonus_token_and_drafts_add_up() -> None:
    ours, peer = Drafted(6, (6, 3)) + Drafted(4, (4, 1, 1)), Drafted(4, (3, 1))
    assert ours == Drafted(10, (10, 4, 1))
    row = HeadRow("w", 1, 1, ours, peer)
    assert (ours.acceptance_length, peer.acceptance_length, row.ratio) == (2.5, 2.0, 1.25)
    assert ours.acceptance_per_position == [1.0, 0.4, 0.1]


def test_what_vllm_cannot_read_is_refused_before_it_is_started(tiny_gguf: Path) -> None:
    workload = Workload("w", (Prompt("1", "w", 4, text="a"),))
    with pytest.raises(ConfigError, match="vLLM reads folders of safetensors"):
        compare_head(HeadOptions(str(tiny_gguf), "head", (workload,)))
    with pytest.raises(ConfigError, match="--backend must be one of torch, cpu"):
        compare_head(HeadOptions(str(tiny_gguf), "head", (workload,), backend="cuda"))
    with pytest.raises(ConfigError, match="--peer-python no-python cannot be run"):
        compare_head(HeadOptions(str(tiny_gguf), "head", (workload,), python="no-python"))
