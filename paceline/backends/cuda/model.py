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

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace

import torch

from paceline.backends.cuda.decode_attention import attend
from paceline.backends.cuda.fused_layer import LayerBuffers, NextQkv, run_fused_layer
from paceline.backends.cuda.kernels.attention import AttentionScratch, attention_scratch
from paceline.backends.cuda.kernels.experts import add_experts
from paceline.backends.cuda.kernels.heads import project_heads
from paceline.backends.cuda.kernels.linear import add_product, gate_up, project
from paceline.backends.cuda.kernels.matrix import Matrix, Normed, Scratch, padded_rows, scratch_for
from paceline.backends.cuda.kernels.packing import FP8_GROUP
from paceline.backends.cuda.kernels.routing import Routing, routing_for
from paceline.backends.cuda.kernels.row_tables import RowTables
from paceline.backends.cuda.logits import run_logits
from paceline.backends.cuda.shard import TILE
from paceline.backends.cuda.vocabulary import embed_tokens
from paceline.backends.cuda.weights import Layer, Weights, padded_size


@dataclass(frozen=True)
class Pool:
    """Keys and values of `num_pages` pages on the device."""

    num_pages: int
    bytes_per_page: int
    keys: torch.Tensor  # [layers, slots, KV heads, head_dim]
    values: torch.Tensor  # [layers, slots, KV heads, head_dim]


@dataclass(frozen=True)
class Activations:
    """What kernels pass to each other: whole rows, or the columns of them that a rank computes."""

    hidden: torch.Tensor  # float32 [rows, padded hidden] the residual stream
    attention_input: Normed
    feed_forward_input: Normed
    attention_output: torch.Tensor  # [rows, padded heads * head_dim] padding is zero; e4m3 if it has scales
    attention_scales: torch.Tensor | None  # as of Normed
    activated: torch.Tensor  # [rows, padded intermediate] likewise
    activated_scales: torch.Tensor | None
    logits: torch.Tensor  # float32 [rows, vocab]


@dataclass(frozen=True)
class Workspace(Activations):
    """The buffers of a pass, allocated once because captured graphs hold their addresses."""

    own: Activations  # which this rank computes. On one GPU they are the same buffers
    query: torch.Tensor  # [rows, own heads, head_dim]
    selected: Normed  # the rows whose logits are wanted
    scratch: Scratch
    attention: AttentionScratch
    routing: Routing | None  # of mixtures of experts


@dataclass(frozen=True)
class Room:
    """How much passes may need of a workspace."""

    rows: int
    longest: int  # tokens of a context
    attending: int  # the first rows; all after them are in prefill tiles
    outputs: int  # rows with logits

    @classmethod
    def of(cls, rows: int, longest: int) -> Room:
        """Room for passes of at most `rows` rows of any kind."""
        return cls(rows, longest, rows, rows)

    def holding(self, other: Room) -> Room:
        """Room for both."""
        return Room(*(max(getattr(self, own.name), getattr(other, own.name)) for own in fields(self)))


def make_workspace(weights: Weights, room: Room) -> Workspace:
    """Buffers for passes that need this room."""
    config, device = weights.config, weights.device
    rows, outputs, attending = map(padded_rows, (room.rows, room.outputs, room.attending))
    dense = [own for own in weights.layers if own.mixture is None]
    mixtures = [own.mixture for own in weights.layers if own.mixture is not None]
    intermediate = max((own.gate_up.padded_width // 2 for own in dense), default=0)
    whole = _activations(
        weights,
        rows,
        outputs,
        Widths(
            weights.hidden,
            padded_size(config.num_heads * config.head_dim),
            intermediate if weights.shard.size == 1 else padded_size(config.intermediate_size),
            config.vocab_size,
        ),
    )
    own, (heads, kv_heads) = whole, weights.heads
    if weights.shard.size > 1:
        hidden, vocab = weights.shard.width(config.hidden_size), weights.head.padded_width
        own = _activations(
            weights, rows, outputs, Widths(hidden, heads * config.head_dim, intermediate, vocab)
        )
    return Workspace(
        **{part.name: getattr(whole, part.name) for part in fields(Activations)},
        own=own,
        query=torch.zeros((rows, heads, config.head_dim), dtype=weights.dtype, device=device),
        selected=_normed(weights, outputs, weights.hidden),
        scratch=scratch_for(weights.matrices, rows, device),
        attention=attention_scratch(attending, heads, kv_heads, config.head_dim, room.longest, device, rows),
        routing=routing_for(mixtures[0], rows, weights.dtype, device) if mixtures else None,
    )


@dataclass(frozen=True)
class Widths:
    """The columns of activations."""

    hidden: int
    attention: int
    intermediate: int
    vocab: int


def _activations(weights: Weights, rows: int, outputs: int, widths: Widths) -> Activations:
    """Zeroed buffers of these widths."""
    layer, dense = weights.layers[0], [own for own in weights.layers if own.mixture is None]
    gates, downs = ([getattr(own, name) for own in dense] for name in ("gate_up", "down"))
    return Activations(
        torch.zeros((rows, widths.hidden), device=weights.device),
        _normed(weights, rows, widths.hidden, layer.qkv),
        _normed(weights, rows, widths.hidden, *gates),
        *_inputs(weights, rows, widths.attention, layer.output),
        *_inputs(weights, rows, widths.intermediate, *downs),
        torch.zeros((outputs, widths.vocab), device=weights.device),
    )


def _inputs(
    weights: Weights, rows: int, width: int, *readers: Matrix
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What matrices read, rounded to e4m3 with scales if they are packed so."""
    if not any(own.tiling.packing == "e4m3" for own in readers):
        return torch.zeros((rows, width), dtype=weights.dtype, device=weights.device), None
    scales = torch.zeros((rows // 16, width // FP8_GROUP, 16), device=weights.device)
    return torch.zeros((rows, width), dtype=torch.float8_e4m3fn, device=weights.device), scales


def _normed(weights: Weights, rows: int, width: int, *readers: Matrix) -> Normed:
    """The residual stream as these matrices read it."""
    config = weights.config
    fp8, scales = _inputs(weights, rows, width, *readers)
    return Normed(
        torch.zeros((rows, width), dtype=weights.dtype, device=weights.device),
        torch.zeros((rows, width // TILE), device=weights.device),
        config.hidden_size,
        config.rms_norm_eps,
        *((None, None) if scales is None else (fp8, scales)),
    )


def workspace_bytes(weights: Weights, room: Room) -> int:
    """The bytes of such a workspace, counted on torch's meta device."""
    workspace = make_workspace(replace(weights, norm=weights.norm.to("meta")), room)
    return sum({id(tensor): tensor.nbytes for tensor in _tensors_of(workspace)}.values())


def _tensors_of(value: object) -> Iterator[torch.Tensor]:
    """A tensor, or all tensors in a dataclass; one may be there twice."""
    if isinstance(value, torch.Tensor):
        yield value
    elif is_dataclass(value):
        for own in fields(value):
            yield from _tensors_of(getattr(value, own.name))


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
