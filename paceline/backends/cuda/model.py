"""A forward pass: which kernels run, in which order, over which buffers. No value is read on the host, so
the whole pass can be captured as a CUDA graph and replayed over other rows.

A layer is five kernels:

    QKV projection           norm(hidden), bias, RoPE; keys and values go to their KV slots
    attention                over the KV slots that each row sees
    output projection        hidden += attention, and the sums of squares for the next norm
    gate, up, SwiGLU         norm(hidden)
    down projection          hidden += MLP, and the sums of squares for the next norm

For some numbers of rows, everything from one attention to the next is one kernel: see fused_layer.py. In a
mixture of experts the last two are five kernels: see kernels/experts.py.
"""

from __future__ import annotations

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
from paceline.backends.cuda.kernels.rows import embed
from paceline.backends.cuda.logits import run_logits
from paceline.backends.cuda.weights import Layer, Weights, padded_size


@dataclass(frozen=True)
class Pool:
    """Keys and values of `num_pages` pages on the device."""

    num_pages: int
    bytes_per_page: int
    keys: torch.Tensor  # [layers, slots, KV heads, head_dim]
    values: torch.Tensor  # [layers, slots, KV heads, head_dim]


@dataclass(frozen=True)
class Workspace:
    """The buffers of a pass, allocated once because captured graphs hold their addresses."""

    hidden: torch.Tensor  # float32 [rows, padded hidden] the residual stream
    attention_input: Normed
    feed_forward_input: Normed
    query: torch.Tensor  # [rows, heads, head_dim]
    attention_output: torch.Tensor  # [rows, padded heads * head_dim] padding is zero; e4m3 if it has scales
    attention_scales: torch.Tensor | None  # as of Normed
    activated: torch.Tensor  # [rows, padded intermediate] likewise
    activated_scales: torch.Tensor | None
    selected: Normed  # the rows whose logits are wanted
    logits: torch.Tensor  # float32 [rows, vocab]
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
    config, device, dtype = weights.config, weights.device, weights.dtype
    layer, rows = weights.layers[0], padded_rows(room.rows)
    outputs, attending = padded_rows(room.outputs), padded_rows(room.attending)
    dense = [own for own in weights.layers if own.mixture is None]
    intermediate = max((own.gate_up.padded_width // 2 for own in dense), default=0)
    mixtures = [own.mixture for own in weights.layers if own.mixture is not None]

    def zeros(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=kind, device=device)

    def inputs(width: int, *readers: Matrix) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What matrices read, rounded to e4m3 with scales if they are packed so."""
        if not any(own.tiling.packing == "e4m3" for own in readers):
            return zeros(rows, width), None
        scales = zeros(rows // 16, width // FP8_GROUP, 16, kind=torch.float32)
        return zeros(rows, width, kind=torch.float8_e4m3fn), scales

    def normed(*readers: Matrix, lines: int = rows) -> Normed:
        squares = zeros(lines, layer.output.tiles, kind=torch.float32)
        fp8, scales = inputs(weights.hidden, *readers)
        fp8_inputs = (fp8, scales) if scales is not None else (None, None)
        return Normed(
            zeros(lines, weights.hidden), squares, config.hidden_size, config.rms_norm_eps, *fp8_inputs
        )

    attention_output, attention_scales = inputs(padded_size(config.num_heads * config.head_dim), layer.output)
    activated, activated_scales = inputs(intermediate, *(own.down for own in dense))
    return Workspace(
        hidden=zeros(rows, weights.hidden, kind=torch.float32),
        attention_input=normed(layer.qkv),
        feed_forward_input=normed(*(own.gate_up for own in dense)),
        query=zeros(rows, config.num_heads, config.head_dim),
        attention_output=attention_output,
        attention_scales=attention_scales,
        activated=activated,
        activated_scales=activated_scales,
        selected=normed(lines=outputs),
        logits=zeros(outputs, config.vocab_size, kind=torch.float32),
        scratch=scratch_for(weights.matrices, rows, device),
        attention=attention_scratch(
            attending, config.num_heads, config.num_kv_heads, config.head_dim, room.longest, device, rows
        ),
        routing=routing_for(mixtures[0], rows, dtype, device) if mixtures else None,
    )


def workspace_bytes(weights: Weights, room: Room) -> int:
    """The bytes of such a workspace, counted on torch's meta device."""
    return _bytes_of(make_workspace(replace(weights, norm=weights.norm.to("meta")), room))


def _bytes_of(value: object) -> int:
    """The bytes of a tensor, or of all tensors in a dataclass."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(_bytes_of(getattr(value, own.name)) for own in fields(value)) if is_dataclass(value) else 0


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
    config, rows = weights.config, len(tokens)
    size = config.hidden_size
    norms = [layer.attention_norm for layer in weights.layers] + [weights.norm]

    def kept(index: int) -> torch.Tensor | None:
        """Where the hidden states of this index go, if they are wanted."""
        if features is None or index not in feature_layers:
            return None
        slot = feature_layers.index(index) * size
        return features[:, slot : slot + size]

    embed(tokens, weights.embedding, workspace.hidden, norms[0], workspace.attention_input)
    begun = False  # whether the fused kernel has computed this layer's QKV, and stored its features
    for index, layer in enumerate(weights.layers):
        keys, values = pool.keys[index], pool.values[index]
        if not begun:
            _keep_features(workspace, rows, kept(index))
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
            workspace.attention_output,
            workspace.attention,
            scales=workspace.attention_scales,
        )
        begun = _run_to_next(weights, workspace, index, tables, pool, kept(index + 1))
        if not begun:
            add_product(
                workspace.attention_output,
                layer.output,
                workspace.hidden,
                layer.feed_forward_norm,
                workspace.feed_forward_input,
                rows,
                workspace.scratch,
                workspace.attention_scales,
            )
            _feed_forward(layer, workspace, tables.slot_mapping, norms[index + 1])
    if not begun:
        _keep_features(workspace, rows, kept(len(weights.layers)))


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


def _feed_forward(layer: Layer, workspace: Workspace, slot_mapping: torch.Tensor, norm: torch.Tensor) -> None:
    """Add the MLP of the rows of this slot mapping to `workspace.hidden`; this norm comes next."""
    read, hidden, written = workspace.feed_forward_input, workspace.hidden, workspace.attention_input
    scratch, rows = workspace.scratch, len(slot_mapping)
    if layer.mixture is None or workspace.routing is None:
        scales = workspace.activated_scales
        gate_up(read, layer.gate_up, workspace.activated, rows, scratch, scales)
        add_product(workspace.activated, layer.down, hidden, norm, written, rows, scratch, scales)
    else:
        add_experts(layer.mixture, read, slot_mapping, hidden, norm, written, workspace.routing, scratch)


def _keep_features(workspace: Workspace, rows: int, features: torch.Tensor | None) -> None:
    """Copy the hidden states to `features`, if they are wanted."""
    if features is not None:
        features[:rows] = workspace.hidden[:rows, : features.shape[1]]


def select(workspace: Workspace, chosen: torch.Tensor) -> None:
    """Copy the LM head's input of the rows `chosen` [outputs] to `workspace.selected`."""
    read, written = workspace.attention_input, workspace.selected
    written.rows[: len(chosen)] = read.rows[chosen]
    written.squares[: len(chosen)] = read.squares[chosen]


def run_lm_head(weights: Weights, workspace: Workspace, read: Normed, rows: int) -> None:
    """Write the logits of the first rows of `read` to `workspace.logits`."""
    if not run_logits(read, weights.head, workspace.logits, rows):
        project(read, weights.head, workspace.logits, rows, workspace.scratch)
