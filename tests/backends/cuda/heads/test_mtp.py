"""mtp blocks with a layer of the target's family compute what the torch runner computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.backends.heads import HeadRunner
from paceline.backends.options import BackendOptions
from paceline.backends.torch.backend import TorchBackend
from paceline.backends.torch.head_runner import TorchLayerHeadRunner
from paceline.control.controller import FixedController
from paceline.core.params import SamplingParams
from paceline.core.trees import PLAIN, DraftPlan
from paceline.draft.base import DraftSampling, Target
from paceline.draft.heads.mtp import MtpDrafter, MtpOptions
from paceline.engine.admission import Limits
from paceline.models.checkpoint import Checkpoint
from paceline.models.heads.mtp import mtp_head
from paceline.models.registry import load_checkpoint
from tests.backends.cuda.test_backend import make, needs_gpu
from tests.draft import mimo
from tests.draft.mimo import DEEPSEEK, QWEN, random_with_block
from tests.engines import AnyDrafter, new_engine
from tests.models.heads.driver import drive_heads, run_heads
from tests.tiny import kept
from tests.tiny_families import VOCAB_SIZE
from tests.toy import ToyTokenizer, drain

FAMILIES = {"deepseek-v3": DEEPSEEK, "qwen3-next": QWEN, "qwen3-5": QWEN, "glm4-moe": DEEPSEEK}
# interpreted, one takes many seconds
TRIED = tuple(FAMILIES) if torch.cuda.is_available() else ("deepseek-v3", "qwen3-next")
ROWS = 32
LENGTH, NODES, PARENTS = 3, [5, 9, 7], [-1, -1, 0]


def slots(runner: HeadRunner, width: int) -> np.ndarray:
    """Logits and states of slots over features, of those of a tree after them, and of one slot alone."""
    rng = np.random.default_rng(1)
    features = rng.standard_normal((LENGTH, width), dtype=np.float32)
    own = rng.standard_normal((len(NODES), width), dtype=np.float32)
    (request,) = drive_heads(runner, pages_each=2)
    first = run_heads([request.ask(features, range(3, 3 + LENGTH))], from_target=True)
    tree = run_heads([request.ask(own, NODES, PARENTS)], from_target=False, keep=False)
    alone = run_heads([request.ask(own[:1], NODES[:1])], from_target=False)
    found = (first, tree, alone)
    return np.concatenate([np.concatenate((own.logits, own.states), axis=1) for own in found])


def with_block(family: str) -> Path:
    """A folder with a model that has a block."""
    made_by = Path(mimo.__file__).read_text()
    return kept(f"{family}-mtp", lambda folder: random_with_block(family, FAMILIES[family], folder), made_by)


@pytest.mark.parametrize("family", TRIED)
def test_slots_of_a_block_are_those_of_torch(family: str, device: torch.device, dtype: torch.dtype) -> None:
    from paceline.backends.cuda.heads.head_runner import CudaHeadRunner
    from paceline.backends.cuda.heads.head_weights import load_head_weights
    from paceline.backends.cuda.weights.loading import load_checkpoint_weights

    checkpoint = load_checkpoint(with_block(family))
    head, kind = mtp_head(checkpoint.config, checkpoint.mtp), str(dtype).removeprefix("torch.")
    weights = load_checkpoint_weights(checkpoint, device, kind, "none")
    runner = CudaHeadRunner(load_head_weights(head, weights), max_rows=16)
    ours = slots(runner, checkpoint.config.hidden_size)
    reference = TorchLayerHeadRunner.load(head, TorchBackend.load(checkpoint, max_rows=16), 16)
    theirs = slots(reference, checkpoint.config.hidden_size)
    assert np.linalg.norm(ours - theirs) / np.linalg.norm(theirs) < 0.02
    assert np.abs(theirs).max() > 1
    if torch.cuda.is_available():
        assert np.array_equal(ours[LENGTH], ours[-1])  # a row of a tree is that row alone


@needs_gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_of_a_block_on_the_device_change_no_token(
    family: str, temperature: float, device: torch.device, dtype: torch.dtype
) -> None:
    checkpoint = load_checkpoint(with_block(family))

    def outputs(drafts: bool) -> list[list[int]]:
        """What five requests give together, with drafts or without."""
        backend, drafters = make(checkpoint, device, dtype), dict[str, AnyDrafter]()
        if drafts:
            drafters["mtp"] = MtpDrafter.load(MtpOptions(), _target(checkpoint, backend))
        controller = FixedController(DraftPlan("mtp", 3) if drafts else PLAIN)
        engine = new_engine(
            backend,
            ToyTokenizer(),
            Limits(VOCAB_SIZE, 96, 4, ROWS),
            num_pages=60,
            drafters=drafters,
            controller=controller,
        )
        added = []
        for number in range(5):
            prompt = np.random.default_rng(number).integers(2, VOCAB_SIZE, 3 + 5 * number).tolist()
            params = SamplingParams(temperature=temperature, seed=number, max_tokens=20)
            added.append(engine.add_request(prompt, params)[0])
        drain(engine, scribble=False)
        for request in added:
            assert request.error is None
            assert not request.failed_drafters
            assert bool(request.speculative.num_draft_tokens) == drafts
        return [request.output_token_ids for request in added]

    assert outputs(True) == outputs(False)


def _target(checkpoint: Checkpoint, backend) -> Target:  # type: ignore[no-untyped-def]
    options = BackendOptions(backend="cuda")
    own = checkpoint.config, ToyTokenizer(), options, backend, ROWS, DraftSampling.COUPLED
    return Target(*own, mtp=checkpoint.mtp)
