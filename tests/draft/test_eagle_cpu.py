"""Heads on the compiled backend: the same bytes, and drafts that depend on their request and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from paceline.backends.cpu import CpuBackend, CpuHeadRunner
from paceline.draft.base import DraftSampling
from paceline.draft.eagle import Eagle3Drafter, EagleDrafter, HeadShape
from paceline.draft.trees import PLAIN, DraftPlan, DraftTrees
from paceline.draft.vocabulary import Vocabulary
from paceline.engine.admission import Limits
from paceline.engine.engine import Engine
from paceline.models.registry import load_checkpoint
from tests.draft.draft_models import Plans
from tests.draft.heads.driver import random_checkpoint
from tests.draft.heads.tiny_heads import CONFIGS
from tests.engine.test_exactness_cpu import Tokenizer
from tests.engine.test_exactness_cpu import requests as all_requests
from tests.tiny import VOCAB_SIZE, save_checkpoint

ROWS = 64
HEADS = ("eagle3", "all flags", "eagle")
SETTINGS = {
    "a crowd": {},
    "chunks and prefix hits": {"rows": 24, "max_num_seqs": 4, "times": 2},
    "preemption": {"num_pages": 8},
}


class Remembering(Eagle3Drafter):
    """Remembers every tree by the tokens and the plan that it was drafted for."""

    def __init__(self, *parts: object) -> None:
        super().__init__(*parts)  # type: ignore[arg-type]
        self.trees: dict[tuple[tuple[int, ...], DraftPlan], tuple[list[int], list[int]]] = {}

    def propose(self, requests: Sequence, plans: Sequence[DraftPlan]) -> DraftTrees:
        proposed = super().propose(requests, plans)
        for number, (request, plan) in enumerate(zip(requests, plans, strict=True)):
            key, tree = (tuple(request.token_ids), plan), proposed.tree_lists(number)
            if tree[0]:
                assert self.trees.setdefault(key, tree) == tree
        return proposed


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    checkpoint = load_checkpoint(save_checkpoint("llama-attention-bias", tmp_path_factory.mktemp("target")))
    return CpuBackend.load(checkpoint, quantization="int8", threads=2, max_rows=ROWS)


def drafter_of(name, backend, sampling=DraftSampling.COUPLED, kind=None):
    head = random_checkpoint(CONFIGS[name])
    guesses = np.arange(head.config.draft_vocab_size, dtype=np.int32)
    ids = guesses if head.draft_ids is None else head.draft_ids
    shape = HeadShape(
        feature_layers=head.config.layers_of(backend.config.num_layers),
        feature_width=head.config.feature_width,
        vocabulary=Vocabulary(guesses, ids, VOCAB_SIZE),
        longest=head.config.max_position,
    )
    made = kind or {"eagle3": Eagle3Drafter, "eagle": EagleDrafter}[head.config.kind]
    return made(CpuHeadRunner(head, backend, ROWS), shape, sampling)


def run(backend, drafter, *plans, wanted=None, num_pages=100, rows=ROWS, max_num_seqs=9, times=1):
    engine = Engine(
        backend,
        Tokenizer(),
        Limits(VOCAB_SIZE, 128, max_num_seqs, rows),
        num_pages=num_pages,
        controller=Plans(*plans),
        drafters={drafter.name: drafter} if drafter else {},
    )
    for _ in range(times):
        added = [engine.add_request(ids, params)[0] for ids, params in wanted or list(all_requests())[:9]]
        while engine.has_unfinished:
            engine.step()
    assert not any(request.error or request.failed_drafters for request in added)
    return [(request.output_token_ids, request.logprobs) for request in added], engine


@pytest.fixture(scope="module")
def plain(backend):
    return run(backend, None, PLAIN)[0]


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("name", HEADS)
def test_the_same_bytes(name, setting, backend, plain):
    drafter = drafter_of(name, backend)
    plans = (DraftPlan(drafter.name, 4), DraftPlan(drafter.name, 7, 3), PLAIN)
    assert run(backend, drafter, *plans, **setting)[0] == plain


@pytest.mark.parametrize("sampling", list(DraftSampling))
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_a_draft_depends_on_its_request_and_nothing_else(setting, sampling, backend, plain):
    """Alone and together, in one piece and after a prefix hit, the same trees to the last token."""
    plan = DraftPlan("eagle3", 6, 2)
    alone = drafter_of("eagle3", backend, sampling, Remembering)
    for request in list(all_requests())[:9]:
        run(backend, alone, plan, wanted=[request])
    together = drafter_of("eagle3", backend, sampling, Remembering)
    results, engine = run(backend, together, plan, **setting)
    assert results == plain
    both = alone.trees.keys() & together.trees.keys()  # not all: in a crowd there is less room for drafts
    assert len(both) > 30
    assert all(alone.trees[key] == together.trees[key] for key in both)
    if "num_pages" in setting:
        assert engine.scheduler.num_preemptions > 0
    if "times" in setting:
        assert engine.kv.prefix_hits > 0
