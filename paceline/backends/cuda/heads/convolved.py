"""The layers of DFlash2 over block slots, with convolutions before and after attention and MLP.

Convolutions read normed rows, and the output of a sublayer before it is added to the residual stream. So
norms and additions are separate kernels here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.backends.cuda.heads.block_weights import BlockWeights, Convolution
from paceline.backends.cuda.kernels.attention.heads import project_heads
from paceline.backends.cuda.kernels.attention.row_tables import RowTables
from paceline.backends.cuda.kernels.drafting.convolution import convolve_slots
from paceline.backends.cuda.kernels.drafting.draft_inputs import norm_rows
from paceline.backends.cuda.kernels.products.linear import gate_up, project
from paceline.backends.cuda.kernels.products.matrix import Normed, Scratch, padded_rows, scratch_for
from paceline.backends.cuda.kernels.residual import plain
from paceline.backends.cuda.native.decode_attention import attend
from paceline.backends.cuda.passes.kv_pool import Pool
from paceline.backends.cuda.passes.workspace import Workspace
from paceline.backends.cuda.weights.vocabulary import embed_tokens


@dataclass(frozen=True)
class ConvolvedBuffers:
    """The buffers of these layers besides a Workspace."""

    corrections: torch.Tensor  # float32 [rows, padded corrections]
    added: torch.Tensor  # float32 [rows, padded hidden] what a sublayer gives
    ones: torch.Tensor  # float32 [rows, 1]
    scratch: Scratch


def make_convolved_buffers(weights: BlockWeights, max_rows: int) -> ConvolvedBuffers:
    """Buffers for passes of at most `max_rows` slots."""
    rows, device = padded_rows(max_rows), weights.model.device
    width = weights.convolutions[0][0].corrections.padded_width
    return ConvolvedBuffers(
        torch.zeros((rows, width), device=device),
        torch.zeros((rows, weights.model.hidden), device=device),
        torch.ones((rows, 1), device=device),
        scratch_for(weights.matrices, rows, device),
    )


def run_convolved_layers(
    weights: BlockWeights,
    workspace: Workspace,
    buffers: ConvolvedBuffers,
    tokens: torch.Tensor,
    tables: RowTables,
    pool: Pool,
    page_size: int,
) -> Normed:
    """Run the slots `tokens` [rows] through all layers. Returns what the LM head reads."""
    model, rows, eps = weights.model, len(tokens), weights.config.rms_norm_eps
    hidden, scratch, ones, added = workspace.hidden, buffers.scratch, buffers.ones, buffers.added
    size, slots = weights.config.hidden_size, weights.block.size
    normed, convolved = workspace.attention_input.rows, workspace.feed_forward_input.rows
    kinds = slots, size, weights.block.convolution_group

    def enter(norm: torch.Tensor | None, convolution: Convolution) -> Normed:
        """The convolved norm, input of a sublayer."""
        norm_rows(hidden, None, norm, eps, size, normed, rows)
        project(plain(normed, ones), convolution.corrections, buffers.corrections, rows, scratch)
        known = convolution.kernels, buffers.corrections
        convolve_slots(normed, *known, convolved, rows, *kinds, is_output=False)
        return plain(convolved, ones)

    def leave(convolution: Convolution) -> None:
        """Add the convolved output of a sublayer."""
        known = convolution.kernels, buffers.corrections
        convolve_slots(added, *known, hidden, rows, *kinds, is_output=True)

    embed_tokens(tokens, model.embedding, hidden, model.norm, workspace.attention_input)
    layers = zip(model.layers, weights.convolutions, pool.keys, pool.values, strict=True)
    for layer, (around_attention, around_mlp), keys, values in layers:
        read = enter(layer.attention_norm, around_attention)
        where = tables.positions, tables.slot_mapping, layer.rotation, layer.head_norms
        project_heads(read, layer.qkv, *where, workspace.query, keys, values, scratch, eps)
        attention_output = workspace.attention_output
        attend(workspace.query, keys, values, tables, None, page_size, attention_output, workspace.attention)
        project(plain(attention_output, ones), layer.output, added, rows, scratch)
        leave(around_attention)
        read = enter(layer.feed_forward_norm, around_mlp)
        gate_up(read, layer.gate_up, workspace.activated, rows, scratch)
        project(plain(workspace.activated, ones), layer.down, added, rows, scratch)
        leave(around_mlp)
    norm_rows(hidden, None, model.norm, eps, size, normed, rows)
    return plain(normed, ones)
