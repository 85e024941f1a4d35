"""The promise, while heads change: requests that run through swaps of the draft head give the same bytes.

Greedy and sampled, chains and trees, on a real model with the head that is shipped for it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from paceline.build import Loaded, LoadedModel, build_engine
from paceline.config import EngineConfig
from paceline.draft.base import UnboundDrafter
from paceline.models.files.safetensors_writer import encode
from paceline.models.heads.checkpoint import load_head, write_head
from paceline.models.heads.registry import resolve_head
from tests.lossless.conftest import MODEL
from tests.lossless.subject import PLANS, Case, Outcome, Truth

pytestmark = pytest.mark.real

SWAP_EVERY = 3  # steps: each request lives through several
CASES = ("T 0", "T 0, penalties, bias", "T 0.7, top_k, top_p", "T 1, n 2", "T 1, min_p, bias")


@pytest.fixture(scope="module")
def shipped(model: LoadedModel) -> Path:
    return resolve_head("shipped", "eagle3", model.fingerprint)


@pytest.fixture(scope="module")
def noisy(shipped: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped head with noise on its output, so that it is right less often."""
    head = load_head(shipped)
    noise = np.random.default_rng(0)
    name = "lm_head.weight"
    values = head.tensors[name].float32()
    changed = encode((values + 0.5 * values.std() * noise.standard_normal(values.shape)).astype(np.float32))
    folder = tmp_path_factory.mktemp("noisy")
    write_head(replace(head, tensors={**head.tensors, name: changed}), folder, "sglang")
    return folder


@pytest.fixture(scope="module")
def loaded(model: LoadedModel) -> Loaded:
    options = EngineConfig.from_options(model=MODEL, speculative_config={"method": "eagle3"}, threads=1)
    return build_engine(options, model)


@pytest.mark.parametrize(
    ("plan", "samplings"), [("eagle3", CASES[::2]), ("eagle3 tree", CASES[1::2])], ids=["chain", "tree"]
)
def test_requests_that_run_while_the_head_changes_give_the_same_bytes(
    loaded: Loaded,
    truth: Truth,
    cases: list[Case],
    shipped: Path,
    noisy: Path,
    plan: str,
    samplings: tuple[str, ...],
) -> None:
    engine, running = loaded.engine, [case for case in cases if case.sampling in samplings]
    outcomes = [Outcome(engine.add_request(case.prompt, case.params(PLANS[plan]))) for case in running]
    heads = cycle([loaded.load_head("eagle3", path) for path in (noisy, shipped)])
    steps = swaps = 0
    while engine.has_unfinished:
        engine.step()
        steps += 1
        if steps % SWAP_EVERY == 0:
            engine.replace_head("eagle3", next(heads))
            swaps += 1
    assert swaps >= 3
    assert truth.differences(running, outcomes) == []
    assert not any(child.failed_drafters for outcome in outcomes for child in outcome.children)
    accepted = sum(outcome.count("num_accepted_draft_tokens") for outcome in outcomes)
    drafted = sum(outcome.count("num_draft_tokens") for outcome in outcomes)
    assert 0 < accepted < drafted


def test_a_better_head_drafts_better_from_the_next_step_on(
    loaded: Loaded, cases: list[Case], shipped: Path, noisy: Path
) -> None:
    """After a swap to the shipped head about as many tokens are accepted as with it from the start."""
    case = replace(cases[0], sampling="T 0", max_tokens=48)
    bad, good = loaded.load_head("eagle3", noisy), loaded.load_head("eagle3", shipped)

    def accepted(first: UnboundDrafter, second: UnboundDrafter) -> int:
        loaded.engine.replace_head("eagle3", first)
        (request,) = loaded.engine.add_request(case.prompt, case.params(PLANS["eagle3"]))
        while request.num_output < 24:
            loaded.engine.step()
        before = request.speculative.num_accepted_draft_tokens
        loaded.engine.replace_head("eagle3", second)
        while loaded.engine.has_unfinished:
            loaded.engine.step()
        return request.speculative.num_accepted_draft_tokens - before

    always_bad, swapped, always_good = accepted(bad, bad), accepted(bad, good), accepted(good, good)
    assert always_bad < min(swapped, always_good)
    assert swapped >= always_good - 2  # depends on where in a chain the swap falls
