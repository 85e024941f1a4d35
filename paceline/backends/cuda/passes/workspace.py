"""Workspace: the intermediate buffers of a pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace

import torch

from paceline.backends.cuda.kernels.attention.paged_attention import AttentionScratch, attention_scratch
from paceline.backends.cuda.kernels.experts.routing import Routing, routing_for
from paceline.backends.cuda.kernels.products.low_rank import LowRankBuffers, make_low_rank_buffers
from paceline.backends.cuda.kernels.products.matrix import Matrix, Normed, Scratch, padded_rows, scratch_for
from paceline.backends.cuda.kernels.products.packing import FP8_GROUP
from paceline.backends.cuda.kernels.recurrent.types import RecurrentBuffers, recurrent_shape
from paceline.backends.cuda.kernels.residual import plain
from paceline.backends.cuda.layers.latent import LatentBuffers, make_latent_buffers
from paceline.backends.cuda.layers.per_layer import PerLayerBuffers, make_per_layer_buffers
from paceline.backends.cuda.weights.model_weights import Layer, Weights
from paceline.backends.cuda.weights.shard import TILE
from paceline.backends.cuda.weights.tiled import padded_size


@dataclass(frozen=True)
class ResidualBuffers:
    """The buffers of kernels/residual.py besides the residual stream."""

    added: torch.Tensor  # float32 [rows, padded hidden] output of attention or MLP
    joined: torch.Tensor  # likewise, the sum of experts and a shared MLP that have their own norms
    ones: torch.Tensor  # float32 [rows, 1]
    unused: Normed  # written by kernels, never read


@dataclass(frozen=True)
class SplitBuffers:
    """The buffers of kernels/attention/split_heads.py."""

    projected: torch.Tensor  # float32 [rows, columns of the widest QKV projection]
    # by head size: queries [rows, heads, head_dim], attention output [rows, padded heads * head_dim]
    heads: Mapping[int, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Activations:
    """The activations of a pass: complete rows, or the columns that this rank computes."""

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

    local: Activations  # the columns that this rank computes; on one GPU the same buffers
    query: torch.Tensor  # [rows, own heads, head_dim]
    selected: Normed  # the rows whose logits are wanted
    scratch: Scratch
    attention: AttentionScratch
    routing: Routing | None  # of mixtures of experts
    residual: ResidualBuffers | None  # of families whose norms are kernels of their own
    recurrent: RecurrentBuffers | None  # of recurrent layers
    gates: torch.Tensor | None  # float32 [rows, any] gates of attention or shared experts
    latent: LatentBuffers | None  # of latent attention
    low_rank: LowRankBuffers | None  # of adapters
    split: SplitBuffers | None  # of layers with different head shapes
    per_layer: PerLayerBuffers | None  # of per-layer embeddings

    def heads_of(self, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers of a layer's queries and attention output."""
        if self.split is None or layer.split is None:
            return self.query, self.local.attention_output
        return self.split.heads[layer.split.dim]


@dataclass(frozen=True)
class Room:
    """The capacity of a workspace: the largest sizes of its passes."""

    rows: int
    longest: int  # tokens of a context
    attending: int  # leading rows that may be outside of prefill tiles
    outputs: int  # rows with logits
    nodes: int = 1  # stored recurrent states of tree nodes

    @classmethod
    def of(cls, rows: int, longest: int) -> Room:
        """Room for passes of at most `rows` rows of any kind."""
        return cls(rows, longest, rows, rows)

    def holding(self, other: Room) -> Room:
        """The larger of both in every size."""
        return Room(*(max(getattr(self, size.name), getattr(other, size.name)) for size in fields(self)))


def make_workspace(weights: Weights, room: Room) -> Workspace:
    """Buffers for passes that need this room."""
    config, device = weights.config, weights.device
    rows, outputs, attending = map(padded_rows, (room.rows, room.outputs, room.attending))
    mixtures = [layer.mixture for layer in weights.layers if layer.mixture is not None]
    sides = 2 if config.is_gated else 1
    intermediate = max((gates.padded_width // sides for gates, _ in _dense(weights)), default=0)
    gates = [gate for layer in weights.layers for gate in (layer.gate, layer.shared_gate) if gate is not None]
    gated = max((gate.padded_width for gate in gates), default=0)
    value_dim = config.latent.value_dim if config.latent else config.head_dim
    dims = [config.head_dim, *(shape.head_dim for shape in config.layer_shapes)]
    full = _activations(
        weights,
        rows,
        outputs,
        Widths(
            weights.hidden,
            padded_size(config.num_heads * value_dim),
            intermediate if weights.shard.size == 1 else padded_size(config.intermediate_size),
            config.vocab_size,
        ),
    )
    local, (heads, groups) = full, weights.head_groups
    if weights.shard.size > 1:
        hidden, vocab = weights.shard.width(config.hidden_size), weights.head.padded_width
        local = _activations(
            weights, rows, outputs, Widths(hidden, heads * config.head_dim, intermediate, vocab)
        )
    return Workspace(
        **{part.name: getattr(full, part.name) for part in fields(Activations)},
        local=local,
        query=torch.zeros((rows, heads, config.head_dim), dtype=weights.dtype, device=device),
        selected=_normed(weights, outputs, weights.hidden),
        scratch=scratch_for(weights.matrices, rows, device),
        attention=attention_scratch(
            attending,
            heads,
            groups,
            config.latent.rank if config.latent else max(dims),
            room.longest,
            device,
            rows,
        ),
        routing=routing_for(mixtures[0], rows, weights.dtype, device) if mixtures else None,
        residual=_residual_buffers(weights, rows) if weights.residual else None,
        recurrent=_recurrent_buffers(weights, rows, room.nodes) if weights.recurrent else None,
        gates=torch.zeros((rows, gated), device=device) if gated else None,
        latent=_latent_buffers(weights, rows),
        low_rank=_low_rank_buffers(weights, rows),
        split=_split_buffers(weights, rows),
        per_layer=_per_layer_buffers(weights, rows),
    )


def _dense(weights: Weights) -> list[tuple[Matrix, Matrix]]:
    """The matrices of dense MLPs: (gate_up, down)."""
    mlps = (layer for layer in weights.layers if layer.feeds_forward and layer.mixture is None)
    dense = [(layer.gate_up, layer.down) for layer in mlps]
    return dense + [layer.shared for layer in weights.layers if layer.shared is not None]


def _residual_buffers(weights: Weights, rows: int) -> ResidualBuffers:
    has_norms = any(layer.expert_norms is not None for layer in weights.layers)
    sizes = (rows, rows if has_norms else 0)
    added, joined = (torch.zeros((size, weights.hidden), device=weights.device) for size in sizes)
    ones, unused = torch.ones((rows, 1), device=weights.device), replace(weights, residual=None)
    return ResidualBuffers(added, joined, ones, _normed(unused, rows, weights.hidden))


def _latent_buffers(weights: Weights, rows: int) -> LatentBuffers | None:
    layer, like = weights.layers[0], weights.norm
    if layer.latent is None:
        return None
    return make_latent_buffers(layer.latent, layer.qkv, rows, like)


def _split_buffers(weights: Weights, rows: int) -> SplitBuffers | None:
    splits, like = [layer.split for layer in weights.layers if layer.split is not None], weights.norm
    if not splits:
        return None
    width = max(layer.qkv.padded_width for layer in weights.layers)
    heads = {
        split.dim: (
            like.new_zeros((rows, split.heads, split.dim)),
            like.new_zeros((rows, padded_size(split.heads * split.dim))),
        )
        for split in splits
    }
    return SplitBuffers(torch.zeros((rows, width), device=like.device), heads)


def _per_layer_buffers(weights: Weights, rows: int) -> PerLayerBuffers | None:
    gate, inputs = weights.layers[0].per_layer, weights.per_layer
    if inputs is None or gate is None:
        return None
    return make_per_layer_buffers(inputs, gate, rows, weights.norm)


def _low_rank_buffers(weights: Weights, rows: int) -> LowRankBuffers | None:
    rank = max(layer.adapters.largest_rank for layer in weights.layers)
    count, like = len(weights.adapters), weights.norm
    return make_low_rank_buffers(count, rank, rows, like) if rank else None


def _recurrent_buffers(weights: Weights, rows: int, nodes: int) -> RecurrentBuffers:
    config, dtype, device = weights.config, weights.dtype, weights.device
    assert config.recurrent is not None
    shape, layers = recurrent_shape(config.recurrent, config.hidden_size), len(config.recurrent_layers)
    recurrent = shape.config
    gated = next(layer.recurrence[1].depth for layer in weights.layers if layer.recurrence)

    def zeros(*sizes: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(sizes, dtype=kind, device=device)

    return RecurrentBuffers(
        zeros(layers, rows, shape.width, kind=dtype),
        zeros(layers, rows, shape.channels),
        zeros(rows, shape.values),
        zeros(rows, gated, kind=dtype),
        zeros(nodes, recurrent.value_heads, recurrent.key_dim, recurrent.value_dim),
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
    layer, dense = weights.layers[0], _dense(weights)
    gates, downs = [gates for gates, _ in dense], [down for _, down in dense]
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
    """The input buffer of these matrices, and its scales if they are in e4m3."""
    if not any(matrix.tiling.packing == "e4m3" for matrix in readers):
        return torch.zeros((rows, width), dtype=weights.dtype, device=weights.device), None
    scales = torch.zeros((rows // 16, width // FP8_GROUP, 16), device=weights.device)
    return torch.zeros((rows, width), dtype=torch.float8_e4m3fn, device=weights.device), scales


def _normed(weights: Weights, rows: int, width: int, *readers: Matrix) -> Normed:
    """The normed residual stream as these matrices read it."""
    config = weights.config
    if weights.residual is not None:
        states = torch.zeros((rows, width), dtype=weights.dtype, device=weights.device)
        return plain(states, torch.ones((rows, 1), device=weights.device))
    fp8, scales = _inputs(weights, rows, width, *readers)
    return Normed(
        torch.zeros((rows, width), dtype=weights.dtype, device=weights.device),
        torch.zeros((rows, width // TILE), device=weights.device),
        config.hidden_size,
        config.rms_norm_eps,
        *((None, None) if scales is None else (fp8, scales)),
    )


def workspace_bytes(weights: Weights, room: Room) -> int:
    """The bytes of a workspace with this capacity, counted on torch's meta device."""
    workspace = make_workspace(replace(weights, norm=weights.norm.to("meta")), room)
    return sum({id(tensor): tensor.nbytes for tensor in _tensors_of(workspace)}.values())


def _tensors_of(value: object) -> Iterator[torch.Tensor]:
    """All tensors within dataclasses, tuples and tables; a tensor may occur twice."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors_of(part)
    elif isinstance(value, Mapping):
        yield from _tensors_of([*value.values()])
    elif is_dataclass(value):
        yield from _tensors_of([getattr(value, part.name) for part in fields(value)])
