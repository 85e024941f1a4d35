"""Loads LoRA adapters on the device: for each product, the down and up matrices of all adapters, stacked.

Each rank has the complete down matrices, because it has their inputs, and its own rows of the up matrices, as
it has of the product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from paceline.backends.cuda.kernels.products.low_rank import CHUNK, LowRank
from paceline.backends.cuda.kernels.products.matrix import Matrix, spread_heads
from paceline.backends.cuda.layers.layer import Layer, LayerAdapters, head_order, reordered
from paceline.backends.cuda.weights.model_weights import Weights
from paceline.backends.cuda.weights.tiled import padded_line, pair_lines
from paceline.errors import BackendError
from paceline.models.config import ModelConfig
from paceline.models.files.layout import expected_tensors
from paceline.models.lora import Adapter

PRODUCTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def check_adapters(config: ModelConfig, adapters: Sequence[Adapter]) -> None:
    """BackendError if the kernels cannot add what one of these adapters adds."""
    if adapters and config.recurrent is not None:
        raise BackendError(
            f"The cuda backend cannot run adapter {adapters[0].name}: its kernels for models with recurrent "
            f"layers ({config.family}) do not add what an adapter adds. Use --backend torch or cpu, or merge "
            "the adapter into the model and serve that."
        )
    modules = [module for own in PRODUCTS.values() for module in own]
    if config.latent is not None or config.layer_shapes:  # heads of several sizes were never tried
        modules = [module for module in modules if not module.startswith("self_attn.")]
    for adapter in adapters:
        for name in adapter.matrices:
            if name.split(".", 3)[3] not in modules:
                raise BackendError(
                    f"The cuda backend cannot run adapter {adapter.name}, which changes {name}: it adapts "
                    "dense MLPs and attention, but for latents, heads of several sizes and gates. "
                    "Use --backend torch or cpu, or merge the adapter into the model and serve that."
                )


def with_adapters(weights: Weights, adapters: Sequence[Adapter]) -> Weights:
    """The weights with these adapters."""
    shapes = dict(expected_tensors(weights.config))
    layers = [
        replace(layer, adapters=_layer_adapters(weights, layer, index, adapters, shapes))
        for index, layer in enumerate(weights.layers)
    ]
    numbers = {adapter.name: number for number, adapter in enumerate(adapters)}
    return replace(weights, layers=tuple(layers), adapters=numbers)


def _layer_adapters(
    weights: Weights,
    layer: Layer,
    index: int,
    adapters: Sequence[Adapter],
    shapes: Mapping[str, tuple[int, ...]],
) -> LayerAdapters:
    found: dict[str, LowRank] = {}
    for product, modules in PRODUCTS.items():
        names = [f"model.layers.{index}.{module}" for module in modules]
        names = [name for name in names if f"{name}.weight" in shapes]  # not all layers have keys
        if any(name in adapter.matrices for adapter in adapters for name in names):
            outputs = [shapes[f"{name}.weight"][0] for name in names]
            matrix: Matrix = getattr(layer, product)
            down, ups = _stacked(adapters, names, outputs, matrix.depth)
            ups = [up[:, rows] for up, rows in zip(ups, _own_rows(weights, product, outputs), strict=True)]
            is_tiled = layer.split is None if product == "qkv" else weights.config.is_gated
            tiled = product if is_tiled else "rows"
            up = _in_tile_order(tiled, ups, matrix, weights.config, index)
            found[product] = LowRank(*(own.to(weights.device, weights.dtype) for own in (down, up)))
    return LayerAdapters(**found)


def _own_rows(weights: Weights, product: str, outputs: Sequence[int]) -> list[slice]:
    """The rows of the matrices of a product that this rank has."""
    if product == "qkv" and weights.shard.size > 1:
        queries, shared_heads = weights.shard.head_rows(weights.config)
        return [queries, shared_heads, shared_heads]
    return [weights.shard.rows(size) for size in outputs]


def _stacked(
    adapters: Sequence[Adapter], names: Sequence[str], outputs: Sequence[int], depth: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The matrices of a product's projections (for QKV three), stacked along the rank: down [adapters, rank,
    depth], and for each projection up [adapters, outputs, rank], zero in the ranks of other projections."""
    changes = [[adapter.matrices.get(name) for name in names] for adapter in adapters]
    ranks = [max((len(own.down) for own in part if own), default=0) for part in zip(*changes, strict=True)]
    rank = -(-sum(ranks) // CHUNK) * CHUNK
    down = torch.zeros((len(adapters), rank, depth))
    ups = [torch.zeros((len(adapters), size, rank)) for size in outputs]
    for number, parts in enumerate(changes):
        for part, change in enumerate(parts):
            if change is not None:
                first, count = sum(ranks[:part]), len(change.down)
                down[number, first : first + count, : change.down.shape[1]] = torch.from_numpy(change.down)
                ups[part][number, :, first : first + count] = torch.from_numpy(change.up)
    return down, ups


def _in_tile_order(
    product: str, ups: list[torch.Tensor], matrix: Matrix, config: ModelConfig, index: int
) -> torch.Tensor:
    """The up matrices as one [adapters, padded width, rank], in the order of a matrix's columns."""
    lines = [own.transpose(0, 1) for own in ups]  # [outputs, adapters, rank]
    if product == "qkv":
        order = head_order(config, config.rope_of(index), lines[0].device)
        if order is not None:  # of queries and keys
            lines[:2] = [reordered(own, config.head_dim, order) for own in lines[:2]]
        tiled = spread_heads(torch.cat(lines), config.head_dim, matrix.tiling.columns)
    elif product == "gate_up":
        tiled = pair_lines([padded_line(own, matrix.padded_width // 2) for own in lines], matrix)
    else:
        tiled = padded_line(torch.cat(lines), matrix.padded_width)
    return tiled.transpose(0, 1).contiguous()
