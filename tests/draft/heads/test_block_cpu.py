"""Parallel heads on the cpu backend: the same bytes, and proposals that do not depend on earlier steps."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from paceline.backends.cpu import CpuBackend
from paceline.backends.options import BackendOptions
from paceline.core.trees import PLAIN, DraftPlan
from paceline.draft.base import DraftSampling, Target
from paceline.draft.heads.block import BlockDrafter, DFlashDrafter, DSparkDrafter
from paceline.draft.heads.head_options import EagleOptions
from paceline.draft.hybrid import HybridDrafter, HybridOptions, union
from paceline.models.heads.checkpoint import write_head
from paceline.models.registry import load_checkpoint
from tests.draft.heads.test_eagle_cpu import ROWS, AgainstFresh, run_engine
from tests.draft.model.test_draft_model_cpu import results
from tests.engine.test_exactness_cpu import Tokenizer
from tests.engines import Later
from tests.large import REPEATS
from tests.models.heads.driver import random_checkpoint
from tests.models.heads.tiny_heads import BLOCK_CONFIGS
from tests.tiny import save_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return load_checkpoint(save_checkpoint("qwen2", tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def backend(checkpoint):
    return CpuBackend.load(checkpoint, quantization="int8", threads=1, max_rows=ROWS)


@pytest.fixture(scope="module")
def plain(backend):
    return results(run_engine(backend, None, PLAIN)[0])


class AgainstDFlash(AgainstFresh, DFlashDrafter):
    fresh_kind = BlockDrafter


class AgainstDSpark(AgainstFresh, DSparkDrafter):
    fresh_kind = BlockDrafter


@pytest.mark.parametrize(
    ("name", "setting", "sampling"),
    [
        ("dflash", {"rows": 24, "max_num_seqs": 4}, DraftSampling.COUPLED),
        ("jetspec", {"num_pages": 14}, DraftSampling.GREEDY),
        ("dspark", {"num_pages": 14}, DraftSampling.COUPLED),
        pytest.param("dflash2", {"rows": 24, "max_num_seqs": 4}, DraftSampling.COUPLED, marks=REPEATS),
        ("dflash2", {"num_pages": 14}, DraftSampling.GREEDY),
    ],
    ids=[
        "dflash with chunks and prefix hits",
        "jetspec with preemption",
        "dspark with preemption",
        "dflash2 with chunks and prefix hits",
        "dflash2 with preemption",
    ],
)
def test_proposals_do_not_depend_on_the_past_nor_bytes_on_proposals(
    name,
    setting,
    sampling,
    checkpoint,
    backend,
    plain,
    tmp_path,
):
    write_head(random_checkpoint(BLOCK_CONFIGS[name]), tmp_path, "sglang")
    kind = AgainstDSpark if name == "dspark" else AgainstDFlash
    options = BackendOptions(backend="cpu", quantization="int8", threads=1)
    target = Target(checkpoint.config, Tokenizer(), options, backend, ROWS, sampling)
    drafter = Later(kind.load(EagleOptions(str(tmp_path), min_prob=0.0), target))
    drafter.backend = backend
    plans = [DraftPlan(kind.name, *shape) for shape in ((1,), (4,), (6, 2), (9, 3), (5, 4, 2))]
    added, engine = run_engine(backend, drafter, PLAIN, *plans, times=2, **setting)
    assert results(added) == plain
    assert drafter.compared > 30
    assert engine.scheduler.num_preemptions > 0 if "num_pages" in setting else engine.kv.prefix_hits > 0


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_a_look_up_and_a_block_share_a_tree(name, checkpoint, backend, plain, tmp_path):
    write_head(random_checkpoint(BLOCK_CONFIGS[name]), tmp_path, "sglang")
    fallback = {"method": name, "model": str(tmp_path), "min_prob": 0.0}
    options = HybridOptions(fallback=fallback, combine="tree", confidence=1e6)  # the block is always asked
    machine = BackendOptions(backend="cpu", quantization="int8", threads=1)
    target = Target(checkpoint.config, Tokenizer(), machine, backend, ROWS, DraftSampling.COUPLED)
    unions = []

    def noted(first, second, plan):
        made = union(first, second, plan)
        unions.append((set(first[0]), set(second[0]), set(made[0])))
        return made

    with patch("paceline.draft.hybrid.union", noted):
        added, _ = run_engine(
            backend, Later(HybridDrafter.load(options, target)), DraftPlan("hybrid", 9, 3), num_pages=14
        )
    assert results(added) == plain
    shared = [made for block, copied, made in unions if made & (block - copied) and made & (copied - block)]
    assert len(shared) > 10
