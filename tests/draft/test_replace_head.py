"""A head replaced while requests run: from the next step on every tree is the new head's; the same bytes.

The drafters are those of the tests of heads, which compare every tree with that of the plain network over the
request's whole sequence. So keys and values that the old head left behind are noticed in the first tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import LLM
from paceline.backends.torch.backend import TorchBackend
from paceline.build import Loaded, build_engine
from paceline.config import EngineConfig
from paceline.core.trees import PLAIN, DraftPlan
from paceline.draft.base import DraftSampling
from paceline.draft.model.draft_cache import SharedPages
from paceline.engine.admission import Limits
from paceline.errors import PacelineError
from paceline.kv.cache import KVCache
from paceline.models.heads.checkpoint import write_head
from paceline.models.registry import load_checkpoint
from tests.draft.draft_models import Plans
from tests.draft.heads import test_block_torch as blocks
from tests.draft.heads import test_eagle_torch as eagles
from tests.draft.heads.test_eagle_torch import ROWS, Tokenizer, all_requests, run_engine
from tests.draft.model.test_draft_model_cpu import save_model
from tests.engines import Later, new_engine
from tests.models.heads.driver import random_checkpoint
from tests.models.heads.tiny_heads import BLOCK_CONFIGS, EAGLE3
from tests.planted import Plant
from tests.tiny import save_checkpoint
from tests.tiny_families import VOCAB_SIZE

Answers = tuple[list[list[int]], Any]  # output ids of all requests, and the drafter


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return load_checkpoint(save_checkpoint("llama-attention-bias", tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def backend(checkpoint):
    return TorchBackend.load(checkpoint, max_rows=ROWS)


@pytest.fixture(scope="module")
def plain(backend):
    return run_engine(backend, None, PLAIN)[0]


@pytest.fixture
def eagle3(checkpoint, backend, tmp_path) -> Callable[[int], Later]:
    """Makes a checked eagle3 drafter with the random head of a number."""

    def make(seed: int) -> Later:
        folder = tmp_path / str(seed)
        write_head(random_checkpoint(EAGLE3, seed), folder, "sglang")
        options = eagles.EagleOptions(str(folder))
        drafter = Later(eagles.Against3.load(options, eagles.target_of(checkpoint, backend)))
        drafter.backend = backend
        return drafter

    return make


@pytest.fixture
def dspark(checkpoint, backend, plain, tmp_path) -> Callable[[int], Later]:
    """Makes a checked dspark drafter; the heads know the answers, so that whole paths are accepted."""

    def make(seed: int) -> Later:
        head = blocks.knowing_head(plain)
        arguments = ("dspark", checkpoint, backend, DraftSampling.COUPLED, tmp_path / str(seed))
        return blocks.checked_drafter(*arguments, head=head)

    return make


def run_with_swaps(backend: TorchBackend, drafter: Any, others: Iterator[Later], every: int) -> Answers:
    """The answers of requests while the head is replaced again and again, after some steps each time."""
    name = drafter.name
    engine = new_engine(
        backend,
        Tokenizer(),
        Limits(VOCAB_SIZE, 128, 9, ROWS),
        num_pages=100,
        controller=Plans(DraftPlan(name, 3), DraftPlan(name, 8, 3), PLAIN),
        drafters={name: drafter},
    )
    added = [engine.add_request(ids, params)[0] for ids, params in list(all_requests())[:7]]
    steps = 0
    while engine.has_unfinished:
        engine.step()
        steps += 1
        if steps % every == 0:
            engine.replace_head(name, next(others).unbound)
    assert not any(request.error for request in added)
    failed = [request for request in added if request.failed_drafters]
    assert not failed, "a tree was not that of the head in use"
    return [request.output_token_ids for request in added], drafter


@torch.inference_mode()
def test_every_tree_after_a_swap_is_the_new_heads_and_no_byte_changes(backend, eagle3, plain):
    others = (eagle3(seed) for seed in cycle((4, 5)))
    outputs, drafter = run_with_swaps(backend, eagle3(3), others, every=3)
    assert outputs == plain
    assert drafter.compared > 20


@torch.inference_mode()
def test_parallel_heads_are_replaced_too(backend, dspark, plain):
    outputs, drafter = run_with_swaps(backend, dspark(3), (dspark(seed) for seed in cycle((4, 5))), every=2)
    assert outputs == plain
    assert drafter.compared > 10
    assert drafter.accepted > 20


@torch.inference_mode()
def test_keys_and_values_of_the_old_head_would_be_noticed_though_no_byte_changes(
    backend, eagle3, plain, plant: Plant
):
    plant(SharedPages, "replace_owner", lambda self, owner, successor: None)
    with pytest.raises(AssertionError, match="not that of the head in use"):
        run_with_swaps(backend, eagle3(3), (eagle3(4) for _ in cycle([0])), every=3)
    plant.assert_ran()


@torch.inference_mode()
def test_a_swap_that_takes_the_targets_pool_too_would_change_bytes(backend, dspark, plain, plant: Plant):
    def all_pools(self: KVCache, owner: Any, successor: Any) -> None:
        self._pools = [(successor, pool) for _, pool in self._pools]

    plant(KVCache, "replace_owner", all_pools)
    outputs, _ = run_with_swaps(backend, dspark(3), (dspark(4) for _ in cycle([0])), every=1)
    plant.assert_ran()
    assert outputs != plain


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> Loaded:
    """An engine with a head, made as the server makes it."""
    model, head = save_model(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("head")
    write_head(random_checkpoint(EAGLE3), head, "sglang")
    options = {"backend": "torch", "threads": 1, "max_model_len": 200}
    speculative = {"method": "eagle3", "model": str(head), "any_target": True}
    return build_engine(EngineConfig.from_options(model=model, speculative_config=speculative, **options))


def test_a_head_that_cannot_take_over_is_refused_by_name_and_the_present_one_stays(loaded, tmp_path):
    def folder(name: str, config: Any) -> Path:
        write_head(random_checkpoint(config), tmp_path / name, "sglang" if config is not DFLASH else "vllm")
        return tmp_path / name

    DFLASH = BLOCK_CONFIGS["dflash"]
    for method, path, message in (
        ("eagle3", folder("wide", replace(EAGLE3, head_dim=16)), "head_dim is 16, not 14"),
        ("eagle3", folder("short", replace(EAGLE3, max_position=64)), "longest is 64, not 256"),
        ("eagle3", folder("layers", replace(EAGLE3, feature_layers=(3, 1))), "feature_layers is"),
        ("eagle3", folder("block", DFLASH), "set method to 'dflash'"),
        ("eagle3", tmp_path / "nowhere", "There is no draft head"),
        ("ngram", folder("good", EAGLE3), "not configured, or reads no head"),
    ):
        with pytest.raises(PacelineError, match=message):
            loaded.engine.replace_head(method, loaded.load_head(method, path))
    with pytest.raises(PacelineError, match="no drafter medusa is loaded"):
        loaded.engine.replace_head("medusa", loaded.load_head("eagle3", tmp_path / "good"))
    with pytest.raises(PacelineError, match="ngram has no head that can be replaced"):
        loaded.engine.replace_head("ngram", loaded.load_head("eagle3", tmp_path / "good"))
    loaded.engine.replace_head("eagle3", loaded.load_head("eagle3", tmp_path / "good"))
    llm = LLM.from_engine(loaded.engine, loaded.tokenizer)
    (output,) = llm.generate([list(range(3, 40))], use_tqdm=False)
    assert output.metrics.speculative.num_draft_tokens > 0
    assert output.metrics.speculative.failed_drafters == []
