"""The torch runner of heads: slots in pages are the slots of one whole sequence."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.backends.torch.head_runner import TorchHeadRunner
from paceline.models.transformer.attention import attend
from tests.models.heads.driver import drive_heads, run_heads
from tests.models.heads.tiny_heads import CONFIGS, VOCAB, random_shared, torch_head

LENGTH = 41
KINDS = ("eagle3", "all flags", "eagle with bias")


def make_runner(name: str) -> TorchHeadRunner:
    return TorchHeadRunner(torch_head(CONFIGS[name], random_shared()).requires_grad_(False), max_rows=64)


def inputs(runner: TorchHeadRunner, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((LENGTH, runner.head.config.feature_width), dtype=np.float32)
    return features, rng.integers(0, VOCAB, LENGTH)


@torch.inference_mode()
def whole(runner: TorchHeadRunner, states: torch.Tensor, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits and fed back states of one sequence in one go, without pages."""
    count = len(tokens)
    mask = torch.ones(count, count, dtype=torch.bool).tril()
    outputs = runner.head(
        states, torch.tensor(tokens), torch.arange(count), lambda *heads: attend(*heads, mask)
    )
    return runner.head.logits(outputs).numpy(), runner.head.feed_back(outputs).numpy()


def fused(runner: TorchHeadRunner, features: np.ndarray) -> torch.Tensor:
    return runner.head.fuse(torch.from_numpy(features))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("chunk", [1, 7, LENGTH])
def test_chunks_are_the_whole_sequence(name, chunk):
    runner = make_runner(name)
    (request,) = drive_heads(runner, pages_each=4)
    features, tokens = inputs(runner)
    outputs = [
        run_heads([request.ask(features[at : at + chunk], tokens[at : at + chunk])], from_target=True)
        for at in range(0, LENGTH, chunk)
    ]
    logits, states = whole(runner, fused(runner, features), tokens)
    np.testing.assert_allclose(np.concatenate([o.logits for o in outputs]), logits, atol=2e-5)
    np.testing.assert_allclose(np.concatenate([o.states for o in outputs]), states, atol=2e-5)


@pytest.mark.parametrize("name", KINDS)
def test_every_node_of_a_tree_is_the_end_of_its_own_path(name):
    runner = make_runner(name)
    request, other = drive_heads(runner, pages_each=4, count=2)
    features, tokens = inputs(runner)
    run_heads([request.ask(features, tokens), other.ask(features[:5], tokens[:5])], from_target=True)
    own = np.random.default_rng(2).standard_normal((6, runner.head.config.hidden_size), dtype=np.float32)
    nodes, parents = [5, 9, 7, 5, 1, 30], [-1, -1, 0, 0, 1, 3]
    other_states = own[:2] * 3
    output = run_heads(
        [other.ask(other_states, [8, 8]), request.ask(own, nodes, parents)], from_target=False, keep=False
    )
    for node in range(len(nodes)):
        path, at = [], node
        while at >= 0:
            path.insert(0, at)
            at = parents[at]
        states = torch.cat((fused(runner, features), torch.from_numpy(own[path])))
        logits, fed_back = whole(runner, states, [*tokens, *(nodes[n] for n in path)])
        np.testing.assert_allclose(output.logits[2 + node], logits[-1], atol=2e-5)
        np.testing.assert_allclose(output.states[2 + node], fed_back[-1], atol=2e-5)


def test_outputs_are_those_of_the_wanted_rows_and_kv_index_0_is_never_read():
    runner = make_runner("eagle3")
    (request,) = drive_heads(runner, pages_each=4)
    features, tokens = inputs(runner)
    for stored in (*request.pool.cache.keys, *request.pool.cache.values):
        stored[:] = float("nan")  # what no slot was written to
    output = run_heads([request.ask(features, tokens)], from_target=True, outputs=[3, LENGTH - 1])
    logits, _ = whole(runner, fused(runner, features), tokens)
    np.testing.assert_allclose(output.logits, logits[[3, LENGTH - 1]], atol=2e-5)
    assert output.states.shape == (2, runner.head.config.hidden_size)


def test_a_pool_takes_bytes_per_page_for_each_page():
    runner = make_runner("eagle3")
    assert runner.make_pool(3).bytes_per_page == runner.bytes_per_page() == 2 * 16 * 2 * 14 * 4
