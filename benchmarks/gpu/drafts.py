"""Speculative steps of `benchmarks gpu`: drafting methods, their shapes, and the bytes a step must read.

Weights are random, so hardly any draft is accepted and requests grow by one token per step. That does
not change the time of a step, which computes all its rows whatever is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from paceline.backends.async_decoding import NgramLookup
from paceline.backends.cuda.backend import PAGE_SIZE
from paceline.backends.cuda.decode.draft_networks import DraftNetwork, HeadNetwork, ModelNetwork
from paceline.backends.cuda.decode.draft_shape import DraftShape, chain_shape, tree_shape
from paceline.backends.cuda.heads.block_runner import CudaBlockRunner
from paceline.backends.cuda.heads.block_weights import make_block_weights
from paceline.backends.cuda.heads.head_weights import make_head_weights
from paceline.backends.cuda.passes.graphs import bucket
from paceline.backends.cuda.passes.kv_pool import Pool
from paceline.backends.cuda.weights.model_weights import Weights
from paceline.models.config import ModelConfig
from paceline.models.heads.config import (
    BlockAttention,
    BlockConfig,
    HeadConfig,
    expected_tensors,
    usual_block_layers,
)
from paceline.models.transformer.blocks import Take

CHAIN = 5  # drafted tokens
BLOCK, BLOCK_LAYERS, MARKOV_RANK = 7, 5, 256  # of a DSpark head: all slots draft
TREE = (32, 3, CHAIN)  # rows including the root, maximum children, levels
DRAFT_VOCABULARY = 32000
IDS = np.arange(DRAFT_VOCABULARY, dtype=np.int32)
LOOK_UP = NgramLookup(2, 4)  # default options of `ngram`

# from requests, number of pages and maximum length to the draft network
MakeDraft = Callable[[int, int, int], DraftNetwork]


@dataclass(frozen=True)
class Drafting:
    """One drafting method for a target."""

    shape: DraftShape
    make: MakeDraft | None  # None: no network
    bytes_read: int  # of the draft's weights, per step
    look_up: NgramLookup | None = None  # None, and no network: plain decoding


def eagle3(target: Weights, shape: DraftShape) -> Drafting:
    """A random one-layer EAGLE-3 head of the target's sizes."""
    config = _head_config(target)
    head = make_head_weights(config, IDS, _random(config, target), target)
    layers = head.config.layers_of(target.config.num_layers)

    def make(requests: int, num_pages: int, longest: int) -> DraftNetwork:
        pool = _pool(num_pages, 1, head.config, target)
        return HeadNetwork(head, pool, layers, shape, requests, longest, PAGE_SIZE)

    once = sum(matrix.weight.nbytes for matrix in head.matrices)
    fusion = head.fusion.matrix
    assert fusion is not None, "an eagle3 head has one"
    return Drafting(shape, make, shape.levels * (once - fusion.weight.nbytes) + fusion.weight.nbytes)


def dspark(target: Weights) -> Drafting:
    """A random DSpark head of the target's sizes, which drafts a chain of a whole block."""
    shape, features = chain_shape(BLOCK), usual_block_layers(target.config.num_layers, BLOCK_LAYERS)
    layers = (BlockAttention(),) * BLOCK_LAYERS
    block = BlockConfig(BLOCK, 0, layers, sample_from_anchor=True, markov_rank=MARKOV_RANK)
    sizes = replace(_head_config(target), kind="dspark", feature_layers=features, qk_norm=True, block=block)
    head = make_block_weights(sizes, IDS, _random(sizes, target), target)

    def make(requests: int, num_pages: int, longest: int) -> DraftNetwork:
        runner = CudaBlockRunner(head, max_rows=bucket(requests) * BLOCK)
        return runner.network(runner.make_pool(num_pages), features, shape, requests, longest, PAGE_SIZE)

    assert head.markov is not None
    markov = BLOCK * head.markov.after.nbytes
    return Drafting(shape, make, sum(matrix.weight.nbytes for matrix in head.matrices) + markov)


def draft_model(target: Weights, draft: Weights, weight_bytes: int) -> Drafting:
    """A smaller model that drafts a chain."""
    shape = chain_shape(CHAIN)

    def make(requests: int, num_pages: int, longest: int) -> DraftNetwork:
        pool = _pool(num_pages, draft.config.num_layers, draft.config, target)
        size = target.config.vocab_size
        return ModelNetwork(draft, pool, shape, requests, longest, PAGE_SIZE, size)

    return Drafting(shape, make, shape.levels * weight_bytes)


def ngram(target: Weights) -> Drafting:
    """A chain looked up in the request's text; it takes the same time whether one is found or not."""
    return Drafting(chain_shape(CHAIN), None, 0, LOOK_UP)


def eagle3_chain(target: Weights) -> Drafting:
    return eagle3(target, chain_shape(CHAIN))


def eagle3_tree(target: Weights) -> Drafting:
    return eagle3(target, tree_shape(*TREE))


def _pool(num_pages: int, layers: int, config: ModelConfig | HeadConfig, target: Weights) -> Pool:
    """Pages for a draft network; their contents do not matter."""
    shape = (layers, num_pages * PAGE_SIZE, config.num_kv_heads, config.head_dim)
    keys, values = (torch.zeros(shape, dtype=target.dtype, device=target.device) for _ in range(2))
    return Pool(num_pages, 0, keys, values)


def _head_config(target: Weights) -> HeadConfig:
    """That of a one-layer EAGLE-3 head of the target's sizes."""
    return HeadConfig.beside(target.config, "eagle3", draft_vocab_size=DRAFT_VOCABULARY)


def _random(config: HeadConfig, target: Weights) -> Take:
    """Random tensors of a head, by name."""
    shapes = dict(expected_tensors(config))
    return lambda name: random_tensor(shapes[name], target.device)


def random_tensor(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """A norm's weight, or a matrix that preserves the scale of its input."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    return torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(shape[1] ** -0.5)
