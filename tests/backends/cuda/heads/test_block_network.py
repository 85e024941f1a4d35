"""A parallel head inside a step drafts what its runner drafts, and leaves the tokens as they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.backends.heads import ChainNoise, HeadBatch
from paceline.core.forward import ForwardBatch, chain_parents
from paceline.models.config import RopeConfig
from paceline.models.heads.config import BlockAttention, BlockConfig, HeadConfig
from paceline.verify.kernels import gumbel_top_k
from tests.backends.cuda.decode.test_decode_loop import LENGTH, LONGEST, PAGE_SIZE, PAGES, ROWS, SEED, Case
from tests.large import repeated
from tests.models.heads.driver import random_checkpoint

SIZES = (60, 40, 32, 32, 2, 1, 16, 64, 1e-5, RopeConfig(500.0), 64)
BLOCK = BlockConfig(3, 59, (BlockAttention(),), sample_from_anchor=True, markov_rank=5)  # over a page border
HEAD = HeadConfig("dspark", *SIZES, feature_layers=(0, 1), qk_norm=True, block=BLOCK)
CHAIN = 2
DFLASH2 = replace(
    HEAD,
    kind="dflash",
    block=replace(
        BLOCK,
        sample_from_anchor=False,
        markov_rank=0,
        convolution_group=8,
        selector_rank=5,
        selector_candidates=6,
    ),
)
NO_MARKOV = replace(HEAD, kind="dflash", block=replace(BLOCK, sample_from_anchor=False, markov_rank=0))


def rows_of(tokens: list[int], first: int, pages: np.ndarray, pool: Any) -> ForwardBatch:
    """A chain of one request whose tokens before `first` are in the pool."""
    return ForwardBatch(
        tokens=np.array(tokens, np.int32),
        positions=np.arange(first, first + len(tokens), dtype=np.int32),
        parents=chain_parents([len(tokens)]),
        row_offsets=np.array([0, len(tokens)], np.int32),
        context_lengths=np.array([first], np.int32),
        page_tables=pages,
        logit_rows=np.empty(0, np.int32),
        pool=pool,
    )


def draft_slots(loop: Any) -> torch.Tensor:
    """The KV slots of the tokens on which the head catches up, of all requests."""
    from paceline.backends.cuda.kernels.step_rows import SLOT_MAPPING

    first, count = ROWS * loop.nodes, ROWS * (CHAIN + 1)
    slots: torch.Tensor = loop.loop_rows.step.lines[SLOT_MAPPING, first : first + count]
    return slots


@pytest.mark.parametrize("temperature", [1.0, *repeated(0.0)])
def test_a_block_in_a_step_drafts_after_the_accepted_tokens(
    temperature: float, device: torch.device, dtype: torch.dtype
) -> None:
    """The first drafted token is made right, so there are two new ones, whose keys and values are written
    from the target's features before the block behind them runs."""
    from paceline.backends.cuda.decode.decode_loop import DecodeLoop
    from paceline.backends.cuda.decode.draft_shape import chain_shape
    from paceline.backends.cuda.heads.block_runner import CudaBlockRunner
    from paceline.backends.cuda.heads.block_weights import load_block_weights

    (right, *_), _ = Case(temperature, device, dtype).run(None, 1)
    case = Case(temperature, device, dtype)
    head = load_block_weights(random_checkpoint(HEAD), case.weights)
    runner = CudaBlockRunner(head, max_rows=6)
    pool, generator = runner.make_pool(PAGES), torch.Generator().manual_seed(9)
    pool.keys.copy_(torch.randn(pool.keys.shape, generator=generator))
    draft = runner.network(pool, (0, 1), chain_shape(CHAIN), ROWS, LONGEST, PAGE_SIZE)
    loop = DecodeLoop(case.weights, case.pool(), case.state, ROWS, PAGE_SIZE, draft)
    draft.target_ids = torch.full((40,), right, dtype=torch.int32, device=device)
    case.state.pages[0] = 2  # what padding must not write to
    loop.begin([1], ROWS, torch.ones(1, 64, device=device))
    assert draft_slots(loop).tolist() == [2 * PAGE_SIZE + LENGTH - 1] + [-1] * 5
    loop.step(ROWS)
    count = int(loop.counts[0])
    assert count == CHAIN
    assert loop.output[0, 0] == right

    pages = case.state.pages[1:].cpu().numpy()
    known = case.state.tokens[1, LENGTH : LENGTH + count + 1].tolist()
    assert draft.features is not None
    features = draft.features[:count].cpu().numpy()
    runner.write_context(HeadBatch(rows_of(known[:-1], LENGTH, pages, pool), features, True))
    blocks = rows_of([known[-1], 59, 59], LENGTH + count, pages[:, : (LENGTH + count) // PAGE_SIZE + 1], pool)
    noise = ChainNoise(np.array([SEED], np.uint64), np.array([temperature]))
    expected = runner.run_chains(blocks, [CHAIN], 0.0, noise)
    draft.target_ids.copy_(head.target_ids)  # type: ignore[arg-type]
    loop.step(ROWS)
    assert loop.drafted(ROWS)[0, 1:].tolist() == expected.tokens[0].tolist()
    assert not loop.counts[1]  # of padding


def expected_tree(runner: Any, shape: Any, root: int, ids: np.ndarray, noise: tuple[float, int]) -> list[int]:
    """The tokens of a tree's nodes by single guesses; `noise`: temperature, and position of the first."""
    (temperature, first), tokens = noise, {0: root}
    for node, depth in enumerate(shape.depths):
        if not (children := shape.children(node)):
            continue
        slot = runner.weights.block.first_guess + depth
        logits = runner.guess(np.array([slot], np.int32), np.array([tokens[node]], np.int32)).logits[0]
        best = np.argsort(-logits)
        if temperature:
            best, scores = np.empty(len(children), np.int64), np.empty(len(children))
            key = np.uint64(SEED), np.uint64(first + depth)
            gumbel_top_k((logits, ids.astype(np.int64)), temperature, key, (best, scores))
        tokens.update(zip(children, ids[best[: len(children)]].tolist(), strict=True))
    return [tokens[node] for node in range(1, len(shape))]


@pytest.mark.parametrize(("config", "temperature"), [(HEAD, 1.0), (NO_MARKOV, 0.0), (DFLASH2, 0.0)])
def test_a_block_in_a_step_drafts_a_tree(
    config: HeadConfig, temperature: float, device: torch.device, dtype: torch.dtype
) -> None:
    """Nodes of a level share a slot; with a Markov head or a pair selector, their logits depend on their own
    tokens."""
    from paceline.backends.cuda.decode.decode_loop import DecodeLoop
    from paceline.backends.cuda.decode.draft_shape import DraftShape
    from paceline.backends.cuda.heads.block_runner import CudaBlockRunner
    from paceline.backends.cuda.heads.block_weights import load_block_weights

    shape = DraftShape((-1, 0, 0, 1, 1, 2))
    case = Case(temperature, device, dtype)
    head = load_block_weights(random_checkpoint(config), case.weights)
    runner = CudaBlockRunner(head, max_rows=6)
    pool, generator = runner.make_pool(PAGES), torch.Generator().manual_seed(9)
    pool.keys.copy_(torch.randn(pool.keys.shape, generator=generator))
    draft = runner.network(pool, (0, 1), shape, ROWS, LONGEST, PAGE_SIZE)
    loop = DecodeLoop(case.weights, case.pool(), case.state, ROWS, PAGE_SIZE, draft)
    root = int(case.state.tokens[1, LENGTH])
    loop.begin([1], ROWS, torch.ones(1, 64, device=device))
    loop.step(ROWS)
    drafted = loop.drafted(ROWS)[0, 1:].tolist()

    pages = case.state.pages[1:, : LENGTH // PAGE_SIZE + 1].cpu().numpy()
    runner.run_blocks(rows_of([root, 59, 59], LENGTH, pages, pool))
    assert head.target_ids is not None
    ids = head.target_ids.cpu().numpy()
    assert drafted == expected_tree(runner, shape, root, ids, (temperature, LENGTH + 1))
