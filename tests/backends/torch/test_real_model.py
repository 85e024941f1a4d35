"""Real models say what transformers would say, token for token, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.backends.base import Backend
from paceline.backends.torch.backend import TorchBackend
from paceline.models.registry import DEFAULT_MODEL, is_pulled, load_checkpoint, load_tokenizer, resolve
from tests.backends.driver import drive, run
from tests.backends.prompts import PROMPTS
from tests.large import LARGE
from tests.their_gguf import read_once

NEW_TOKENS = 64 if LARGE else 17  # more than a page is enough to go on from one page to the next
CONTINUED = PROMPTS if LARGE else PROMPTS[::5]
TIE = 1e-4  # closer than this, float32 itself does not decide which of two logits is the greater


@dataclass(frozen=True)
class Disagreement:
    """A position where transformers would have said another token."""

    prompt: str
    position: int
    ours: int
    best_two: list[int]
    gap: float

    @property
    def is_near_tie(self) -> bool:
        return self.ours in self.best_two and self.gap < TIE


def continue_greedily(backend: Backend, prompts: Sequence[list[int]]) -> list[list[int]]:
    """NEW_TOKENS tokens after each prompt, all prompts in one batch."""
    longest = max(map(len, prompts)) + NEW_TOKENS
    requests = drive(backend, pages_each=-(-longest // backend.page_size), count=len(prompts))
    chunks, answers = list(prompts), [[] for _ in prompts]
    for _ in range(NEW_TOKENS):
        asked = [request.ask(chunk) for request, chunk in zip(requests, chunks, strict=True)]
        last_rows = np.cumsum([len(chunk) for chunk in chunks]) - 1
        best = run(asked, logit_rows=last_rows).logits.argmax(-1)
        for request, chunk in zip(requests, chunks, strict=True):
            request.commit(range(len(chunk)))
        chunks = [[int(token)] for token in best]
        for answer, chunk in zip(answers, chunks, strict=True):
            answer.extend(chunk)
    return answers


@torch.inference_mode()
def disagreements(
    reference: torch.nn.Module, name: str, prompt: list[int], answer: list[int]
) -> list[Disagreement]:
    """Where transformers, given the same tokens before, has another best token than `answer`.

    One pass over prompt and answer asks for all next tokens at once. If none differs, transformers'
    own greedy loop would have written the same answer: it starts from the same prompt, and each
    token it chooses is the one it is given here.
    """
    logits = reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    values, best = logits.topk(2)
    return [
        Disagreement(
            name, position, token, best[position].tolist(), float(values[position, 0] - values[position, 1])
        )
        for position, token in enumerate(answer)
        if token != int(best[position, 0])
    ]


@pytest.fixture(params=["smollm2-135m", "qwen2.5-coder-1.5b"])
def file(request: pytest.FixtureRequest) -> Path:
    if request.param != DEFAULT_MODEL and not (LARGE and is_pulled(request.param)):
        pytest.skip(
            f"takes minutes and 10 GB: run `paceline models pull {request.param}`, set PACELINE_TEST_LARGE=1"
        )
    return resolve(request.param)


def reference(file: Path) -> torch.nn.Module:
    """transformers' model of a file."""
    from transformers import AutoModelForCausalLM

    with read_once(words=False):
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
    return model


@pytest.mark.real
def test_greedy_answers_are_those_of_transformers(file: Path) -> None:
    tokenizer = load_tokenizer(file)
    prompts = [tokenizer.encode(prompt) for prompt in CONTINUED]
    # ours is freed before theirs is loaded: a machine need not hold both
    answers = continue_greedily(TorchBackend.load(load_checkpoint(file)), prompts)
    theirs = reference(file)
    different = [
        found
        for name, prompt, answer in zip(CONTINUED, prompts, answers, strict=True)
        for found in disagreements(theirs, name, prompt, answer)
    ]
    assert [found for found in different if not found.is_near_tie] == []
    # more than a few near ties would be a difference in disguise
    assert len(different) <= 3
