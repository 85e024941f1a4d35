"""Heads on the torch backend: every tree is the one that the plain network proposes over the sequence."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline import LLM
from paceline.backends.options import BackendOptions
from paceline.backends.torch.backend import TorchBackend
from paceline.core.params import SamplingParams
from paceline.core.trees import PLAIN, DraftPlan, DraftTrees
from paceline.draft.base import DraftSampling, Target
from paceline.draft.growth import make_tree, to_draft_trees
from paceline.draft.heads.eagle import Eagle3Drafter, EagleDrafter
from paceline.draft.heads.head_options import EagleOptions
from paceline.draft.model.draft_cache import Context
from paceline.engine.admission import Limits
from paceline.errors import PacelineError
from paceline.models.heads import shipped
from paceline.models.heads.checkpoint import HeadCheckpoint, write_head
from paceline.models.heads.config import TargetName
from paceline.models.heads.fingerprint import target_fingerprint
from paceline.models.registry import load_checkpoint
from paceline.models.transformer.attention import attend
from tests.backends.driver import drive, run
from tests.draft.draft_models import Plans, path_of
from tests.draft.model.test_draft_model_cpu import save_model
from tests.engine.test_exactness_cpu import Tokenizer
from tests.engine.test_exactness_cpu import requests as all_requests
from tests.engines import Later, new_engine
from tests.large import in_turn, repeated
from tests.models.heads.driver import random_checkpoint
from tests.models.heads.tiny_heads import CONFIGS, EAGLE3, P_EAGLE
from tests.tiny import save_checkpoint
from tests.tiny_families import VOCAB_SIZE

ROWS = 64
HEADS = {"eagle3": CONFIGS["eagle3"], "all flags": CONFIGS["all flags"], "eagle": CONFIGS["eagle"]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return load_checkpoint(save_checkpoint("llama-attention-bias", tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def backend(checkpoint):
    return TorchBackend.load(checkpoint, max_rows=ROWS)


def target_of(checkpoint, backend, sampling=DraftSampling.COUPLED) -> Target:
    return Target(
        config=checkpoint.config,
        tokenizer=Tokenizer(),
        backend=BackendOptions(backend="torch"),
        loaded=backend,
        max_rows=ROWS,
        sampling=sampling,
        fingerprint=target_fingerprint(checkpoint),
    )


def features_of(backend: TorchBackend, layers: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """The target's features of all tokens but the last, from passes of their own."""
    return _features_of(backend, tuple(layers), tuple(tokens))


@lru_cache(maxsize=1024)  # tests draft behind the same tokens again and again
def _features_of(backend: TorchBackend, layers: tuple[int, ...], tokens: tuple[int, ...]) -> torch.Tensor:
    (request,) = drive(backend, pages_each=12)
    rows = []
    for at in range(0, len(tokens) - 1, ROWS):
        chunk = tokens[: len(tokens) - 1][at : at + ROWS]
        output = run([request.ask(chunk)], feature_layers=layers)
        rows.append(torch.from_numpy(output.features.copy()).bfloat16().float())  # as they are kept
        request.commit(range(len(chunk)))
    return torch.cat(rows)


class AgainstWhole(EagleDrafter):
    """Compares every proposal with that of the network over the request's whole sequence, without a past."""

    backend: TorchBackend
    compared = 0

    def propose(self, requests: Sequence, plans: Sequence[DraftPlan]) -> DraftTrees:
        proposed = super().propose(requests, plans)
        for number, (request, plan) in enumerate(zip(requests, plans, strict=True)):
            if request.num_pending > 1:  # the target has yet to compute its features
                assert proposed.tree_lists(number) == ([], [])
                continue
            pages = np.zeros(0, dtype=np.int32)
            context = Context(request, request.token_ids, pages, plan.budget)
            tree = make_tree(context, plan, self._scoring, self._sampling)
            self.outputs: dict[tuple[int, ...], torch.Tensor] = {}
            self.features = self._features(request.token_ids)
            while tree.frontier:
                paths = [path_of(tree, node) for node in tree.frontier]
                logits = [self._runner.head.logits(self._output(request.token_ids, path)) for path in paths]
                tree.grow(torch.stack(logits).numpy())
            assert proposed.tree_lists(number) == to_draft_trees([tree]).tree_lists(0)
            self.compared += 1
        return proposed

    def _features(self, tokens: Sequence[int]) -> torch.Tensor:
        return self._runner.head.fuse(features_of(self.backend, self.needs.feature_layers, tokens))

    def _output(self, tokens: Sequence[int], path: tuple[int, ...]) -> torch.Tensor:
        """The head's output for the last slot of a path: [hidden]."""
        if path not in self.outputs:
            fed_back = [
                self._runner.head.feed_back(self._output(tokens, path[:length]))
                for length in range(len(path))
            ]
            states = torch.cat((self.features, torch.stack(fed_back))) if path else self.features
            count = len(states)
            mask = torch.ones(count, count, dtype=torch.bool).tril()
            ids = torch.tensor([*tokens[1:], *path])
            outputs = self._runner.head(states, ids, torch.arange(count), lambda *heads: attend(*heads, mask))
            self.outputs[path] = outputs[-1]
        return self.outputs[path]


class Against3(AgainstWhole, Eagle3Drafter):
    pass


class AgainstMasked(Against3):
    """The same for P-EAGLE: one pass of the network over the sequence and the masks behind it."""

    def propose(self, requests: Sequence, plans: Sequence[DraftPlan]) -> DraftTrees:
        proposed = Eagle3Drafter.propose(self, requests, plans)
        for number, (request, plan) in enumerate(zip(requests, plans, strict=True)):
            if request.num_pending > 1:
                assert proposed.tree_lists(number) == ([], [])
                continue
            context = Context(request, request.token_ids, np.zeros(0, dtype=np.int32), plan.budget)
            tree = make_tree(context, plan, self._scoring, self._sampling, best_first=True)
            for row in self._guesses(request.token_ids, plan.levels):
                if tree.frontier:
                    tree.grow(row.expand(len(tree.frontier), -1).numpy())
            assert proposed.tree_lists(number) == to_draft_trees([tree]).tree_lists(0)
            self.compared += 1
        return proposed

    def _guesses(self, tokens: Sequence[int], levels: int) -> torch.Tensor:
        """The logits of the last slot and of the masks behind it: [levels, draft vocabulary]."""
        head = self._runner.head
        masks = head.fuse(head.mask_hidden[0].expand(levels - 1, -1))
        states = torch.cat((self._features(tokens), masks))
        ids = torch.tensor([*tokens[1:], *[head.config.mask_token_id] * (levels - 1)])
        causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        attends = [lambda *heads: attend(*heads, causal)] * head.config.num_layers
        return head.logits(head(states, ids, torch.arange(len(ids)), *attends))[-levels:]


@pytest.mark.parametrize("sampling", [DraftSampling.COUPLED, *repeated(DraftSampling.INDEPENDENT)])
@torch.inference_mode()
def test_a_p_eagle_head_drafts_all_levels_in_one_pass(sampling, checkpoint, backend, plain, tmp_path):
    write_head(random_checkpoint(P_EAGLE), tmp_path, "vllm")
    drafter = Later(AgainstMasked.load(EagleOptions(str(tmp_path)), target_of(checkpoint, backend, sampling)))
    drafter.backend = backend
    plans = (DraftPlan("eagle3", 3), DraftPlan("eagle3", 6, 2), DraftPlan("eagle3", 8, 3, depth=4), PLAIN)
    outputs, engine = run_engine(backend, drafter, *plans, num_pages=8)
    assert outputs == plain
    assert drafter.compared > 30
    assert engine.scheduler.num_preemptions > 0


def checked_drafter(name, checkpoint, backend, sampling, folder) -> Later:
    write_head(random_checkpoint(replace(HEADS[name], norm_before_residual=False)), folder, "sglang")
    kind = AgainstWhole if HEADS[name].kind == "eagle" else Against3
    drafter = Later(kind.load(EagleOptions(str(folder)), target_of(checkpoint, backend, sampling)))
    drafter.backend = backend
    return drafter


def run_engine(backend, drafter, *plans, num_pages=100, rows=ROWS, max_num_seqs=9, times=1):
    engine = new_engine(
        backend,
        Tokenizer(),
        Limits(VOCAB_SIZE, 128, max_num_seqs, rows),
        num_pages=num_pages,
        controller=Plans(*plans),
        drafters={drafter.name: drafter} if drafter else {},
    )
    for _ in range(times):
        added = [engine.add_request(ids, params)[0] for ids, params in list(all_requests())[:7]]
        while engine.has_unfinished:
            engine.step()
    assert not any(request.error or request.failed_drafters for request in added)
    return [request.output_token_ids for request in added], engine


@pytest.fixture(scope="module")
def plain(backend):
    return run_engine(backend, None, PLAIN)[0]


@pytest.mark.parametrize(("name", "sampling"), in_turn({name: name for name in HEADS}, DraftSampling))
@torch.inference_mode()
def test_every_tree_is_that_of_the_plain_network(name, sampling, checkpoint, backend, plain, tmp_path):
    drafter = checked_drafter(name, checkpoint, backend, sampling, tmp_path)
    plans = (DraftPlan(drafter.name, 3), DraftPlan(drafter.name, 6, 2), DraftPlan(drafter.name, 8, 3), PLAIN)
    outputs, _ = run_engine(backend, drafter, *plans)
    assert outputs == plain
    assert drafter.compared > 30


@pytest.mark.parametrize(
    "setting",
    [{"rows": 24, "max_num_seqs": 4, "times": 2}, {"num_pages": 8}],
    ids=["chunks and prefix hits", "preemption"],
)
@torch.inference_mode()
def test_trees_do_not_depend_on_earlier_plans_and_drafts(setting, checkpoint, backend, plain, tmp_path):
    drafter = checked_drafter("eagle3", checkpoint, backend, DraftSampling.COUPLED, tmp_path)
    plans = (DraftPlan("eagle3", 3), DraftPlan("eagle3", 6, 3), PLAIN)
    outputs, engine = run_engine(backend, drafter, *plans, **setting)
    assert outputs == plain
    assert drafter.compared > 30
    assert engine.scheduler.num_preemptions > 0 if "num_pages" in setting else engine.kv.prefix_hits > 0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a model and its tokenizer."""
    return save_model(tmp_path_factory.mktemp("model"))


def saved_head(head: HeadCheckpoint, folder: Path) -> str:
    write_head(head, folder, "sglang")
    return str(folder)


def generate(model, speculative_config, backend="torch", requests=1):
    llm = LLM(model, speculative_config=speculative_config, backend=backend, threads=1, max_model_len=200)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
    return llm.generate([list(range(3, 60))] * requests, params, use_tqdm=False)[0]


def test_loads_by_method_name(model, tmp_path):
    head = saved_head(random_checkpoint(EAGLE3), tmp_path)
    expected = generate(model, None)
    eagle3 = {"method": "eagle3", "model": head}
    hybrid = {"method": "hybrid", "fallback": eagle3, "combine": "tree", "branching": 2}
    for config in ({**eagle3, "branching": 2}, f"eagle3:{head}", hybrid):
        drafted = generate(model, config)
        assert drafted.outputs[0].token_ids == expected.outputs[0].token_ids
        assert drafted.metrics.speculative.num_draft_tokens > 50
        assert drafted.metrics.speculative.failed_drafters == []


def test_a_head_that_cannot_be_used_is_refused_with_the_reason(model, tmp_path):
    named = replace(EAGLE3, target=TargetName("0" * 16, "another"))
    head = saved_head(random_checkpoint(named), tmp_path)
    for config, message in (
        ({"method": "eagle3"}, "no eagle3 head is shipped for this target"),
        ({"method": "eagle3", "model": "no/such/folder"}, "There is no draft head 'no/such/folder'"),
        ({"method": "eagle3", "model": head}, "trained for another target, another"),
        ({"method": "eagle", "model": head, "any_target": True}, "set method to 'eagle3'"),
        ({"method": "eagle3", "model": head, "any_target": "yes"}, "any_target must be True or False"),
        ({"method": "eagle3", "model": head, "any": True}, "unknown option 'any'"),
    ):
        with pytest.raises(PacelineError, match=message):
            generate(model, config, "cpu")
    used = generate(model, {"method": "eagle3", "model": head, "any_target": True, "min_prob": 0}, "cpu")
    assert used.metrics.speculative.num_draft_tokens > 50


def test_the_head_that_is_shipped_for_a_target_is_found_without_a_name(model, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path)
    mine = TargetName(target_fingerprint(load_checkpoint(Path(model))), "me")
    saved_head(random_checkpoint(replace(EAGLE3, target=TargetName("0" * 16))), tmp_path / "eagle3" / "a")
    with pytest.raises(PacelineError, match="no eagle3 head is shipped for this target"):
        generate(model, "eagle3", "cpu")
    generate(model, "auto", "cpu")
    assert "drafting with" not in caplog.text
    saved_head(random_checkpoint(replace(EAGLE3, target=mine)), tmp_path / "eagle3" / "b")
    found = {"method": "eagle3", "min_prob": 0}
    assert generate(model, found, "cpu").metrics.speculative.num_draft_tokens > 50
    assert "drafting with the eagle3 head that is shipped for b" in caplog.text
    caplog.clear()
    generate(model, "auto", "cpu")  # by default it is there for the controller to choose
    assert "drafting with the eagle3 head that is shipped for b" in caplog.text
    assert generate(model, found, "cpu", requests=3).metrics.speculative.num_draft_tokens > 50
    for other in (None, "off", "grammar"):
        assert generate(model, other, "cpu").metrics.speculative.num_draft_tokens == 0
