"""The passes of a parallel head: which kernels run, in which order, over which buffers.

features ─ norms ─ fc ─ norm ─> c ─> keys and values of every layer      once per committed token
anchor, MASK, ... ─ layers ─> logits of all slots                        one pass per block
logits of a slot, token before it ─ Markov head ─> logits of its guess
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.backends.cuda.block_weights import BlockWeights
from paceline.backends.cuda.kernels.attention import tile_height
from paceline.backends.cuda.kernels.block_rows import (
    Anchors,
    SlotRows,
    add_markov,
    spare_pages,
    write_block_rows,
)
from paceline.backends.cuda.kernels.draft import norm_rows
from paceline.backends.cuda.kernels.heads import project_heads
from paceline.backends.cuda.kernels.linear import project
from paceline.backends.cuda.kernels.matrix import Scratch, padded_rows, scratch_for
from paceline.backends.cuda.kernels.residual import plain
from paceline.backends.cuda.model import run_layers, run_lm_head
from paceline.backends.cuda.workspace import Pool, Room, Workspace, make_workspace


@dataclass(frozen=True)
class BlockWorkspace:
    """The buffers of passes, allocated once because captured graphs hold their addresses."""

    fused: torch.Tensor  # [context rows, padded features]
    states: torch.Tensor  # float32 [context rows, padded hidden]
    context: torch.Tensor  # [context rows, padded hidden] what all layers read
    ones: torch.Tensor  # float32 [context rows, 1]
    no_query: torch.Tensor  # [context rows, 0, head_dim] the context has no queries
    scratch: Scratch  # of the context's products
    slots: SlotRows
    layers: Workspace  # its logits are those of all slots
    logits: torch.Tensor  # float32 [requests, draft vocabulary] of one slot of each block


def make_block_workspace(
    weights: BlockWeights, pool: Pool, context_rows: int, requests: int, longest: int, page_size: int
) -> BlockWorkspace:
    """Buffers for passes over this many rows of the context, and blocks, of at most `longest` tokens."""
    config, block, model = weights.config, weights.block, weights.model
    device, dtype, rows = model.device, model.dtype, padded_rows(context_rows)
    assert weights.fusion.matrix is not None
    height = tile_height(config.num_heads, config.num_kv_heads)
    tiles, pages = -(-block.size // height), -(-longest // page_size) + spare_pages(block.size, page_size)

    def integers(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    slots = SlotRows(
        block.size,
        height,
        block.mask_token_id,
        block.layers[0].causal,
        config.max_position,
        pool.num_pages,
        page_size,
        integers(5, requests * block.size),
        integers(3, requests * tiles),
        integers(requests, pages),
    )
    return BlockWorkspace(
        torch.zeros((rows, weights.fusion.matrix.depth), dtype=dtype, device=device),
        torch.zeros((rows, len(weights.context_norm)), device=device),
        torch.zeros((rows, len(weights.context_norm)), dtype=dtype, device=device),
        torch.ones((rows, 1), device=device),
        torch.zeros((rows, 0, config.head_dim), dtype=dtype, device=device),
        scratch_for(weights.matrices, rows, device),
        slots,
        make_workspace(model, Room.of(requests * block.size, longest + block.size)),
        torch.zeros((requests, config.draft_vocab_size), device=device),
    )


def write_context(
    weights: BlockWeights,
    workspace: BlockWorkspace,
    features: torch.Tensor,
    sources: torch.Tensor | None,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    pool: Pool,
) -> None:
    """Write keys and values of tokens at `positions` [rows] to their KV slots `slot_mapping` [rows].

    Row r reads the row sources[r] of the target's features, or r without `sources`.
    """
    config, fusion, rows = weights.config, weights.fusion, len(positions)
    assert fusion.matrix is not None
    size, states, ones = config.feature_width // fusion.groups, workspace.states, workspace.ones
    norm_rows(features, sources, fusion.norm, fusion.eps, size, workspace.fused, rows, fusion.groups)
    project(plain(workspace.fused, ones), fusion.matrix, states, rows, workspace.scratch)
    hidden, eps = config.hidden_size, config.rms_norm_eps
    norm_rows(states, None, weights.context_norm, eps, hidden, workspace.context, rows)
    context = plain(workspace.context, ones)
    for layer, keys, values in zip(weights.model.layers, pool.keys, pool.values, strict=True):
        matrix, rotation, norms = weights.context_matrix(layer), layer.rotation, layer.head_norms
        into = workspace.no_query, keys, values, workspace.scratch
        project_heads(context, matrix, positions, slot_mapping, rotation, norms, *into, head_eps=eps)


def run_blocks(
    weights: BlockWeights, workspace: BlockWorkspace, anchors: Anchors, given_pages: int, pool: Pool
) -> None:
    """Run the blocks behind these anchors; `workspace.layers.logits` has those of their slots.

    Request r's slots are rows r * size and following. `given_pages` are those of a request's page table.
    """
    requests, slots, layers = len(anchors.pages_begin), workspace.slots, workspace.layers
    write_block_rows(anchors, given_pages, slots, requests)
    rows = requests * slots.size
    run_layers(weights.model, layers, slots.lines[0, :rows], slots.tables(requests), pool, slots.page_size)
    run_lm_head(weights.model, layers, layers.attention_input, rows)


def slot_logits(
    weights: BlockWeights, workspace: BlockWorkspace, slot: int, previous: torch.Tensor
) -> torch.Tensor:
    """Logits [requests, draft vocabulary] of this slot of each block, after the tokens `previous`."""
    requests, size, markov = len(previous), workspace.slots.size, weights.markov
    base = workspace.layers.logits[: requests * size].view(requests, size, -1)[:, slot]
    if markov is None:
        return base
    add_markov(base, previous, markov.before, markov.after, workspace.logits)
    return workspace.logits
