"""An assistant computes on a GPU what torch computes, over the keys and values of the same target."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.backends.load import load_assistant_runner
from paceline.backends.torch.backend import TorchBackend
from paceline.core.forward import ForwardBatch
from paceline.core.trees import PLAIN
from paceline.draft.heads.assistant import AssistantDrafter
from paceline.draft.heads.head_options import HeadOptions
from paceline.models.heads.assistant import load_assistant
from paceline.models.registry import load_checkpoint
from tests.backends.cuda.test_backend import make, needs_gpu
from tests.backends.driver import Driven, drive
from tests.draft.heads import test_assistant
from tests.draft.heads.test_assistant import PLANS, random_assistant, target_of
from tests.draft.heads.test_eagle_cpu import run_engine
from tests.tiny import kept, random_model
from tests.tiny_families import VOCAB_SIZE

LENGTH = 12  # longer than a window


def batch_of(requests: list[Driven], tokens: list[int], counts: list[int]) -> ForwardBatch:
    """A pass over some tokens after the committed ones of each request."""
    contexts = np.array([request.context_length for request in requests], np.int32)
    return ForwardBatch(
        tokens=np.array(tokens, np.int32),
        positions=np.repeat(contexts, counts),
        parents=np.full(len(tokens), -1, np.int32),
        row_offsets=np.cumsum([0, *counts], dtype=np.int32),
        context_lengths=contexts,
        page_tables=np.stack([request.pages for request in requests]),
        logit_rows=np.arange(len(tokens), dtype=np.int32),
        pool=requests[0].pool,
    )


def beside_target(is_ordered: bool) -> Path:
    """A folder with an assistant and its target."""
    ordered = {"use_ordered_embeddings": True, "num_centroids": VOCAB_SIZE, "centroid_intermediate_top_k": 50}

    def save(folder: Path) -> None:
        model = random_model("gemma4-moe")
        own = random_assistant(model, "Gemma4", **(ordered if is_ordered else {}))
        own.save_pretrained(folder / "own")
        model.save_pretrained(folder / "target")

    made_by = Path(__file__).read_text() + Path(test_assistant.__file__).read_text()
    return kept(f"assistant-{'clusters' if is_ordered else 'all'}", save, made_by)


@pytest.mark.parametrize("is_ordered", [False, True], ids=["all tokens", "clusters"])
def test_steps_are_those_of_torch(is_ordered: bool, device: torch.device, dtype: torch.dtype) -> None:
    """Two requests of different lengths, the second with two nodes of a tree."""
    folder = beside_target(is_ordered)
    target, assistant = load_checkpoint(folder / "target"), load_assistant(folder / "own")
    generator = np.random.default_rng(3)
    states = generator.standard_normal((3, target.config.hidden_size)).astype(np.float32)
    backends, outputs = (make(target, device, dtype), TorchBackend.load(target)), []
    heads = [shape.num_kv_heads * shape.head_dim for shape in target.config.layer_shapes]
    stored = generator.standard_normal((2, len(heads), 32, max(heads))).astype(np.float32)
    for backend in backends:
        requests = drive(backend, pages_each=1, count=2)
        for request, length in zip(requests, (LENGTH, 3), strict=True):
            request.context_length = length
        fill(requests[0].pool, torch.from_numpy(stored))
        runner = load_assistant_runner(assistant, backend)
        outputs.append(runner.run(batch_of(requests, [5, 9, 11], [1, 2]), states))
    ours, theirs = outputs
    scored = np.isfinite(theirs.logits) & np.isfinite(ours.logits)
    assert scored.sum() >= 3 * (48 if is_ordered else VOCAB_SIZE)
    assert np.isfinite(ours.logits).sum() == np.isfinite(theirs.logits).sum()
    difference = np.abs(ours.logits[scored] - theirs.logits[scored])
    assert np.median(difference) < 0.05
    assert difference.max() < 0.5
    np.testing.assert_allclose(ours.states, theirs.states, atol=0.3)
    assert np.median(np.abs(ours.states - theirs.states)) < 0.02


@needs_gpu
def test_same_tokens_with_chains_and_trees(tmp_path: Path, device: torch.device, dtype: torch.dtype) -> None:
    model = random_model("gemma4")
    random_assistant(model, "Gemma4").save_pretrained(tmp_path / "own")
    model.save_pretrained(tmp_path / "target")
    checkpoint = load_checkpoint(tmp_path / "target")
    backend = make(checkpoint, device, dtype)
    options = HeadOptions(model=str(tmp_path / "own"))
    drafter = AssistantDrafter.load(options, target_of(checkpoint, backend))
    added, _ = run_engine(backend, drafter, *PLANS, rows=24, max_num_seqs=4)
    expected, _ = run_engine(backend, None, PLAIN, rows=24, max_num_seqs=4)
    assert [one.output_token_ids for one in added] == [one.output_token_ids for one in expected]
    assert sum(one.speculative.num_draft_tokens for one in added) > 100
    grouped, _ = run_engine(backend, drafter, *PLANS, rows=24, max_num_seqs=4, num_window_pages=24)
    assert [one.output_token_ids for one in grouped] == [one.output_token_ids for one in expected]
    drafted, accepted = (
        [sum(getattr(one.speculative, name) for one in run) for run in (added, grouped)]
        for name in ("num_draft_tokens", "num_accepted_draft_tokens")
    )
    assert drafted[0] == drafted[1]
    assert accepted[0] == accepted[1]  # the assistant reads the same keys and values


def fill(pool: object, stored: torch.Tensor) -> None:
    """Write random keys and values of all layers."""
    layers = range(stored.shape[1])
    for layer in layers:
        if hasattr(pool, "layer"):
            parts = pool.layer(layer)
        else:
            parts = pool.cache.keys[layer][0], pool.cache.values[layer][0]  # type: ignore[attr-defined]
        for own, given in zip(parts, stored[:, layer], strict=True):
            own.copy_(given[:, : own[0].numel()].view(own.shape))
