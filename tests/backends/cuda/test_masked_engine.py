"""Constrained requests stay in overlapped passes, with the tokens that the host samples for them.

On a GPU whole batches, with every option and drafter; interpreted, a few passes of one.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from paceline.control.controller import FixedController
from paceline.core.params import SamplingParams
from paceline.core.trees import PLAIN, DraftPlan
from paceline.draft.base import Drafter
from paceline.draft.lookup.ngram import NgramDrafter
from paceline.draft.lookup.suffix import SuffixDrafter, SuffixOptions
from tests.backends.cuda.test_backend import make, needs_gpu
from tests.backends.cuda.test_overlapped_engine import CHAIN, TREE, random_head
from tests.constrain.tables import TableConstraint
from tests.engines import AnyDrafter, new_engine
from tests.tiny import save_checkpoint
from tests.tiny_families import VOCAB_SIZE
from tests.toy import ToyTokenizer

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.3},
    {"temperature": 0.0, "logit_bias": {9: 3.0, 11: -2.0}, "frequency_penalty": 0.5},
    {"temperature": 1.0, "min_tokens": 6, "stop_token_ids": list(range(20, 60))},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 0.7, "allowed_token_ids": range(3, 80, 2)},
]


@cache
def allowed_after(path: tuple[int, ...]) -> frozenset[int]:
    """By the last tokens: one id, so that there are forced runs, a few, half of them, or all."""
    rng = Random(repr((path[-2:], len(path) // 3)))
    count = rng.choice([1, 1, 1, 4, VOCAB_SIZE // 2, VOCAB_SIZE])
    return frozenset(rng.sample(range(VOCAB_SIZE), count))


class Grammar:
    """Any number of outputs can start from it."""

    def start(self, ignore_eos: bool = False) -> TableConstraint:
        return TableConstraint(VOCAB_SIZE, allowed_after)  # type: ignore[arg-type]


def outputs(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    drafters: dict[str, AnyDrafter] | None = None,
    plan: DraftPlan = PLAIN,
    *,
    on_host: bool = False,
    count: int = 24,
    tokens: int = 30,
    drafter_of: Any = None,
) -> tuple[list[object], list[object]]:
    """What each request got, and its drafters. Two of three are constrained, and three of five ask for
    log-probabilities; more than there are slots."""
    from paceline.engine.admission import Limits
    from paceline.models.registry import load_checkpoint

    backend = make(load_checkpoint(folder), device, dtype)
    if on_host:
        backend.make_async_decoder = lambda *rest: None  # type: ignore[method-assign]
    drafters = {"drafter": drafter_of(backend)} if drafter_of is not None else drafters or {}
    engine = new_engine(
        backend,
        ToyTokenizer(),
        Limits(VOCAB_SIZE, 96, min(count, 8), 32),
        num_pages=100,
        drafters=drafters,
        controller=FixedController(plan),
    )
    added = []
    for number in range(count):
        prompt = np.random.default_rng(number).integers(2, VOCAB_SIZE, 3 + number).tolist()
        options = {"ignore_eos": True, "seed": number, "max_tokens": tokens} | OPTIONS[number % len(OPTIONS)]
        options["logprobs"] = number % 5 if number % 5 < 3 else None
        grammar: dict[str, Any] = {"grammar": Grammar()} if number % 3 else {}
        added += engine.add_request(prompt, SamplingParams(**options), **grammar)
    overlapped = 0
    while engine.has_unfinished:
        engine.step()
        overlapped += engine.stats.overlapped
    assert (overlapped > 0) is not on_host
    results: list[object] = []
    for request in added:
        assert request.error is None
        assert not request.failed_drafters
        results.append((request.output_token_ids, request.finish_reason, request.logprobs))
    return results, [request.speculative.drafters for request in added]


@needs_gpu
@pytest.mark.parametrize("family", ["llama", "qwen3-5"])
def test_the_tokens_are_those_of_the_host(
    family: str, tmp_path: Path, device: torch.device, dtype: torch.dtype
) -> None:
    case = save_checkpoint(family, tmp_path / family), device, dtype
    expected, _ = outputs(*case, on_host=True)
    found, drafted = outputs(*case)
    assert found == expected
    assert {"grammar": 1}.keys() <= set().union(*drafted)  # type: ignore[arg-type]
    ngram: Drafter = NgramDrafter(NgramDrafter.Options(prompt_lookup_min=1))
    assert outputs(*case, {"ngram": ngram}, DraftPlan("ngram", 4))[0] == expected
    suffix: Drafter = SuffixDrafter(SuffixOptions())
    assert outputs(*case, {"suffix": suffix}, DraftPlan("suffix", 4))[0] == expected
    assert outputs(*case, plan=CHAIN, drafter_of=random_head)[0] == expected
    assert outputs(*case, plan=TREE, drafter_of=random_head)[0] == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="a part of the test above")
def test_a_few_interpreted_passes_have_the_tokens_of_the_host(
    tmp_path: Path, device: torch.device, dtype: torch.dtype
) -> None:
    case = save_checkpoint("llama", tmp_path / "llama"), device, dtype
    expected, _ = outputs(*case, on_host=True, count=2, tokens=3)
    assert outputs(*case, count=2, tokens=3)[0] == expected
