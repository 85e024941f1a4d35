"""`examples/sample_answers.py`, its kernels run by Triton's interpreter: greedy answers are the target's."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from paceline.models.registry import load_checkpoint
from paceline.train.loop.batches import pack
from paceline.train.loop.sequences import load_target, target_states
from tests.models.model_files import config_of, random_tensors, write_gguf

pytest.importorskip("triton")
SCRIPT = str(Path(__file__).parents[2] / "examples" / "sample_answers.py")


def test_the_greedy_answers_of_slots_are_those_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", "llama", random_tensors(config_of("llama")))
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    rows = [{"prompt": text} for text in ("a", "some words", "and others", "b c d")]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--max-tokens", "5", "--max-prompt-tokens", "24", "--slots", "3", "--device", "cpu")
    command = (SCRIPT, model, "--data", prompts, "--out", out, *options)
    monkeypatch.setattr(sys, "argv", [str(part) for part in command])
    runpy.run_path(SCRIPT, run_name="__main__")
    header, *answers = map(json.loads, out.read_text().splitlines())
    assert header["settings"]["temperatures"] == [0.0]
    assert len(answers) == len(rows)
    target = load_target(load_checkpoint(model), torch.device("cpu"), torch.float32)
    for row in answers:
        ids, start = row["ids"], row["answer"]
        assert start < len(ids) <= start + 5
        best = target_states(target, pack([ids], [start - 1], torch.device("cpu")), (1, 2)).best[0]
        assert best[start - 1 : -1].tolist() == ids[start:]
