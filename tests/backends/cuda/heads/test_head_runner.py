"""Heads on the device compute what the torch runner computes, and their chains are those of single passes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.backends.head_chains import chains_by_passes
from paceline.backends.heads import ChainNoise, HeadRunner
from paceline.backends.torch.head_runner import TorchHeadRunner
from paceline.errors import ConfigError
from tests.backends.cuda.heads.test_block_runner import random_target
from tests.models.heads.driver import DrivenHead, batch_of, drive_heads, random_checkpoint, run_heads
from tests.models.heads.tiny_heads import CONFIGS as ALL
from tests.models.heads.tiny_heads import P_EAGLE, random_shared, torch_head

MASKED = "p-eagle"  # of three layers
CONFIGS = {name: replace(config, max_position=64) for name, config in (*ALL.items(), (MASKED, P_EAGLE))}
# interpreted, a pass takes half a second
KINDS = tuple(CONFIGS) if torch.cuda.is_available() else ("all flags", MASKED)
NODES, PARENTS = [5, 9, 7], [-1, -1, 0]
LENGTH = 4


def make_runner(name: str, device: torch.device, dtype: torch.dtype, seed: int = 3):  # type: ignore[no-untyped-def]
    """A random head beside weights of a target that does not exist otherwise."""
    from paceline.backends.cuda.heads.head_runner import CudaHeadRunner
    from paceline.backends.cuda.heads.head_weights import load_head_weights

    target = random_target(device, dtype)
    return CudaHeadRunner(load_head_weights(random_checkpoint(CONFIGS[name], seed), target), max_rows=16)


def make_reference(name: str) -> TorchHeadRunner:
    ids = random_checkpoint(CONFIGS[name]).draft_ids
    head = torch_head(CONFIGS[name], random_shared()).requires_grad_(False)
    return TorchHeadRunner(head, max_rows=16, target_ids=ids)


def slots(runner: HeadRunner, name: str) -> tuple[DrivenHead, np.ndarray]:
    """A request with computed rows, and the logits and states of a tree after them."""
    rng = np.random.default_rng(1)
    features = rng.standard_normal((LENGTH, CONFIGS[name].feature_width), dtype=np.float32)
    own = rng.standard_normal((len(NODES), CONFIGS[name].hidden_size), dtype=np.float32)
    (request,) = drive_heads(runner, pages_each=2)
    run_heads([request.ask(features, range(3, 3 + LENGTH))], from_target=True, outputs=[])
    tree = run_heads([request.ask(own, NODES, PARENTS)], from_target=False, keep=False)
    return request, np.concatenate((tree.logits, tree.states), axis=1)


@pytest.mark.parametrize("name", KINDS)
def test_rows_of_a_head_are_those_of_torch(name: str, device: torch.device, dtype: torch.dtype) -> None:
    _, ours = slots(make_runner(name, device, dtype), name)
    _, theirs = slots(make_reference(name), name)
    assert np.linalg.norm(ours - theirs) / np.linalg.norm(theirs) < 0.02


def test_a_runner_that_is_replaced_runs_the_other_head_at_the_addresses_of_its_own(
    device: torch.device, dtype: torch.dtype
) -> None:
    """Captured graphs hold these addresses. A head of another shape is refused, and nothing has changed."""
    name = "all flags"
    runner, other = (make_runner(name, device, dtype, seed) for seed in (3, 4))
    expected, addresses = slots(other, name)[1], _addresses(runner)
    if device.type == "cuda":
        slots(runner, name)  # captures its graphs
    assert runner.replaced_by(other) is runner
    assert _addresses(runner) == addresses
    assert np.array_equal(slots(runner, name)[1], expected)
    for wrong in (c for c in CONFIGS if c != name and CONFIGS[c].kind == CONFIGS[name].kind):
        with pytest.raises(ConfigError, match="of another shape than the present one"):
            runner.replaced_by(make_runner(wrong, device, dtype))
        break


def _addresses(runner) -> list[int]:  # type: ignore[no-untyped-def]
    return [matrix.weight.data_ptr() for matrix in runner.weights.matrices]


def test_chains_in_one_graph_are_those_of_single_passes(device: torch.device, dtype: torch.dtype) -> None:
    """The first request is greedy; the second drafts with the target's own noise."""
    name = "all flags"
    runner, ids = make_runner(name, device, dtype), random_checkpoint(CONFIGS[name]).draft_ids
    features = np.random.default_rng(1).standard_normal((4, CONFIGS[name].feature_width), dtype=np.float32)
    first, second = drive_heads(runner, pages_each=2, count=2)
    asked = [first.ask(features[:3], [3, 4, 5]), second.ask(features[3:], [6])]
    batch = batch_of(asked, from_target=True, outputs=[2, 3])
    noise = ChainNoise(np.array([3, 2**63 + 5], np.uint64), np.array([0.0, 0.8]))
    expected = chains_by_passes(runner.run, batch, ids, [1, 2], 0.0, noise)
    found = runner.run_chains(batch, [1, 2], 0.0, noise)
    assert found.lengths.tolist() == expected.lengths.tolist() == [1, 2]
    for request, length in enumerate(expected.lengths):
        assert found.tokens[request, :length].tolist() == expected.tokens[request, :length].tolist()
        np.testing.assert_allclose(
            found.chances[request, :length], expected.chances[request, :length], rtol=1e-4
        )


def test_features_that_a_pool_keeps_are_read_by_their_kv_slots(
    device: torch.device, dtype: torch.dtype
) -> None:
    name = "all flags"
    runner = make_runner(name, device, dtype)
    runner.max_rows = 1  # of what is made ready
    features = torch.randn((1, CONFIGS[name].feature_width), generator=torch.Generator().manual_seed(1))
    features = features.to(dtype).float()  # as the pool has them
    (request,) = drive_heads(runner, pages_each=2)
    given = batch_of([request.ask(features.numpy(), [3])], from_target=True, outputs=[0])
    runner.prepare(given.rows.pool)
    expected = runner.run(given).logits.copy()
    given.rows.pool.features[5] = features[0].to(device)
    kept = replace(given, states=np.empty((0, 0), np.float32), slot_mapping=np.array([5], np.int32))
    assert np.array_equal(runner.run(kept).logits, expected)


def test_masks_read_their_feature_beside_those_that_a_pool_keeps(
    device: torch.device, dtype: torch.dtype
) -> None:
    runner = make_runner(MASKED, device, dtype)
    features = torch.randn((2, CONFIGS[MASKED].feature_width), generator=torch.Generator().manual_seed(1))
    features = features.to(dtype).float()
    (request,) = drive_heads(runner, pages_each=2)
    given = batch_of([request.ask(features.numpy(), [3, 170])], from_target=True, outputs=[0, 1])
    expected = runner.run(given).logits.copy()
    given.rows.pool.features[5] = features[0].to(device)
    masked = replace(given, states=features[1:].numpy(), slot_mapping=np.array([5, -1], np.int32))
    assert np.array_equal(runner.run(masked).logits, expected)


def test_a_chain_ends_where_it_is_unlikely() -> None:
    """Chances of 0.5 are kept; only those of 0.7 are extended. NaN drafts nothing."""
    from paceline.backends.cuda.heads.head_runner import up_to_least

    chances = np.array(
        [[0.9, 0.8, 0.75], [0.9, 0.6, 0.55], [0.9, 0.75, 0.4], [0.4, 0.3, 0.2], [np.nan, 0.9, 0.9]],
        np.float32,
    )
    chains = up_to_least(np.zeros((5, 3), np.int32), chances, [2, 3, 3, 3, 3], 0.5)
    assert chains.lengths.tolist() == [2, 2, 2, 0, 0]
