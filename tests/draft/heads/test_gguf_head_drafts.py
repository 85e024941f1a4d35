"""Heads of GGUF files draft what those of their folders draft; a layer that is off by one is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.backends.cpu import CpuBackend
from paceline.backends.options import BackendOptions
from paceline.backends.torch.backend import TorchBackend
from paceline.core.trees import PLAIN, DraftPlan
from paceline.draft.base import DraftSampling, Target
from paceline.draft.heads.block import DFlashDrafter, DSparkDrafter
from paceline.draft.heads.eagle import Eagle3Drafter
from paceline.draft.heads.head_options import EagleOptions
from paceline.errors import ConfigError
from paceline.models.heads import gguf_heads
from paceline.models.registry import load_checkpoint
from tests.draft.model.test_draft_model_cpu import run_engine
from tests.engine.test_exactness_cpu import Tokenizer
from tests.engines import Later
from tests.large import in_turn
from tests.models.heads.gguf_head_files import convert_head
from tests.models.heads.test_gguf_heads import DFLASH, DSPARK, EAGLE3_HEADS, saved
from tests.tiny import save_checkpoint

ROWS = 64


class Noted:
    """Keeps all trees that a drafter proposes."""

    def propose(self, requests, plans):
        proposed = super().propose(requests, plans)
        self.seen.extend(proposed.tree_lists(number) for number in range(len(requests)))
        return proposed


class NotedEagle3(Noted, Eagle3Drafter):
    pass


class NotedDFlash(Noted, DFlashDrafter):
    pass


class NotedDSpark(Noted, DSparkDrafter):
    pass


HEADS = {
    "eagle3": (EAGLE3_HEADS["eagle3"], NotedEagle3),
    "dflash": (DFLASH, NotedDFlash),
    "dspark": (DSPARK, NotedDSpark),
}


BACKENDS = {"cpu": "cpu", "torch": "torch"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return load_checkpoint(save_checkpoint("qwen2", tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request, checkpoint):
    if request.param == "torch":
        return TorchBackend.load(checkpoint, max_rows=ROWS)
    return CpuBackend.load(checkpoint, quantization="int8", threads=1, max_rows=ROWS)


@pytest.fixture(scope="module")
def plain(backend):
    return [one.output_token_ids for one in run_engine(backend, None, PLAIN)[0]]


def target_of(backend, checkpoint) -> Target:
    options = BackendOptions(backend=backend.name, threads=1)
    return Target(checkpoint.config, Tokenizer(), options, backend, ROWS, DraftSampling.COUPLED)


def drafted(path: Path, kind, backend, checkpoint):
    """The requests of a run that drafts with the head at `path`, and all trees that it proposed."""
    options = EagleOptions(str(path), min_prob=0.0)
    drafter = Later(kind.load(options, target_of(backend, checkpoint)))
    drafter.seen = []
    plans = [DraftPlan(kind.name, *shape) for shape in ((1,), (4,), (6, 2))]
    added, _ = run_engine(backend, drafter, PLAIN, *plans)
    assert sum(one.speculative.num_draft_tokens for one in added) > 100
    return added, drafter.seen


@pytest.mark.parametrize(("head", "backend"), in_turn(HEADS, BACKENDS), indirect=["backend"])
def test_drafts_are_those_of_the_folder(tmp_path, plant, checkpoint, backend, plain, head):
    config, kind = head
    folder = saved(tmp_path, config)
    path = convert_head(folder)
    added, ours = drafted(path, kind, backend, checkpoint)
    assert [one.output_token_ids for one in added] == plain
    _, theirs = drafted(folder, kind, backend, checkpoint)
    assert ours == theirs
    right = gguf_heads._feature_layers
    plant(gguf_heads, "_feature_layers", lambda fields: tuple(layer - 1 for layer in right(fields)))
    added, wrong = drafted(path, kind, backend, checkpoint)
    assert [one.output_token_ids for one in added] == plain  # which do not depend on it
    plant.assert_noticed(added, [wrong] * len(added), [theirs] * len(added))


def test_the_method_is_that_of_the_file(tmp_path, checkpoint, backend):
    path = convert_head(saved(tmp_path, DSPARK))
    with pytest.raises(ConfigError, match="is an dspark head, but the method is dflash"):
        DFlashDrafter.load(EagleOptions(str(path)), target_of(backend, checkpoint))
