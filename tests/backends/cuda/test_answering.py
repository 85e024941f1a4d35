"""Many prompts are answered at once by the engine on the device, as they are one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.llm import LLM
from paceline.models.registry import load_checkpoint
from paceline.train.data import make_answers
from paceline.train.data.make_answers import AnswerOptions, open_answerer
from tests.models.model_files import config_of, random_tensors, write_gguf

REQUESTS, PROMPT, ANSWER = 4, 12, 8


def test_a_full_pass_of_the_longest_answers_fits_and_changes_none_of_them(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama", random_tensors(config_of("llama")))
    monkeypatch.setattr(make_answers, "REQUESTS_ON_GPU", REQUESTS)
    made: list[LLM] = []

    def load(model: str, **options: object) -> LLM:
        if device.type != "cuda":  # the same on a backend that is always there
            options |= {"backend": "torch", "device": "cpu"}
        made.append(LLM(model, **options))
        return made[-1]

    monkeypatch.setattr(make_answers, "LLM", load)
    options = AnswerOptions(max_prompt_tokens=PROMPT, max_tokens=ANSWER)
    prompts = [[(3 * one + place) % 90 + 5 for place in range(PROMPT)] for one in range(REQUESTS + 2)]
    heats, seeds = [0.0, 0.9] * 3, list(range(6))
    with open_answerer(load_checkpoint(path), "cuda", options) as (answerer, number):
        assert number > REQUESTS
        together = answerer.answer(prompts, heats, seeds, ANSWER)
        alone = [
            answerer.answer([prompt], [heat], [seed], ANSWER)[0]
            for prompt, heat, seed in zip(prompts, heats, seeds, strict=True)
        ]
    assert together == alone
    assert max(map(len, together)) == ANSWER
    (llm,) = made
    assert llm.engine.limits.max_num_seqs == REQUESTS
    assert llm.engine.scheduler.num_preemptions == 0
