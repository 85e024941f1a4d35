"""The pass of a learned draft head: the kernels that fuse features, run the layer and compute logits.

    features ─ norm ─ fc ─> state            for rows after the target's tokens (fuse)
    state, token ─ embed, join ─> layer ─> logits, and the state that the next row reads

eagle3's attention reads [embedding, state]; eagle and mtp first project both to one vector. The layer has
llama's shape, or, in some mtp blocks, is a layer of the target's family: see model.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from paceline.backends.cuda.heads.head_weights import HeadWeights
from paceline.backends.cuda.kernels.attention.paged_attention import AttentionScratch, attention_scratch
from paceline.backends.cuda.kernels.attention.row_tables import RowTables
from paceline.backends.cuda.kernels.drafting.draft_inputs import join, norm_rows
from paceline.backends.cuda.kernels.products.matrix import Normed, Scratch, padded_rows, scratch_for
from paceline.backends.cuda.model import run_head_layer
from paceline.backends.cuda.native.decode_attention import attend
from paceline.backends.cuda.native.fused_layer import LayerBuffers, run_fused_layer
from paceline.backends.cuda.native.many_rows import add_product, gate_up, project, project_heads
from paceline.backends.cuda.passes.kv_pool import Pool
from paceline.backends.cuda.passes.workspace import Room, Workspace, make_workspace
from paceline.backends.cuda.weights.shard import TILE
from paceline.backends.cuda.weights.tiled import padded_size
from paceline.backends.cuda.weights.vocabulary import embed_tokens


@dataclass(frozen=True)
class HeadPool(Pool):
    """The KV pool of a head, with the target's features that its rows read."""

    features: torch.Tensor  # [slots + 1, width] the last row is what masks read
    parts: torch.Tensor  # int32 [layers] 0, 1, ...: see store_features


@dataclass(frozen=True)
class HeadWorkspace:
    """The buffers of a head's passes, allocated once because captured graphs hold their addresses."""

    fused: torch.Tensor  # [rows, padded features] input of the fusion's matrix
    states: torch.Tensor  # float32 [rows, padded hidden] fused features of the target
    fed_back: torch.Tensor  # float32 [rows, padded hidden] states for the next rows, if normed
    embedded: torch.Tensor  # float32 [rows, padded hidden]
    ones: torch.Tensor  # float32 [rows, 1] sums of squares of rows without a norm
    scratch_input: Normed  # written by `embed`, never read
    joined: torch.Tensor  # [rows, 2 * padded hidden]
    hidden: tuple[torch.Tensor, torch.Tensor]  # float32 [rows, padded hidden] each; passes alternate
    attention_input: Normed
    query: torch.Tensor  # [rows, heads, head_dim]
    attention_output: torch.Tensor  # [rows, padded heads * head_dim] padding is zero
    feed_forward_input: Normed
    activated: torch.Tensor  # [rows, padded intermediate]
    output: Normed  # input of the LM head, by row of the pass
    picked: Normed  # the same, of the wanted rows
    logits: torch.Tensor  # float32 [rows, draft vocabulary]
    local_logits: torch.Tensor  # those that this rank computes; on one GPU the same buffer
    scratch: Scratch
    attention: AttentionScratch
    model: Workspace | None = None  # of a layer of the target's family; shares input and output with this one


def make_head_workspace(weights: HeadWeights, max_rows: int, longest: int) -> HeadWorkspace:
    """Buffers for passes of at most `max_rows` rows over contexts of at most `longest` tokens."""
    config, layer, rows = weights.config, weights.layer, padded_rows(max_rows)
    device, dtype = weights.norm.device, weights.norm.dtype
    hidden = len(weights.norm)

    def zeros(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=kind, device=device)

    def numbers(*shape: int) -> torch.Tensor:
        return zeros(*shape, kind=torch.float32)

    def normed(groups: int) -> Normed:
        return Normed(zeros(rows, hidden), numbers(rows, groups), config.hidden_size, config.rms_norm_eps)

    joining, fusing = weights.entry.joining, weights.fusion.matrix
    model = None
    if weights.model is not None:  # the LM head is run here
        model = make_workspace(weights.model, replace(Room.of(max_rows, longest), outputs=1))
    local_logits = logits = numbers(rows, config.draft_vocab_size)
    if weights.vocabulary.shard.size > 1:
        local_logits = numbers(rows, weights.vocabulary.padded_width)
    return HeadWorkspace(
        fused=zeros(rows, 0 if fusing is None else fusing.depth),
        states=numbers(rows, hidden),
        fed_back=numbers(rows, hidden),
        embedded=numbers(rows, hidden),
        ones=numbers(rows, 1) + 1,
        scratch_input=normed(hidden // 64),
        joined=zeros(rows, 2 * hidden),
        hidden=(numbers(rows, hidden), numbers(rows, hidden)),
        attention_input=model.attention_input if model else normed(1 if joining is None else joining.tiles),
        query=zeros(rows, config.num_heads, config.head_dim),
        attention_output=zeros(rows, padded_size(config.num_heads * config.head_dim)),
        feed_forward_input=normed(layer.output.tiles),
        activated=zeros(rows, 0 if model else layer.gate_up.padded_width // 2),
        output=model.attention_input if model else normed(layer.down.tiles),
        picked=normed(hidden // TILE),
        logits=logits,
        local_logits=local_logits,
        scratch=scratch_for(weights.matrices, rows, device),
        attention=attention_scratch(
            rows, config.num_heads, config.num_kv_heads, config.head_dim, longest, device
        ),
        model=model,
    )


def fuse(
    weights: HeadWeights,
    workspace: HeadWorkspace,
    features: torch.Tensor,
    sources: torch.Tensor | None,
    rows: int,
) -> torch.Tensor:
    """Fuse (`fc`) the rows `sources` of the target's features to states [rows, padded hidden]."""
    fusion, width = weights.fusion, weights.config.feature_width
    if fusion.matrix is None:
        norm_rows(features, sources, fusion.norm, fusion.eps, width, workspace.states, rows)
        return workspace.states
    size = width // fusion.groups
    norm_rows(features, sources, fusion.norm, fusion.eps, size, workspace.fused, rows, fusion.groups)
    plain = _plain(workspace, workspace.fused)
    project(plain, fusion.matrix, workspace.states, rows, workspace.scratch)
    return workspace.states


def run_head_rows(
    weights: HeadWeights,
    workspace: HeadWorkspace,
    tokens: torch.Tensor,
    states: torch.Tensor,
    sources: torch.Tensor | None,
    tables: RowTables,
    rope_positions: torch.Tensor,
    pool: Pool,
    page_size: int,
    hidden: torch.Tensor,
    only_keys: bool = False,
) -> None:
    """Run the head over these tokens [rows] and states; `workspace.output` is the input of its LM head.

    Row r reads the state sources[r], or r without `sources`. `tables` hold KV indices; `rope_positions`
    int32 [rows] are the RoPE positions, one less. The outputs go to `hidden`, which must not overlap the
    states. With `only_keys`, keys and values are stored and there are no outputs.
    """
    read = _enter(weights, workspace, tokens, states, sources, hidden)
    if weights.model is not None and workspace.model is not None:
        model = replace(workspace.model, hidden=hidden, local=replace(workspace.model.local, hidden=hidden))
        run_head_layer(weights.model, model, tables, rope_positions, pool, page_size, only_keys)
        return
    layers, rows, scratch = (weights.layer, *weights.later_layers), len(tokens), workspace.scratch
    norms = [layer.attention_norm for layer in weights.later_layers] + [weights.norm]
    query, attention_output = workspace.query, workspace.attention_output
    for layer, keys, values, norm in zip(layers, pool.keys, pool.values, norms, strict=True):
        assert layer.feed_forward_norm is not None
        assert norm is not None
        to = None, query, keys, values, scratch  # no QK norms
        project_heads(read, layer.qkv, rope_positions, tables.slot_mapping, weights.rotation, *to)
        if only_keys and layer is layers[-1]:
            return
        # a head has no row at KV index 0
        attend(
            query, keys, values, tables, None, page_size, attention_output, workspace.attention, earliest=1
        )
        reads, activated, read = workspace.feed_forward_input, workspace.activated, workspace.output
        buffers = LayerBuffers(hidden, attention_output, reads, activated, read)
        if run_fused_layer(layer, buffers, norm, rows, scratch, None):
            continue
        add_product(attention_output, layer.output, hidden, layer.feed_forward_norm, reads, rows, scratch)
        gate_up(reads, layer.gate_up, activated, rows, scratch)
        add_product(activated, layer.down, hidden, norm, read, rows, scratch)


def _enter(
    weights: HeadWeights,
    workspace: HeadWorkspace,
    tokens: torch.Tensor,
    states: torch.Tensor,
    sources: torch.Tensor | None,
    hidden: torch.Tensor,
) -> Normed:
    """The input of the first layer's attention, from tokens and states; starts the stream `hidden`."""
    config, entry, rows = weights.config, weights.entry, len(tokens)
    attention_norm = weights.layer.attention_norm
    assert attention_norm is not None
    embed_tokens(tokens, weights.embedding, workspace.embedded, weights.norm, workspace.scratch_input)
    size, eps = config.hidden_size, config.rms_norm_eps
    joined = workspace.joined
    join(workspace.embedded, states, sources, entry.norms, size, eps, entry.residual, joined, hidden, rows)
    if entry.joining is None:
        return _plain(workspace, joined)
    read = workspace.attention_input
    add_product(joined, entry.joining, hidden, attention_norm, read, rows, workspace.scratch)
    return read if entry.normed else _plain(workspace, read.rows)


def feed_back(
    weights: HeadWeights, workspace: HeadWorkspace, hidden: torch.Tensor, rows: int
) -> torch.Tensor:
    """The states read by the rows after these outputs [rows, padded hidden]."""
    config = weights.config
    if not config.norm_output:
        return hidden
    norm_rows(hidden, None, weights.norm, config.rms_norm_eps, config.hidden_size, workspace.fed_back, rows)
    return workspace.fed_back


def run_draft_lm_head(weights: HeadWeights, workspace: HeadWorkspace, read: Normed, rows: int) -> None:
    """Write the logits of the first rows of `read` to `workspace.logits`."""
    if not weights.is_normed:
        read = _plain(workspace, read.rows)
    matrix, local = weights.vocabulary, workspace.local_logits
    project(read, matrix, local, rows, workspace.scratch)
    matrix.shard.gather([local], [workspace.logits], rows)


def _plain(workspace: HeadWorkspace, rows: torch.Tensor) -> Normed:
    """Rows for products without a norm."""
    return Normed(rows, workspace.ones, 1, 0.0)
