"""Parallel heads on the torch backend: every tree is the one that the plain network proposes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from paceline import LLM
from paceline.backends.torch.backend import TorchBackend
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.sampling import SamplingState
from paceline.core.trees import PLAIN, DraftPlan, DraftTrees
from paceline.draft.base import DraftSampling
from paceline.draft.growing_tree import Scoring
from paceline.draft.growth import ROOT, ChosenTree, make_tree, to_draft_trees
from paceline.draft.heads.block import BlockDrafter, DFlashDrafter, DSparkDrafter
from paceline.draft.heads.head_options import EagleOptions
from paceline.draft.model.draft_cache import Context
from paceline.draft.model.vocabulary import trimmed_vocabulary
from paceline.errors import PacelineError
from paceline.models.files.safetensors_writer import encode
from paceline.models.heads.checkpoint import HeadCheckpoint, write_head
from paceline.models.registry import load_checkpoint
from paceline.verify.sampling import Sampler
from tests.draft.heads.test_eagle_torch import ROWS, features_of, run_engine, target_of
from tests.draft.model.test_draft_model_cpu import save_model
from tests.draft.requests import make_request
from tests.engines import Later
from tests.large import REPEATS
from tests.models.heads.driver import random_checkpoint
from tests.models.heads.tiny_heads import BLOCK_CONFIGS, DSPARK, VOCAB
from tests.tiny import save_checkpoint
from tests.train.objectives.test_block import output_of


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return load_checkpoint(save_checkpoint("llama-attention-bias", tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def backend(checkpoint):
    return TorchBackend.load(checkpoint, max_rows=ROWS)


@pytest.fixture(scope="module")
def plain(backend):
    return run_engine(backend, None, PLAIN)[0]


class AgainstWhole(BlockDrafter):
    """Compares every proposal with that of the network over the request's whole sequence, without pages."""

    backend: TorchBackend
    compared = accepted = 0

    def observe(self, requests, verdicts, features) -> None:
        super().observe(requests, verdicts, features)
        self.accepted += sum(len(verdict.accepted) for verdict in verdicts)

    def propose(self, requests: Sequence, plans: Sequence[DraftPlan]) -> DraftTrees:
        proposed = super().propose(requests, plans)
        for number, (request, plan) in enumerate(zip(requests, plans, strict=True)):
            if request.num_pending > 1:  # the target has yet to compute its features
                assert proposed.tree_lists(number) == ([], [])
                continue
            context = Context(request, request.token_ids, np.zeros(0, dtype=np.int32), plan.budget)
            plan = replace(plan, depth=min(plan.levels, self._block.num_drafts))
            tree = make_tree(context, plan, self._scoring, self._sampling, best_first=True)
            outputs = self._outputs(request.token_ids)[0 if self._block.sample_from_anchor else 1 :]
            for output in outputs:
                if not tree.frontier:
                    break
                before = torch.tensor(
                    [request.token_ids[-1] if node == ROOT else tree.tokens[node] for node in tree.frontier]
                )
                states = output.expand(len(before), -1)
                confidence = self._runner.head.confidence(states, before)
                tree.grow(
                    self._runner.head.guesses(states, before).numpy(),
                    None if confidence is None else confidence.sigmoid().numpy(),
                )
            assert proposed.tree_lists(number) == to_draft_trees([tree]).tree_lists(0)
            self.compared += 1
        return proposed

    def _outputs(self, tokens: Sequence[int]) -> torch.Tensor:
        """The outputs of the block behind these tokens, from a pass of the target over all but the last."""
        features = features_of(self.backend, self.needs.feature_layers, tokens)
        return output_of(self._runner.head, features, torch.tensor(tokens), len(tokens) - 1)


class AgainstDFlash(AgainstWhole, DFlashDrafter):
    pass


class AgainstDSpark(AgainstWhole, DSparkDrafter):
    pass


def knowing_head(outputs: Sequence[Sequence[int]]) -> HeadCheckpoint:
    """A DSpark head whose Markov head knows which tokens follow each other in these outputs."""
    block = replace(DSPARK.block, markov_rank=VOCAB, confidence=False, confidence_with_markov=False)
    head = random_checkpoint(replace(DSPARK, draft_vocab_size=VOCAB, block=block))
    follows = np.zeros((VOCAB, VOCAB), np.float32)
    for tokens in outputs:
        for before, after in pairwise(tokens):
            follows[after, before] += 9.0
    known = {"markov_w1.weight": np.eye(VOCAB, dtype=np.float32), "markov_w2.weight": follows}
    return replace(
        head, tensors={**head.tensors, **{f"markov_head.{k}": encode(v) for k, v in known.items()}}
    )


def checked_drafter(name, checkpoint, backend, sampling, folder, head=None) -> Later:
    write_head(head or random_checkpoint(BLOCK_CONFIGS[name]), folder, "vllm")
    kind = AgainstDSpark if name == "dspark" else AgainstDFlash
    drafter = Later(kind.load(EagleOptions(str(folder)), target_of(checkpoint, backend, sampling)))
    drafter.backend = backend
    return drafter


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("dflash", DraftSampling.GREEDY),
        ("jetspec", DraftSampling.COUPLED),
        ("dflash2", DraftSampling.COUPLED),
        ("dspark", DraftSampling.INDEPENDENT),
        pytest.param("dspark", DraftSampling.GREEDY, marks=REPEATS),
        pytest.param("dspark", DraftSampling.COUPLED, marks=REPEATS),  # as below
    ],
)
@torch.inference_mode()
def test_every_tree_is_that_of_the_plain_network(name, sampling, checkpoint, backend, plain, tmp_path):
    drafter = checked_drafter(name, checkpoint, backend, sampling, tmp_path)
    plans = (DraftPlan(drafter.name, 3), DraftPlan(drafter.name, 9, 2), DraftPlan(drafter.name, 8, 3), PLAIN)
    outputs, _ = run_engine(backend, drafter, *plans)
    assert outputs == plain
    assert drafter.compared > 30


@pytest.mark.parametrize(
    "setting",
    [{"rows": 24, "max_num_seqs": 4}, {"num_pages": 8}],
    ids=["chunks and prefix hits", "preemption"],
)
@torch.inference_mode()
def test_trees_do_not_depend_on_earlier_plans_and_drafts(setting, checkpoint, backend, plain, tmp_path):
    drafter = checked_drafter(
        "dspark", checkpoint, backend, DraftSampling.COUPLED, tmp_path, knowing_head(plain)
    )
    plans = (DraftPlan("dspark", 3), DraftPlan("dspark", 6, 3), PLAIN)
    outputs, engine = run_engine(backend, drafter, *plans, times=2, **setting)
    assert outputs == plain
    assert drafter.compared > 15
    assert drafter.accepted > 50
    assert engine.scheduler.num_preemptions > 0 if "num_pages" in setting else engine.kv.prefix_hits > 0


def greedy_request(tokens: list[int]) -> Request:
    request = make_request(tokens)
    request.sampling = SamplingState(SamplingParams(temperature=0), 0, tokens, ())
    return request


def test_a_tree_has_the_best_paths_of_all():
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((4, VOCAB, VOCAB)).astype(np.float32)  # [level, token before, token]
    request = greedy_request([5, 6, 7])
    plan = DraftPlan("dspark", 40, branching=3, depth=4)
    scoring = Scoring(trimmed_vocabulary(None, VOCAB), Sampler(VOCAB))
    context = Context(request, request.token_ids, np.zeros(0, np.int32), 40)
    tree = ChosenTree(context, plan, scoring, coupled=False, best_first=True)
    for level in logits:
        tree.grow(level[[7 if node == ROOT else tree.tokens[node] for node in tree.frontier]])
    finished = tree.finished()
    paths = set()
    for node, token in enumerate(finished.tokens):
        path, parent = (token,), finished.parents[node]
        while parent >= 0:
            path, parent = (finished.tokens[parent], *path), finished.parents[parent]
        paths.add(path)
    assert paths == set(best_paths(logits, 7, budget=40, branching=3))


def best_paths(logits: np.ndarray, anchor: int, budget: int, branching: int) -> list[tuple[int, ...]]:
    """The likeliest paths, one after the other from a heap of all that could be next."""
    found: list[tuple[int, ...]] = []
    waiting: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    while len(found) < budget:
        cost, path = heapq.heappop(waiting)
        if path:
            found.append(path)
        if len(path) < len(logits):
            row = logits[len(path), path[-1] if path else anchor].astype(np.float64)
            scores = row - np.logaddexp.reduce(row)
            for token in np.argsort(-scores)[:branching]:
                heapq.heappush(waiting, (cost - scores[token], (*path, int(token))))
    return found


@pytest.mark.parametrize(("min_prob", "length"), [(0.0, 4), (0.3, 2), (0.4, 1), (0.9, 0)])
def test_a_chain_ends_where_the_head_loses_its_confidence(min_prob, length):
    request = greedy_request([5, 6, 7])
    scoring = Scoring(trimmed_vocabulary(None, VOCAB), Sampler(VOCAB), min_prob, extend_factor=1.0)
    context = Context(request, request.token_ids, np.zeros(0, np.int32), 4)
    tree = ChosenTree(context, DraftPlan("dspark", 4), scoring, coupled=False, best_first=True)
    logits = np.zeros((1, VOCAB), np.float32)
    for token, confidence in enumerate((0.7, 0.5, 0.5, 0.5)):
        if tree.frontier:
            logits[:] = np.eye(VOCAB)[token]
            tree.grow(logits, np.float32([confidence]))
    finished = tree.finished()
    assert list(finished.tokens) == [0, 1, 2, 3][:length]
    assert finished.chances == pytest.approx([0.7, 0.35, 0.175, 0.0875][:length])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a model and its tokenizer."""
    return save_model(tmp_path_factory.mktemp("model"))


def generate(model, speculative_config, backend="torch"):
    llm = LLM(model, speculative_config=speculative_config, backend=backend, threads=1, max_model_len=200)
    params = [SamplingParams(temperature=t, seed=3, max_tokens=20, ignore_eos=True) for t in (0, 0.7, 1)]
    return llm.generate([list(range(3, 60))] * 3, params, use_tqdm=False)


SERVED = ("dflash", "dflash2", "jetspec", "dspark")
TRIED = (("dflash", "torch"), ("dflash2", "cpu"), ("jetspec", "cpu"), ("dspark", "cpu"))  # torch is slow


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(*case, marks=() if case in TRIED else REPEATS)
        for case in product(SERVED, ("torch", "cpu"))
    ],
)
def test_same_bytes_as_chain_and_tree_at_every_temperature(model, name, backend, tmp_path):
    config = BLOCK_CONFIGS[name]
    write_head(random_checkpoint(config), tmp_path, "vllm")
    method = {"method": config.kind, "model": str(tmp_path), "min_prob": 0}
    expected = [output.outputs[0].token_ids for output in generate(model, None, backend)]
    for given in (
        method,
        {**method, "num_speculative_tokens": 8, "branching": 3},
        {"method": "hybrid", "fallback": method, "combine": "tree", "branching": 2},
    ):
        outputs = generate(model, given, backend)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        for output in outputs:
            assert output.metrics.speculative.num_draft_tokens > 20
            assert output.metrics.speculative.failed_drafters == []


def test_a_head_that_cannot_be_used_is_refused_with_the_reason(model, tmp_path):
    write_head(random_checkpoint(DSPARK), tmp_path, "vllm")
    head = {"method": "dspark", "model": str(tmp_path)}
    for config, message in (
        ({**head, "method": "dflash"}, "set method to 'dspark'"),
        ({**head, "method": "eagle3"}, "set method to 'dspark'"),
        ({"method": "dspark"}, "no dspark head is shipped with paceline"),
        ({**head, "min_prob": 2}, "min_prob"),
    ):
        with pytest.raises(PacelineError, match=message):
            generate(model, config)
