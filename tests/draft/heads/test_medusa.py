"""Medusa heads in the engine: the same bytes, and trees that follow from the target's last state alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch

from paceline import LLM
from paceline.backends.options import BackendOptions
from paceline.backends.torch.backend import TorchBackend
from paceline.core.params import SamplingParams
from paceline.core.trees import PLAIN, DraftPlan, DraftTrees
from paceline.draft.base import DraftSampling, Target
from paceline.draft.growing_tree import GrowingTree
from paceline.draft.growth import make_tree, to_draft_trees
from paceline.draft.heads.head_options import HeadOptions
from paceline.draft.heads.medusa import MedusaDrafter
from paceline.draft.heads.ranked import make_ranked_tree
from paceline.draft.model.draft_cache import Context
from paceline.errors import ConfigError, PacelineError
from paceline.models.heads.config import TargetName
from paceline.models.heads.medusa import NumpyMedusa, load_medusa, write_medusa
from paceline.models.registry import load_checkpoint
from tests.backends.driver import drive, run
from tests.draft.heads.test_eagle_torch import run_engine
from tests.draft.model.test_draft_model_cpu import save_model
from tests.engine.test_exactness_cpu import Tokenizer
from tests.engines import Later
from tests.large import in_turn
from tests.models.heads.test_medusa_heads import CONFIG, random_medusa
from tests.tiny import save_checkpoint

ROWS = 64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return load_checkpoint(save_checkpoint("llama", tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def backend(checkpoint):
    return TorchBackend.load(checkpoint, max_rows=ROWS)


@pytest.fixture(scope="module")
def plain(backend):
    return run_engine(backend, None, PLAIN)[0]


class AgainstWhole(MedusaDrafter):
    """Compares every proposal with that from the state of a pass over the whole sequence."""

    backend: TorchBackend
    reference: NumpyMedusa
    compared = 0

    def propose(self, requests: Sequence, plans: Sequence[DraftPlan]) -> DraftTrees:
        proposed = super().propose(requests, plans)
        for number, (request, plan) in enumerate(zip(requests, plans, strict=True)):
            if request.num_pending > 1:
                assert proposed.tree_lists(number) == ([], [])
                continue
            levels = self.reference.run(last_state(self.backend, tuple(request.token_ids))[None])[:, 0]
            context = Context(request, request.token_ids, np.zeros(0, dtype=np.int32), plan.budget)
            shallow = replace(plan, depth=min(plan.levels, len(levels)))
            if plan.branching > 1 and self._paths:
                tree = make_ranked_tree(context, shallow, self._scoring, self._sampling, self._paths)
            else:
                tree = make_tree(context, shallow, self._scoring, self._sampling)
            for level in levels:
                if tree.frontier:
                    tree.grow(np.stack([level] * len(tree.frontier)))
            assert not tree.frontier
            assert proposed.tree_lists(number) == to_draft_trees([tree]).tree_lists(0)
            self.compared += 1
        return proposed


@lru_cache(maxsize=1024)  # tests draft behind the same tokens again and again
def last_state(backend: TorchBackend, tokens: tuple[int, ...]) -> np.ndarray:
    """The target's normed last state of the token before the last."""
    (request,) = drive(backend, pages_each=12)
    known = tokens[:-1]
    for at in range(0, len(known), ROWS):
        chunk = known[at : at + ROWS]
        features = run([request.ask(chunk)], feature_layers=(3,)).features
        request.commit(range(len(chunk)))
    return backend.model.norm(torch.from_numpy(features[-1])).numpy()


class Grown(GrowingTree):
    """A tree with three nodes on each level, which notes what it is given."""

    def __init__(self):
        self.frontier, self.given = [0, 1, 2], []

    def grow(self, logits, confidences=None):
        self.given.append(logits)

    def finished(self):
        raise NotImplementedError


def test_nodes_of_a_level_get_the_same_row_which_can_be_written():
    """numba compiles the samplers anew, for ten seconds, for rows that are read-only."""
    tree, levels = Grown(), np.arange(8, dtype=np.float32).reshape(2, 4)
    tree.grow_levels(levels)
    assert [given.tolist() for given in tree.given] == [[level.tolist()] * 3 for level in levels]
    assert all(row.flags.writeable and row.flags.c_contiguous for given in tree.given for row in given)


VOCABULARIES_AND_PATHS = {
    "all tokens": (None, ()),
    "trimmed": (np.arange(2, 173, 2, dtype=np.int32), ()),
    "calibrated": (None, ((0,), (1,), (0, 0), (2,), (1, 0), (0, 1), (0, 0, 0), (1, 0, 1))),
}


@pytest.mark.parametrize(("made", "sampling"), in_turn(VOCABULARIES_AND_PATHS, DraftSampling))
@torch.inference_mode()
def test_every_tree_follows_from_the_last_state(made, sampling, checkpoint, backend, plain, tmp_path):
    ids, paths = made
    config = CONFIG if ids is None else replace(CONFIG, draft_vocab_size=len(ids))
    write_medusa(replace(random_medusa(config, ids), paths=paths), tmp_path)
    norm = checkpoint.tensors["model.norm.weight"].float32()
    options = BackendOptions(backend="torch")
    target = Target(checkpoint.config, Tokenizer(), options, backend, ROWS, sampling, final_norm=norm)
    drafter = Later(AgainstWhole.load(HeadOptions(str(tmp_path)), target))
    drafter.backend, drafter.reference = backend, NumpyMedusa(load_medusa(tmp_path))
    plans = [DraftPlan("medusa", *shape) for shape in ((2,), (5,), (6, 2), (9, 3), (5, 4, 2))]
    outputs, engine = run_engine(backend, drafter, PLAIN, *plans, num_pages=8)
    assert outputs == plain
    assert engine.scheduler.num_preemptions > 0
    assert drafter.compared > 20
    assert not drafter._states, "what has ended is forgotten"


@pytest.mark.parametrize("backend_name", ["cpu", "torch"])
def test_loads_by_method_name(backend_name, tmp_path):
    model = save_model(tmp_path)
    write_medusa(random_medusa(replace(CONFIG, target=TargetName("0" * 16, "another"))), tmp_path / "head")
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)

    def generate(config):
        llm = LLM(model, speculative_config=config, backend=backend_name, threads=1, max_model_len=200)
        return llm.generate([list(range(3, 60))], params, use_tqdm=False)[0]

    head = str(tmp_path / "head")
    drafted = generate({"method": "medusa", "model": head, "any_target": True, "branching": 2})
    assert drafted.metrics.speculative.num_draft_tokens > 50
    assert drafted.metrics.speculative.failed_drafters == []
    assert drafted.outputs[0].token_ids == generate(None).outputs[0].token_ids
    for config, message in (
        (f"medusa:{head}", "trained for another target, another"),
        ("medusa", "no medusa head is shipped"),
    ):
        with pytest.raises(PacelineError, match=message):
            generate(config)


def test_heads_of_other_sizes_are_refused(checkpoint, backend, tmp_path):
    options = BackendOptions(backend="torch")
    target = Target(checkpoint.config, Tokenizer(), options, backend, ROWS, DraftSampling.COUPLED)
    small = replace(CONFIG, draft_vocab_size=99)
    for head, message in (
        (random_medusa(small), "for a target with 99 tokens"),
        (random_medusa(replace(CONFIG, hidden_size=44)), "hidden size 44"),
        (random_medusa(small, np.arange(100, 199, dtype=np.int32)), "that this target does not have"),
    ):
        write_medusa(head, tmp_path)
        with pytest.raises(ConfigError, match=message):
            MedusaDrafter.load(HeadOptions(str(tmp_path)), target)
