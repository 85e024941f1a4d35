"""The passes of a parallel head: the kernels for context, blocks and slot logits.

features ─ norms ─ fc ─ norm ─> c ─> keys and values of every layer      once per committed token
anchor, MASK, ... ─ layers ─> logits of all slots                        one pass per block
logits of a slot, previous token ─ Markov head or pair selector ─> corrected logits of the slot
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.backends.cuda.heads.block_weights import BlockWeights
from paceline.backends.cuda.heads.convolved import (
    ConvolvedBuffers,
    make_convolved_buffers,
    run_convolved_layers,
)
from paceline.backends.cuda.kernels.attention.heads import project_heads
from paceline.backends.cuda.kernels.attention.paged_attention import tile_height
from paceline.backends.cuda.kernels.drafting.block_rows import (
    Anchors,
    SlotRows,
    add_markov,
    spare_pages,
    write_block_rows,
)
from paceline.backends.cuda.kernels.drafting.draft_inputs import norm_rows
from paceline.backends.cuda.kernels.products.linear import project
from paceline.backends.cuda.kernels.products.matrix import Scratch, padded_rows, scratch_for
from paceline.backends.cuda.kernels.residual import plain
from paceline.backends.cuda.model import run_layers
from paceline.backends.cuda.passes.kv_pool import Pool
from paceline.backends.cuda.passes.workspace import Room, Workspace, make_workspace
from paceline.backends.cuda.weights.lm_head import run_lm_head


@dataclass(frozen=True)
class BlockWorkspace:
    """The buffers of passes, allocated once because captured graphs hold their addresses."""

    fused: torch.Tensor  # [context rows, padded features]
    states: torch.Tensor  # float32 [context rows, padded hidden]
    context: torch.Tensor  # [context rows, padded hidden] what all layers read
    ones: torch.Tensor  # float32 [context rows, 1]
    no_query: torch.Tensor  # [context rows, 0, head_dim] the context has no queries
    scratch: Scratch  # for products over the context
    slots: SlotRows
    layers: Workspace  # for passes over slots; its logits are those of all slots
    logits: torch.Tensor  # float32 [drafting rows, draft vocabulary] of one slot of each block
    convolved: ConvolvedBuffers | None  # of DFlash2
    selecting: torch.Tensor  # float32 [padded slots, padded rank] a pair selector's projection of outputs
    least: torch.Tensor  # float32 [slots of blocks] the logit of its last candidate


def make_block_workspace(
    weights: BlockWeights,
    pool: Pool,
    context_rows: int,
    requests: int,
    longest: int,
    page_size: int,
    drafting_rows: int = 0,
) -> BlockWorkspace:
    """Buffers for `context_rows` rows of `write_context`, blocks of `requests` requests with contexts of at
    most `longest` tokens, and `drafting_rows` rows of `slot_logits`."""
    config, block, model = weights.config, weights.block, weights.model
    device, dtype, rows = model.device, model.dtype, padded_rows(context_rows)
    assert weights.fusion.matrix is not None
    height = tile_height(config.num_heads, config.num_kv_heads)
    rank = 0 if weights.selector is None else weights.selector.pair.before.shape[1]
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
        torch.zeros((drafting_rows, config.draft_vocab_size), device=device),
        make_convolved_buffers(weights, requests * block.size) if weights.convolutions else None,
        torch.zeros((padded_rows(requests * block.size), rank), device=device),
        torch.zeros(requests * block.size, device=device),
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
    """Run the blocks of these anchors; `workspace.layers.logits` then has the logits of their slots.

    Request r's slots are rows r * size and following. `given_pages`: pages of a request's page table.
    """
    requests, slots, layers = len(anchors.pages_begin), workspace.slots, workspace.layers
    write_block_rows(anchors, given_pages, slots, requests)
    rows = requests * slots.size
    where = slots.lines[0, :rows], slots.tables(requests), pool, slots.page_size
    read = layers.attention_input
    if workspace.convolved is None:
        run_layers(weights.model, layers, *where)
    else:
        read = run_convolved_layers(weights, layers, workspace.convolved, *where)
    run_lm_head(weights.model, layers, read, rows)
    if weights.selector is not None and workspace.convolved is not None:
        scratch = workspace.convolved.scratch
        project(read, weights.selector.projection, workspace.selecting, rows, scratch)
        logits = layers.logits[:rows, : weights.config.draft_vocab_size]
        workspace.least[:rows] = logits.topk(min(weights.selector.candidates, logits.shape[1])).values[:, -1]


def slot_logits(
    weights: BlockWeights, workspace: BlockWorkspace, slot: int, previous: torch.Tensor, requests: int
) -> torch.Tensor:
    """Logits [rows, draft vocabulary] of this slot of each block, given the tokens before, `previous` [rows].

    Requests have equally many rows: the nodes of one level of a tree share a slot.
    """
    size, markov, logits = workspace.slots.size, weights.markov, workspace.logits

    def of_slot(values: torch.Tensor) -> torch.Tensor:
        return values[: requests * size].view(requests, size, *values.shape[1:])[:, slot]

    base = of_slot(workspace.layers.logits)
    if markov is not None:
        add_markov(base, previous, markov.before, markov.after, logits)
        return logits
    if weights.selector is not None:
        pair, scales = weights.selector.pair, of_slot(workspace.selecting)
        add_markov(base, previous, pair.before, pair.after, logits, scales, of_slot(workspace.least))
        return logits
    if len(previous) == requests:
        return base
    logits[: len(previous)].view(requests, -1, base.shape[1]).copy_(base[:, None])
    return logits
