"""The feed-forward block of a layer: an MLP, or a mixture of experts (kernels/experts/grouped.py).

In families with output norms (kernels/residual.py), its output is normed before it is added. Gemma's E sizes
then add a per-layer embedding (per_layer.py).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from paceline.backends.cuda.kernels.attention.row_tables import RowTables
from paceline.backends.cuda.kernels.experts.grouped import add_experts
from paceline.backends.cuda.kernels.experts.router import has_parts
from paceline.backends.cuda.kernels.products.activations import gate_rows
from paceline.backends.cuda.kernels.products.low_rank import shrink
from paceline.backends.cuda.kernels.products.matrix import Normed
from paceline.backends.cuda.kernels.residual import Residual, add_normed, plain
from paceline.backends.cuda.layers.layer import ExpertNorms
from paceline.backends.cuda.layers.per_layer import project_given
from paceline.backends.cuda.native.many_rows import add_product, gate_up, project
from paceline.backends.cuda.passes.workspace import Activations, ResidualBuffers, Workspace
from paceline.backends.cuda.weights.model_weights import Layer, Weights


def read_next(weights: Weights, to: Activations, index: int) -> tuple[torch.Tensor | None, Normed]:
    """The norm that follows layer `index` (-1: the embedding), and which buffer of `to` it is written to.

    A layer that is only an MLP reads the buffer of MLPs, so that its experts and its shared expert can read
    it while the next layer's input is written.
    """
    following = weights.layers[index + 1 : index + 2]
    if not following:
        return weights.norm, to.attention_input
    reader = to.attention_input if following[0].mixes else to.feed_forward_input
    return following[0].attention_norm, reader


def feed_forward(weights: Weights, index: int, workspace: Workspace, tables: RowTables) -> None:
    """Add the MLP of a layer to the residual stream of the rows of these tables."""
    local, layer = workspace.local, weights.layers[index]
    norm, written = read_next(weights, local, index)
    if weights.residual is None or workspace.residual is None:
        assert norm is not None
        read = workspace.feed_forward_input
        _add_mlps(weights, layer, workspace, tables, read, local.hidden, norm, written)
        return
    residual, rows, after = weights.residual, len(tables.positions), layer.output_norms[1]
    added = _project_mlp(residual, workspace.residual, weights, layer, workspace, tables)
    if layer.per_layer is not None and workspace.per_layer is not None:
        read = workspace.feed_forward_input  # gets the residual stream without a norm
        add_normed(residual, local.hidden, added, after, None, read, rows)
        given, after = (layer.per_layer, index, read, layer.activation), layer.per_layer.norm
        project_given(*given, added, rows, workspace.per_layer, workspace.scratch)
    add_normed(residual, local.hidden, added, after, norm, written, rows, layer.scale)


def _project_mlp(
    residual: Residual,
    buffers: ResidualBuffers,
    weights: Weights,
    layer: Layer,
    workspace: Workspace,
    tables: RowTables,
) -> torch.Tensor:
    """The MLP's output before its output norm: float32 [rows, padded hidden]."""
    read, rows, scratch = workspace.feed_forward_input, len(tables.positions), workspace.scratch
    if layer.expert_norms is not None:
        return _project_normed_experts(residual, buffers, layer, layer.expert_norms, workspace, tables)
    read = workspace.attention_input if residual.is_parallel else read
    if layer.mixture is None:
        change = shrink(layer.adapters.gate_up, read, tables.adapters, workspace.low_rank)
        activated = workspace.activated
        gate_up(read, layer.gate_up, activated, rows, scratch, None, layer.activation, change)
        change = shrink(layer.adapters.down, activated, tables.adapters, workspace.low_rank)
        project(plain(activated, buffers.ones), layer.down, buffers.added, rows, scratch, change)
    else:
        buffers.added[:rows].zero_()
        norms = layer.feed_forward_norm, layer.attention_norm, layer.output_norms[1]
        norm = next(norm for norm in norms if norm is not None)  # of what follows: it is normed elsewhere
        _add_mlps(weights, layer, workspace, tables, read, buffers.added, norm, buffers.unused)
    return buffers.added


def _project_normed_experts(
    residual: Residual,
    buffers: ResidualBuffers,
    layer: Layer,
    norms: ExpertNorms,
    workspace: Workspace,
    tables: RowTables,
) -> torch.Tensor:
    """The same for experts and a shared MLP with norms of their own: `NormedExperts` of torch."""
    rows, scratch, read = len(tables.positions), workspace.scratch, workspace.feed_forward_input
    added, joined, scored = buffers.added, buffers.joined, workspace.attention_input
    assert layer.mixture is not None
    assert layer.shared is not None
    assert workspace.routing is not None
    gate_up(read, layer.shared[0], workspace.activated, rows, scratch, None, layer.activation)
    project(plain(workspace.activated, buffers.ones), layer.shared[1], added, rows, scratch)
    joined[:rows].zero_()
    add_normed(residual, joined, added, norms.shared_output, None, None, rows)
    as_it_is = replace(residual, embedding_scale=1.0)
    for norm, reader in ((norms.experts, read), (norms.router, scored)):
        add_normed(as_it_is, workspace.hidden, None, None, norm, reader, rows)
    added[:rows].zero_()
    written = added, norms.experts, buffers.unused, workspace.routing
    add_experts(layer.mixture, read, tables.slot_mapping, *written, scored=scored)
    add_normed(residual, joined, added, norms.experts_output, None, None, rows)
    return joined


def _add_mlps(
    weights: Weights,
    layer: Layer,
    workspace: Workspace,
    tables: RowTables,
    read: Normed,
    hidden: torch.Tensor,
    norm: torch.Tensor,
    written: Normed,
) -> None:
    """Add the MLP, or the shared and routed experts, of `read` to `hidden`, and prepare `written`."""
    local, shard = workspace.local, weights.shard
    scratch, rows, adapters = workspace.scratch, len(tables.positions), layer.adapters
    dense = layer.shared if layer.mixture else (layer.gate_up, layer.down)
    if dense is not None:
        change = shrink(adapters.gate_up, read, tables.adapters, workspace.low_rank)
        to = local.activated, rows, scratch, local.activated_scales
        gate_up(read, dense[0], *to, layer.activation, change)
        _gate_shared(layer, workspace, read, rows)
        activated, scales = workspace.activated, workspace.activated_scales
        shard.gather([local.activated, local.activated_scales], [activated, scales], rows)
        change = shrink(adapters.down, activated, tables.adapters, workspace.low_rank, scales)
        inputs = shard.local(norm), written, rows, scratch, scales, None, change
        add_product(activated, dense[1], hidden, *inputs)
        shard.gather(written.parts, workspace.attention_input.parts, rows)
    if layer.mixture is not None and workspace.routing is not None:
        # the output projection before them has stored parts of scores: see model.py
        parts = has_parts(layer.mixture.router, rows) and weights.residual is None and layer.mixes
        add_experts(layer.mixture, read, tables.slot_mapping, hidden, norm, written, workspace.routing, parts)


def _gate_shared(layer: Layer, workspace: Workspace, read: Normed, rows: int) -> None:
    """Scale the input of the shared expert's down projection by its sigmoid gate, if it has one."""
    if layer.shared is not None and layer.shared_gate is not None and workspace.gates is not None:
        project(read, layer.shared_gate, workspace.gates, rows, workspace.scratch)
        width = layer.shared[1].depth
        activated = workspace.activated.view(-1)[: rows * width].view(rows, width)
        gate_rows(activated, workspace.gates[:rows, :1])
