"""The cuda backend's passes over two KV cache groups give the bytes of passes over one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.control.controller import FixedController
from paceline.core.params import SamplingParams
from paceline.core.trees import PLAIN, DraftPlan
from paceline.engine.admission import Limits
from paceline.engine.engine import Engine
from paceline.kv.window_pages import window_pages_for
from paceline.models.registry import load_checkpoint
from tests.backends.cuda.test_backend import make, needs_gpu
from tests.backends.cuda.test_overlapped_engine import CHAIN, EXTRA_OPTIONS, TREE, Copies, random_head
from tests.engines import new_engine
from tests.large import LARGE
from tests.tiny import save_checkpoint
from tests.tiny_families import VOCAB_SIZE
from tests.toy import ToyTokenizer

PAGE = 16
Outputs = list[tuple[list[int], object]]


def serve(
    backend: Any,
    prompts: list[list[int]],
    plan: DraftPlan | None,
    sampling: dict[str, Any],
    num_window_pages: int | None = None,
    rows: int = 32,
) -> tuple[Outputs, Engine]:
    """The outputs of these prompts, added while others run. No plan: the host drafts."""
    drafter = Copies() if plan is None else random_head(backend) if plan.drafter == "drafter" else None
    engine = new_engine(
        backend,
        ToyTokenizer(),
        Limits(VOCAB_SIZE, 192, 4, rows),
        num_pages=60,
        num_window_pages=num_window_pages,
        drafters={"drafter": drafter} if drafter else {},
        controller=FixedController(plan or CHAIN),
    )
    added = []
    for number, prompt in enumerate(prompts):
        options = EXTRA_OPTIONS[number % len(EXTRA_OPTIONS)] | sampling
        added += engine.add_request(prompt, SamplingParams(seed=number, **options))  # type: ignore[arg-type]
        for _ in range(5):
            engine.step()
    while engine.has_unfinished:
        engine.step()
    assert not any(request.error or request.failed_drafters for request in added)
    return [(request.output_token_ids, request.logprobs) for request in added], engine


def prompts_of(*lengths: int) -> list[list[int]]:
    return [np.random.default_rng(length).integers(2, VOCAB_SIZE, length).tolist() for length in lengths]


@pytest.mark.skipif(not LARGE and not torch.cuda.is_available(), reason="interpreted it takes half a minute")
def test_a_prompt_in_chunks_then_steps_and_trees(
    tmp_path: Path, device: torch.device, dtype: torch.dtype
) -> None:
    """Short enough for the interpreter: two of three layers have a window of 9, whose first page is freed."""
    backend = make(load_checkpoint(save_checkpoint("gemma3", tmp_path)), device, dtype)
    assert backend.window_group == 9
    few, prompts, sampling = (
        window_pages_for(9, 16, PAGE) + 1,
        prompts_of(30),
        {"max_tokens": 3, "logprobs": 3},
    )
    expected, _ = serve(backend, prompts, PLAIN, sampling)
    found, engine = serve(backend, prompts, TREE, sampling, few, rows=16)
    assert found == expected
    pool = engine.kv.pool_of(backend)
    stored = sum(array.nbytes for stack in pool.stacks for array in stack)  # type: ignore[attr-defined]
    windowed, all_layers = backend.bytes_per_window_page(), backend.bytes_per_page()
    assert stored == 60 * (all_layers - windowed) + few * windowed


@needs_gpu
@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "gemma4", "llama4", "cohere2"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_engines_with_two_groups_have_the_outputs_of_one(
    family: str, temperature: int, tmp_path: Path, device: torch.device, dtype: torch.dtype
) -> None:
    """Plain, with a head's chains and trees, and drafts of the host; with preemption."""
    backend = make(load_checkpoint(save_checkpoint(family, tmp_path)), device, dtype)
    prompts, sampling = prompts_of(3, 77, 40, 5, 68, 77), {"temperature": temperature, "max_tokens": 70}
    expected, _ = serve(backend, prompts, PLAIN, sampling)
    least = window_pages_for(backend.window_group, 32, PAGE) + 1
    for plan in (PLAIN, CHAIN, TREE, None):
        assert serve(backend, prompts, plan, sampling, least + 40)[0] == expected
    found, engine = serve(backend, prompts, TREE, sampling, least + 2)
    assert found == expected
    assert engine.scheduler.num_preemptions > 0
