"""A forward pass: which kernels run, in which order, over which buffers. No value is read on the host, so
the whole pass can be captured as a CUDA graph and replayed over other rows.

A layer is five kernels:

    QKV projection           norm(hidden), bias, RoPE; keys and values go to their KV slots
    attention                over the KV slots that each row sees
    output projection        hidden += attention, and the sums of squares for the next norm
    gate, up, SwiGLU         norm(hidden)
    down projection          hidden += MLP, and the sums of squares for the next norm

For some numbers of rows, everything from one attention to the next is one kernel: see fused_layer.py. In a
mixture of experts the last two are five kernels: see kernels/experts.py. Ranks of tensor parallelism gather
what they computed after each of the last four: see shard.py.
"""

from __future__ import annotations

import torch

from paceline.backends.cuda.decode_attention import attend
from paceline.backends.cuda.fused_layer import LayerBuffers, NextQkv, run_fused_layer
from paceline.backends.cuda.kernels.experts import add_experts
from paceline.backends.cuda.kernels.heads import project_heads
from paceline.backends.cuda.kernels.linear import add_product, gate_up, project
from paceline.backends.cuda.kernels.matrix import Normed
from paceline.backends.cuda.kernels.row_tables import RowTables
from paceline.backends.cuda.logits import run_logits
from paceline.backends.cuda.vocabulary import embed_tokens
from paceline.backends.cuda.weights import Layer, Weights
from paceline.backends.cuda.workspace import Pool, Workspace


def run_layers(
    weights: Weights,
    workspace: Workspace,
    tokens: torch.Tensor,
    tables: RowTables,
    pool: Pool,
    page_size: int,
    features: torch.Tensor | None = None,
    feature_layers: tuple[int, ...] = (),
) -> None:
    """Run `tokens` [rows] through all layers; `workspace.attention_input` is then the LM head's input.

    The wanted hidden states go to `features` [rows, len(feature_layers) * hidden].
    """
    config, rows, own = weights.config, len(tokens), workspace.own
    size = config.hidden_size
    norms = [layer.attention_norm for layer in weights.layers] + [weights.norm]

    def kept(index: int) -> torch.Tensor | None:
        """Where the hidden states of this index go, if they are wanted."""
        if features is None or index not in feature_layers:
            return None
        slot = feature_layers.index(index) * size
        return features[:, slot : slot + size]

    _embed(weights, workspace, tokens)
    begun = False  # whether the fused kernel has computed this layer's QKV, and stored its features
    for index, layer in enumerate(weights.layers):
        keys, values = pool.keys[index], pool.values[index]
        if not begun:
            _keep_features(weights, workspace, rows, kept(index))
            project_heads(
                workspace.attention_input,
                layer.qkv,
                tables.positions,
                tables.slot_mapping,
                weights.rotation,
                layer.head_norms,
                workspace.query,
                keys,
                values,
                workspace.scratch,
            )
        attend(
            workspace.query,
            keys,
            values,
            tables,
            config.window(index),
            page_size,
            own.attention_output,
            workspace.attention,
            scales=own.attention_scales,
        )
        begun = _run_to_next(weights, workspace, index, tables, pool, kept(index + 1))
        if not begun:
            _add_attention(weights, workspace, layer, rows)
            _feed_forward(weights, layer, workspace, tables.slot_mapping, norms[index + 1])
    if not begun:
        _keep_features(weights, workspace, rows, kept(len(weights.layers)))


def _embed(weights: Weights, workspace: Workspace, tokens: torch.Tensor) -> None:
    """Begin the residual stream of these tokens."""
    norm, hidden = weights.layers[0].attention_norm, workspace.hidden
    embed_tokens(tokens, weights.embedding, hidden, norm, workspace.attention_input)
    if weights.shard.size > 1:
        part = hidden[: len(tokens), weights.shard.rows(hidden.shape[1])]
        workspace.own.hidden[: len(tokens), : part.shape[1]] = part


def _add_attention(weights: Weights, workspace: Workspace, layer: Layer, rows: int) -> None:
    """Add the output projection of the attention to the residual stream."""
    own, shard = workspace.own, weights.shard
    shard.join(
        [own.attention_output, own.attention_scales],
        [workspace.attention_output, workspace.attention_scales],
        rows,
    )
    add_product(
        workspace.attention_output,
        layer.output,
        own.hidden,
        shard.own(layer.feed_forward_norm),
        own.feed_forward_input,
        rows,
        workspace.scratch,
        workspace.attention_scales,
    )
    shard.join(own.feed_forward_input.parts, workspace.feed_forward_input.parts, rows)


def _run_to_next(
    weights: Weights,
    workspace: Workspace,
    index: int,
    tables: RowTables,
    pool: Pool,
    features: torch.Tensor | None,
) -> bool:
    """Run a layer after its attention, and the next layer's QKV, by the fused kernel; False if it cannot.

    The layer's output goes to `features` too, if given.
    """
    own, heads, norm = weights.layers[index], None, weights.norm
    if weights.shard.size > 1:
        return False
    if index + 1 < len(weights.layers):
        following, norm = weights.layers[index + 1], weights.layers[index + 1].attention_norm
        if following.head_norms is not None:
            return False
        keys, values = pool.keys[index + 1], pool.values[index + 1]
        slot_mapping = tables.positions, tables.slot_mapping, weights.rotation
        heads = NextQkv(following.qkv, *slot_mapping, workspace.query, keys, values)
    read, written = workspace.feed_forward_input, workspace.attention_input
    buffers = LayerBuffers(
        workspace.hidden, workspace.attention_output, read, workspace.activated, written, features
    )
    return run_fused_layer(own, buffers, norm, len(tables.positions), workspace.scratch, heads)


def _feed_forward(
    weights: Weights, layer: Layer, workspace: Workspace, slot_mapping: torch.Tensor, norm: torch.Tensor
) -> None:
    """Add the MLP of the rows of this slot mapping to the residual stream; this norm comes next."""
    own, shard = workspace.own, weights.shard
    read, written = workspace.feed_forward_input, own.attention_input
    scratch, rows = workspace.scratch, len(slot_mapping)
    if layer.mixture is not None and workspace.routing is not None:
        add_experts(layer.mixture, read, slot_mapping, own.hidden, norm, written, workspace.routing, scratch)
        return
    gate_up(read, layer.gate_up, own.activated, rows, scratch, own.activated_scales)
    activated, scales = workspace.activated, workspace.activated_scales
    shard.join([own.activated, own.activated_scales], [activated, scales], rows)
    add_product(activated, layer.down, own.hidden, shard.own(norm), written, rows, scratch, scales)
    shard.join(written.parts, workspace.attention_input.parts, rows)


def _keep_features(weights: Weights, workspace: Workspace, rows: int, features: torch.Tensor | None) -> None:
    """Copy the hidden states to `features`, if they are wanted."""
    if features is not None:
        weights.shard.join([workspace.own.hidden], [workspace.hidden], rows)
        features[:rows] = workspace.hidden[:rows, : features.shape[1]]


def select(workspace: Workspace, chosen: torch.Tensor) -> None:
    """Copy the LM head's input of the rows `chosen` [outputs] to `workspace.selected`."""
    read, written = workspace.attention_input, workspace.selected
    written.rows[: len(chosen)] = read.rows[chosen]
    written.squares[: len(chosen)] = read.squares[chosen]


def run_lm_head(weights: Weights, workspace: Workspace, read: Normed, rows: int, joins: bool = True) -> None:
    """Write the logits of the first rows of `read` to `workspace.logits`.

    Without `joins` a rank has those of its own token ids alone, in `workspace.own.logits`.
    """
    own = workspace.own.logits
    if not run_logits(read, weights.head, own, rows):
        project(read, weights.head, own, rows, workspace.scratch)
    if joins:
        weights.shard.join([own], [workspace.logits], rows)
