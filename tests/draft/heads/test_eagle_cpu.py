"""Heads on the cpu backend: the same bytes, and proposals that do not depend on earlier steps."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

from paceline import LLM
from paceline.backends.cpu import CpuBackend
from paceline.backends.options import BackendOptions
from paceline.backends.torch.backend import kv_slots
from paceline.core.params import SamplingParams
from paceline.core.trees import PLAIN, DraftPlan, DraftTrees
from paceline.draft.base import DraftSampling, Target
from paceline.draft.heads.eagle import Eagle3Drafter, EagleDrafter, HeadDrafter
from paceline.draft.heads.head_drafter import LoadedHead, PagedHeadDrafter
from paceline.draft.heads.head_options import EagleOptions
from paceline.errors import ConfigError
from paceline.kv.cache import KVCache
from paceline.models.heads.checkpoint import write_head
from paceline.models.registry import load_checkpoint
from tests.backends.driver import Driven, run
from tests.draft.model.test_draft_model_cpu import results, run_engine, save_model
from tests.engine.test_exactness_cpu import Tokenizer
from tests.engines import Later
from tests.large import in_turn
from tests.models.heads.driver import random_checkpoint
from tests.models.heads.tiny_heads import CONFIGS, EAGLE3, P_EAGLE
from tests.tiny import save_checkpoint

ROWS = 64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return load_checkpoint(save_checkpoint("qwen2", tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def backend(checkpoint):
    return CpuBackend.load(checkpoint, quantization="int8", threads=1, max_rows=ROWS)


class AgainstFresh(PagedHeadDrafter):
    """Compares every proposal, bit for bit, with that of a drafter to which the request is new.

    That one grows trees pass by pass, also where a chain can be had in one call.
    """

    backend: CpuBackend
    fresh_kind: type[PagedHeadDrafter] = HeadDrafter
    compared = 0

    def propose(self, wanted: Sequence, plans: Sequence[DraftPlan]) -> DraftTrees:
        proposed = super().propose(wanted, plans)
        for number, (request, plan) in enumerate(zip(wanted, plans, strict=True)):
            if request.num_pending == 1 and len(request.token_ids) > 1:
                expected = self._expected(request, plan)
                assert proposed.tree_lists(number) == expected.tree_lists(0)
                ours, theirs = proposed.draws_of(number), expected.draws_of(0)
                assert (ours is None) == (theirs is None)
                if ours is not None and theirs is not None:
                    assert (ours.draft_probs[ours.rows] == theirs.draft_probs[theirs.rows]).all()
                self.compared += 1
        return proposed

    def _expected(self, request, plan: DraftPlan) -> DraftTrees:
        kv = KVCache(16, self.backend.page_size, max_sequences=1, max_length=16 * self.backend.page_size)
        pool = kv.add_pool(self.backend)
        head = LoadedHead(self._runner, self._shape, self._sampling, self._scoring.least_chance)
        fresh = self.fresh_kind(head, kv)
        slot, _ = kv.open(request.token_ids)
        kv.reserve(slot, len(request.token_ids) + plan.budget)
        line = kv.page_tables[slot]
        states = self.backend.make_states(1) if self.backend.bytes_per_state else None
        driven = Driven(self.backend, pool, line, states)
        known = request.token_ids[:-1]
        for at in range(0, len(known), ROWS):
            chunk = known[at : at + ROWS]
            layers = sorted(set(self._shape.feature_layers))
            output = run([driven.ask(chunk)], [0], feature_layers=tuple(layers))
            parts = [layers.index(layer) for layer in self._shape.feature_layers]
            values = output.features.reshape(len(chunk), len(layers), -1)[:, parts]
            places = kv_slots(line, at + len(chunk))[at:]
            fresh._pages.pool.features[places] = (values.view(np.uint32) + 0x8000) >> 16  # as they are kept
            driven.commit(range(len(chunk)))
        twin = copy.copy(request)
        twin.slot = slot
        with patch.object(HeadDrafter, "_is_one_call", lambda *_: False):
            return fresh.propose([twin], [plan])


class Against1(AgainstFresh, EagleDrafter):
    pass


class Against3(AgainstFresh, Eagle3Drafter):
    pass


@pytest.fixture(scope="module")
def plain(backend):
    return results(run_engine(backend, None, PLAIN)[0])


HEAD_CONFIGS = {**CONFIGS, "p-eagle": P_EAGLE}
HEADS = {
    "eagle3 with chunks and prefix hits": ("eagle3", {"rows": 24, "max_num_seqs": 4}),
    "flags with preemption": ("all flags", {"num_pages": 14}),
    "eagle with preemption": ("eagle", {"num_pages": 14}),
    "p-eagle with preemption": ("p-eagle", {"num_pages": 14}),
}
CHAINS = {"full chains": 0.0, "chains that end": 1e-4}


@pytest.mark.parametrize(("head", "sampling", "min_prob"), in_turn(HEADS, DraftSampling, CHAINS))
def test_proposals_do_not_depend_on_the_past_nor_bytes_on_proposals(
    head, sampling, min_prob, checkpoint, backend, plain, tmp_path
):
    name, setting = head
    config = replace(HEAD_CONFIGS[name], norm_before_residual=False)  # which SGLang's format cannot say
    write_head(random_checkpoint(config), tmp_path, "vllm" if config.mask_token_id else "sglang")
    kind = Against1 if config.kind == "eagle" else Against3
    options = BackendOptions(backend="cpu", quantization="int8", threads=1)
    target = Target(checkpoint.config, Tokenizer(), options, backend, ROWS, sampling)
    drafter = Later(kind.load(EagleOptions(str(tmp_path), min_prob=min_prob), target))
    drafter.backend = backend
    plans = [DraftPlan(kind.name, *shape) for shape in ((1,), (4,), (6, 2), (9, 3), (5, 4, 2))]
    added, engine = run_engine(backend, drafter, PLAIN, *plans, times=2, **setting)
    assert results(added) == plain
    assert drafter.compared > 30
    assert engine.scheduler.num_preemptions > 0 if "num_pages" in setting else engine.kv.prefix_hits > 0


def test_loads_by_method_name(tmp_path):
    model = save_model(tmp_path)
    write_head(random_checkpoint(EAGLE3), tmp_path / "head", "speculators")
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
    texts = []
    head = str(tmp_path / "head")
    full = {"method": "eagle3", "model": head, "min_prob": 0}
    for config in (None, full, {**full, "quantization": "int8"}, f"eagle3:{head}"):
        llm = LLM(model, speculative_config=config, backend="cpu", threads=1, max_model_len=200)
        output = llm.generate([list(range(3, 60))], params, use_tqdm=False)[0]
        texts.append(output.outputs[0].token_ids)
        # a random head is never sure
        assert (output.metrics.speculative.num_draft_tokens > 50) == isinstance(config, dict)
        assert output.metrics.speculative.failed_drafters == []
    assert texts[0] == texts[1] == texts[2] == texts[3]
    with pytest.raises(ConfigError, match="quantization of a draft head must be int8 or int4, got 'int3'"):
        LLM(model, speculative_config={"method": "eagle3", "model": head, "quantization": "int3"})


def test_parallel_drafting_must_be_what_the_head_does(tmp_path):
    model = save_model(tmp_path)
    for name, config in (("p-eagle", P_EAGLE), ("eagle3", EAGLE3)):
        write_head(random_checkpoint(config), tmp_path / name, "vllm")

    def load(name: str, parallel: object) -> LLM:
        config = {"method": "eagle3", "model": str(tmp_path / name), "parallel_drafting": parallel}
        return LLM(model, speculative_config=config, backend="cpu", threads=1, max_model_len=200)

    params = SamplingParams(temperature=0.8, seed=3, max_tokens=4, ignore_eos=True, speculative="eagle3")
    for name, parallel in (("p-eagle", True), ("eagle3", False)):
        (output,) = load(name, parallel).generate([list(range(3, 60))], params, use_tqdm=False)
        assert output.metrics.speculative.failed_drafters == []
    with pytest.raises(ConfigError, match="guesses one token in each pass: leave out parallel_drafting"):
        load("eagle3", True)
    with pytest.raises(ConfigError, match="guesses all tokens of a draft in one pass"):
        load("p-eagle", False)
    with pytest.raises(ConfigError, match="parallel_drafting"):
        load("eagle3", 1)
