"""The forward pass: launches the kernels of all layers. The host reads no result, so a CUDA graph can capture
the whole pass and replay it for other rows.

A layer is five kernels:

    QKV projection           norm(hidden), bias, RoPE; keys and values go to their KV slots
    attention                over each row's visible KV slots
    output projection        hidden += attention, and the sums of squares for the next norm
    gate, up, SwiGLU         norm(hidden)
    down projection          hidden += MLP, and the sums of squares for the next norm

Variants:

- For some row counts one kernel covers everything from one attention to the next: fused_layer.py.
- In a mixture of experts the last two are four or five kernels: feed_forward.py.
- With tensor parallelism, ranks all-gather the outputs of the last four: shard.py.
- If a row has a LoRA adapter, a shrink kernel precedes each adapted product: kernels/products/low_rank.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from paceline.backends.cuda.kernels.attention.heads import norm_heads, scale_queries
from paceline.backends.cuda.kernels.attention.row_tables import RowTables
from paceline.backends.cuda.kernels.attention.split_heads import split_heads
from paceline.backends.cuda.kernels.experts.router import Scores, has_parts
from paceline.backends.cuda.kernels.products.activations import gate_rows
from paceline.backends.cuda.kernels.products.low_rank import LowRank, shrink
from paceline.backends.cuda.kernels.products.matrix import Matrix
from paceline.backends.cuda.kernels.recurrent.output import NewConvStates, gate
from paceline.backends.cuda.kernels.recurrent.scan import convolve, scan_states
from paceline.backends.cuda.kernels.recurrent.step import step_states
from paceline.backends.cuda.kernels.recurrent.types import recurrent_shape
from paceline.backends.cuda.kernels.residual import add_normed, plain
from paceline.backends.cuda.layers.feed_forward import feed_forward, read_next
from paceline.backends.cuda.layers.latent import late_merge, project_latents, project_values
from paceline.backends.cuda.layers.per_layer import give_inputs
from paceline.backends.cuda.layers.recurrent import RecurrentRows
from paceline.backends.cuda.native.decode_attention import attend
from paceline.backends.cuda.native.fused_layer import LayerBuffers, NextQkv, run_fused_layer
from paceline.backends.cuda.native.many_rows import add_product, project, project_heads
from paceline.backends.cuda.passes.kv_pool import Pool
from paceline.backends.cuda.passes.workspace import Workspace
from paceline.backends.cuda.weights.model_weights import Layer, Weights
from paceline.backends.cuda.weights.vocabulary import embed_tokens


def run_layers(
    weights: Weights,
    workspace: Workspace,
    tokens: torch.Tensor,
    tables: RowTables,
    pool: Pool,
    page_size: int,
    features: torch.Tensor | None = None,
    feature_layers: tuple[int, ...] = (),
    recurrent: RecurrentRows | None = None,
    finishes: bool = True,
) -> None:
    """Run `tokens` [rows] through all layers; `workspace.attention_input` is then the LM head's input.

    The wanted hidden states go to `features` [rows, len(feature_layers) * hidden]. Without `finishes`, the
    last layer is run up to its attention only, and `finish_rows` completes it.
    """
    config, rows = weights.config, len(tokens)
    size = config.hidden_size

    def kept(index: int) -> torch.Tensor | None:
        """The buffer for the hidden states before layer `index`, if they are wanted."""
        if features is None or index not in feature_layers:
            return None
        slot = feature_layers.index(index) * size
        return features[:, slot : slot + size]

    _embed(weights, workspace, tokens)
    window_tables = tables.in_windows()

    def tables_of(index: int) -> RowTables:
        """The tables for the KV cache group of layer `index`, which attends."""
        return window_tables if pool.is_windowed(config.kv_layer(index)) else tables

    begun = False  # whether the fused kernel has computed this layer's QKV, and stored its features
    for index, layer in enumerate(weights.layers):
        has_qkv, begun = begun, False
        if not has_qkv:
            _keep_features(weights, workspace, rows, kept(index))
        if layer.attends:
            keys, values = pool.layer(config.kv_layer(index))
            if not has_qkv:
                _project_qkv(layer, workspace, tables_of(index), keys, values, config.rms_norm_eps)
            _attend(layer, workspace, tables_of(index), keys, values, config.window(index), page_size)
            if not finishes and index + 1 == len(weights.layers):
                return
            is_before = index + 1 < len(weights.layers) and weights.layers[index + 1].attends
            following = tables_of(index + 1) if is_before else tables
            begun = _run_to_next(weights, workspace, index, following, pool, kept(index + 1))
        if not begun:
            _finish_layer(weights, index, workspace, tables, recurrent)
    if not begun:
        _keep_features(weights, workspace, rows, kept(len(weights.layers)))


def can_finish_rows(weights: Weights, workspace: Workspace, feature_layers: tuple[int, ...]) -> bool:
    """Whether `finish_rows` supports passes with these features."""
    last = weights.layers[-1]
    has_parts = last.latent or last.split or last.per_layer or last.mixture or weights.residual
    is_whole = weights.shard.size == 1 and workspace.attention_scales is None
    return last.is_plain and not has_parts and is_whole and len(weights.layers) not in feature_layers


def finish_rows(
    weights: Weights, workspace: Workspace, chosen: torch.Tensor, tables: RowTables, pool: Pool
) -> None:
    """Complete the last layer for the rows `chosen` [outputs] only: in a prompt only the last row has logits.

    They become the first rows of the workspace. `tables` describe these rows, without adapters.
    """
    for buffer in (workspace.hidden, workspace.attention_output):
        buffer[: len(chosen)] = buffer[chosen]  # a copy: all are read before any is written
    last = len(weights.layers) - 1
    if not _run_to_next(weights, workspace, last, tables, pool, None):
        _finish_layer(weights, last, workspace, tables)


def run_head_layer(
    weights: Weights,
    workspace: Workspace,
    tables: RowTables,
    rope_positions: torch.Tensor,
    pool: Pool,
    page_size: int,
    only_keys: bool,
) -> None:
    """Run the layer of a draft head that is a layer of the target's family; `workspace.attention_input` is
    its input.

    As in head.py, `tables` have KV indices, which are one more than RoPE positions; no row has KV index 0.
    """
    (layer,), (keys, values) = weights.layers, pool.layer(0)
    rotated = replace(tables, positions=rope_positions)
    _project_qkv(layer, workspace, rotated, keys, values, weights.config.rms_norm_eps)
    if not only_keys:
        window = weights.config.window(0)
        _attend(layer, workspace, tables, keys, values, window, page_size, earliest=1)
        _finish_layer(weights, 0, workspace, tables)


def run_assistant_layers(
    weights: Weights, workspace: Workspace, tables: RowTables, pool: Pool, page_size: int
) -> None:
    """Run the layers of an assistant, which attends to the keys and values of its target's pool.

    `workspace.hidden` is the residual stream. Positions in `tables` are those of the last visible token, one
    before the row's own.
    """
    assert weights.residual is not None
    config, rows, rotated = (
        weights.config,
        len(tables.positions),
        replace(tables, positions=tables.positions + 1),
    )
    norm, reader = read_next(weights, workspace, -1)
    as_it_is = replace(weights.residual, embedding_scale=1.0)
    add_normed(as_it_is, workspace.hidden, None, None, norm, reader, rows)
    for index, layer in enumerate(weights.layers):
        (keys, values), window = pool.layer(config.kv_layer(index)), config.window(index)
        own = tables.in_windows() if pool.is_windowed(config.kv_layer(index)) else tables
        _project_qkv(layer, workspace, rotated, keys, values, config.rms_norm_eps)
        _attend(layer, workspace, own, keys, values, None if window is None else window - 1, page_size)
        _finish_layer(weights, index, workspace, rotated)


def _embed(weights: Weights, workspace: Workspace, tokens: torch.Tensor) -> None:
    """Start the residual stream with the embeddings of these tokens."""
    hidden, residual, buffers = workspace.hidden, weights.residual, workspace.residual
    norm, reader = read_next(weights, workspace, -1)
    if residual is not None and buffers is not None:
        embed_tokens(tokens, weights.embedding, hidden, weights.norm, buffers.unused)
        if weights.per_layer is not None and workspace.per_layer is not None:
            embedded = workspace.feed_forward_input
            add_normed(residual, hidden, None, None, None, embedded, len(tokens))
            residual = replace(residual, embedding_scale=1.0)
            give_inputs(weights.per_layer, tokens, embedded, workspace.per_layer, workspace.scratch)
        add_normed(residual, hidden, None, None, norm, reader, len(tokens))
        return
    assert norm is not None
    embed_tokens(tokens, weights.embedding, hidden, norm, reader)
    if weights.shard.size > 1:
        part = hidden[: len(tokens), weights.shard.rows(hidden.shape[1])]
        workspace.local.hidden[: len(tokens), : part.shape[1]] = part


def _project_qkv(
    layer: Layer,
    workspace: Workspace,
    tables: RowTables,
    keys: torch.Tensor,
    values: torch.Tensor,
    eps: float,
) -> None:
    """Write queries, and keys and values to their KV slots, with RoPE, QK norms and query scales."""
    if layer.latent is not None and layer.rotation is not None and workspace.latent is not None:
        known = layer.qkv, layer.latent, layer.rotation, tables, workspace.latent
        project_latents(workspace.attention_input, *known, workspace.query, keys, workspace.scratch)
        if layer.query_factors is not None:
            scale_queries(workspace.query, layer.query_factors, tables.positions)
        return
    where, change = (
        (tables.positions, tables.slot_mapping),
        shrink(layer.adapters.qkv, workspace.attention_input, tables.adapters, workspace.low_rank),
    )
    if layer.split is not None and workspace.split is not None:
        (query, _), rows, projected = (
            workspace.heads_of(layer),
            len(tables.positions),
            workspace.split.projected,
        )
        project(workspace.attention_input, layer.qkv, projected, rows, workspace.scratch, change)
        heads = layer.split, layer.head_norms, eps, *where, layer.rotation
        split_heads(projected, *heads, query, keys, values)
        return
    rotation = None if layer.joint_norms else layer.rotation
    project_heads(
        workspace.attention_input,
        layer.qkv,
        *where,
        rotation,
        layer.head_norms,
        workspace.query,
        keys,
        values,
        workspace.scratch,
        eps,
        change,
    )
    if layer.joint_norms is not None:
        norm_heads(workspace.query, keys, layer.joint_norms, eps, *where, layer.rotation)
    if layer.query_factors is not None:
        scale_queries(workspace.query, layer.query_factors, tables.positions)


def _attend(
    layer: Layer,
    workspace: Workspace,
    tables: RowTables,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: int | None,
    page_size: int,
    earliest: int = 0,
) -> None:
    """Write attention's output to `workspace.attention_output`; for latents, multiplied by W_uv."""
    latent, (query, output) = workspace.latent, workspace.heads_of(layer)
    partials = late_merge(layer.latent, tables, workspace.attention, layer.scoring, earliest)
    attend(
        query,
        keys,
        values,
        tables,
        window,
        page_size,
        output if latent is None else latent.mixed,
        workspace.attention,
        earliest,
        workspace.local.attention_scales,
        layer.scoring,
        partials is None,
    )
    if layer.latent is not None and latent is not None:
        project_values(layer.latent, latent, workspace.attention_output, tables.positions, partials)


def _finish_layer(
    weights: Weights,
    index: int,
    workspace: Workspace,
    tables: RowTables,
    recurrent: RecurrentRows | None = None,
) -> None:
    """The rest of a layer after its attention, by separate kernels."""
    layer = weights.layers[index]
    if layer.recurrence is not None:
        assert recurrent is not None
        mixed = _mix_recurrent(weights, workspace, index, layer.recurrence[0], recurrent)
        _add_mixed(weights, workspace, index, layer.recurrence[1], mixed, tables, None)
    if layer.attends:
        _gate_attention(layer, workspace, len(tables.positions))
        mixed = workspace.attention_output if layer.split is None else workspace.heads_of(layer)[1]
        _add_mixed(weights, workspace, index, layer.output, mixed, tables, layer.adapters.output)
    if layer.feeds_forward:
        feed_forward(weights, index, workspace, tables)


def _add_mixed(
    weights: Weights,
    workspace: Workspace,
    index: int,
    output: Matrix,
    mixed: torch.Tensor,
    tables: RowTables,
    adapters: LowRank | None,
) -> None:
    """Add the output projection of attention, or of a recurrence, to the residual stream."""
    layer, rows, scales = weights.layers[index], len(tables.positions), workspace.attention_scales
    local, shard, scratch = workspace.local, weights.shard, workspace.scratch
    residual, buffers = weights.residual, workspace.residual
    norm, read = layer.feed_forward_norm, local.feed_forward_input
    if not layer.feeds_forward:
        norm, read = read_next(weights, local, index)
    if residual is not None and buffers is not None:
        change = shrink(adapters, mixed, tables.adapters, workspace.low_rank)
        project(plain(mixed, buffers.ones), output, buffers.added, rows, scratch, change)
        reader = None if residual.is_parallel else read
        add_normed(residual, local.hidden, buffers.added, layer.output_norms[0], norm, reader, rows)
        return
    assert norm is not None
    shard.gather([local.attention_output, local.attention_scales], [workspace.attention_output, scales], rows)
    change = shrink(adapters, mixed, tables.adapters, workspace.low_rank, scales)
    scores, routing = None, workspace.routing
    if layer.mixture is not None and routing is not None and has_parts(layer.mixture.router, rows):
        scores = Scores(layer.mixture.router, routing.parts)
    inputs = shard.local(norm), read, rows, scratch, scales, scores, change
    add_product(mixed, output, local.hidden, *inputs)
    shard.gather(read.parts, workspace.feed_forward_input.parts, rows)


def _mix_recurrent(
    weights: Weights, workspace: Workspace, index: int, into: Matrix, recurrent: RecurrentRows
) -> torch.Tensor:
    """Run a recurrent layer up to its output projection, whose input is returned: [rows, padded values]."""
    config, buffers, parameters = weights.config, workspace.recurrent, weights.recurrent
    assert config.recurrent is not None
    assert buffers is not None
    assert parameters is not None
    shape, number = (
        recurrent_shape(config.recurrent, config.hidden_size),
        config.recurrent_layers.index(index),
    )
    rows, states, advances = len(recurrent.parents), recurrent.states, recurrent.advances
    project(workspace.attention_input, into, buffers.projected[number], rows, workspace.scratch)
    if advances is not None:
        of_rows = recurrent.slots, advances
        if shape.rate >= 0:
            step_states(shape, parameters, number, buffers, states, *of_rows)
        else:
            convolve(shape, parameters, number, buffers, states, recurrent.parents, recurrent.slots)
        gate(shape, parameters, number, buffers, rows, NewConvStates(states.conv, *of_rows))
        return buffers.gated
    convolve(shape, parameters, number, buffers, states, recurrent.parents, recurrent.slots)
    if shape.rate >= 0:
        only, nodes = slice(number, number + 1), buffers.nodes[None]
        scan_states(shape, parameters, only, buffers, states, nodes, recurrent.scans, writes=True)
    gate(shape, parameters, number, buffers, rows)
    return buffers.gated


def _gate_attention(layer: Layer, workspace: Workspace, rows: int) -> None:
    """Scale the attention output by the sigmoid of the layer's attention gate, if it has one."""
    if layer.gate is not None and workspace.gates is not None:
        mixed = workspace.attention_output[:rows]
        project(workspace.attention_input, layer.gate, workspace.gates, rows, workspace.scratch)
        gate_rows(mixed, workspace.gates[:rows])


def _run_to_next(
    weights: Weights,
    workspace: Workspace,
    index: int,
    tables: RowTables,
    pool: Pool,
    features: torch.Tensor | None,
) -> bool:
    """Run a layer after its attention, and the next layer's QKV, by the fused kernel; False if unsupported.

    `tables` are those of the next layer's KV cache group.
    The layer's output goes to `features` too, if given.
    """
    layer, heads, norm = weights.layers[index], None, weights.norm
    plain = weights.shard.size == 1 and weights.residual is None and tables.adapters is None
    if not plain or not layer.is_plain:
        return False
    if index + 1 < len(weights.layers):
        following = weights.layers[index + 1]
        if following.head_norms is not None or following.rotation is None or not following.is_plain:
            return False
        assert following.attention_norm is not None
        norm = following.attention_norm
        keys, values = pool.layer(index + 1)
        slot_mapping = tables.positions, tables.slot_mapping, following.rotation
        heads = NextQkv(following.qkv, *slot_mapping, workspace.query, keys, values)
    read, written = workspace.feed_forward_input, workspace.attention_input
    buffers = LayerBuffers(
        workspace.hidden,
        workspace.attention_output,
        read,
        workspace.activated,
        written,
        features,
        workspace.attention_scales,
        workspace.activated_scales,
    )
    return run_fused_layer(layer, buffers, norm, len(tables.positions), workspace.scratch, heads)


def _keep_features(weights: Weights, workspace: Workspace, rows: int, features: torch.Tensor | None) -> None:
    """Copy the hidden states to `features`, if they are wanted."""
    if features is not None:
        weights.shard.gather([workspace.local.hidden], [workspace.hidden], rows)
        features[:rows] = workspace.hidden[:rows, : features.shape[1]]
