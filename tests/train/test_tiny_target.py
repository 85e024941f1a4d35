"""`examples/tiny_target.py`: a model that the engine loads, with prompts that are kept apart."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from paceline import LLM, SamplingParams

SCRIPT = str(Path(__file__).parents[2] / "examples" / "tiny_target.py")


def test_the_target_loads_and_its_prompts_are_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--steps", "2", "--prompts", "9", "--held-out", "4")
    monkeypatch.setattr(sys, "argv", [SCRIPT, str(tmp_path), *options])
    runpy.run_path(SCRIPT, run_name="__main__")
    files = (tmp_path / "train.jsonl", tmp_path / "held_out.jsonl")
    learned, held_out = ({json.loads(row)["prompt"] for row in file.open()} for file in files)
    assert (len(learned), len(held_out), learned & held_out) == (9, 4, set())
    llm = LLM(str(tmp_path), backend="cpu", quantization="none", speculative_config="off")
    prompt = held_out.pop()
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert len(output.prompt_token_ids) == len(prompt)  # a token for each byte
    assert len(output.outputs[0].token_ids) == 4
