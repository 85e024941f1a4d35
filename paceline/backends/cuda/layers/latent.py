"""Latent attention (MLA): weights, buffers, and the projections before and after attention.

Decode and prefill both use the absorbed form: paged_attention.py attends to the latents, a single KV head for
all query heads, and keys and values are never expanded per head. See transformer/latent.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.backends.cuda.kernels.attention.heads import Rotation
from paceline.backends.cuda.kernels.attention.latent import HeadMatrices, KeyRows, head_products, norm_queries
from paceline.backends.cuda.kernels.attention.latent_values import (
    Partials,
    can_merge,
    late_partials,
    merged_values,
)
from paceline.backends.cuda.kernels.attention.paged_attention import AttentionScratch
from paceline.backends.cuda.kernels.attention.row_tables import RowTables
from paceline.backends.cuda.kernels.attention.scoring import Scoring
from paceline.backends.cuda.kernels.products.linear import project
from paceline.backends.cuda.kernels.products.matrix import Matrix, Normed, Scratch
from paceline.backends.cuda.kernels.residual import plain
from paceline.backends.cuda.native.nvrtc import is_left_out
from paceline.models.config import LATENT_NORM_EPS, LatentConfig


@dataclass(frozen=True)
class LatentWeights:
    """A layer's weights besides the first product, [queries or their latent | RoPE key | KV latent]."""

    config: LatentConfig
    query: Matrix | None  # q_b_proj: from query latents; None: the first product gives queries
    query_norm: torch.Tensor | None  # [query rank]
    key_norm: torch.Tensor  # [rank]
    to_latents: HeadMatrices  # W_uk^T of every head [rank, nope]
    to_values: HeadMatrices  # W_uv of every head [value, rank]

    @property
    def query_size(self) -> int:
        """The numbers of all heads of a row's queries."""
        return len(self.to_values.weight) * (self.config.rope_dim + self.config.nope_dim)


@dataclass(frozen=True)
class LatentBuffers:
    """Intermediate results of latent attention."""

    projected: torch.Tensor  # [rows, width] output of the first product
    query_latents: torch.Tensor | None  # [rows, padded query rank] normed; padding is zero
    queries: torch.Tensor  # [rows, at least heads * (rope + nope)] before RoPE
    mixed: torch.Tensor  # [rows, heads * rank] output of attention
    ones: torch.Tensor  # float32 [rows, 1]


def make_latent_buffers(
    weights: LatentWeights, first: Matrix, rows: int, like: torch.Tensor
) -> LatentBuffers:
    """Zeroed buffers for passes of at most `rows` padded rows, in the dtype and on the device of `like`."""
    heads = len(weights.to_values.weight)

    def zeros(width: int) -> torch.Tensor:
        return like.new_zeros((rows, width))

    projected, query_latents = zeros(first.width), None
    queries = projected
    if weights.query is not None:
        query_latents, queries = zeros(weights.query.depth), zeros(weights.query.width)
    mixed = zeros(heads * weights.config.rank)
    return LatentBuffers(projected, query_latents, queries, mixed, torch.ones((rows, 1), device=like.device))


def project_latents(
    read: Normed,
    first: Matrix,
    weights: LatentWeights,
    rotation: Rotation,
    tables: RowTables,
    buffers: LatentBuffers,
    query: torch.Tensor,
    keys: torch.Tensor,
    scratch: Scratch,
) -> None:
    """Write absorbed queries to `query` [rows, heads, rope + rank], and keys to their KV slots."""
    rows, own = len(tables.positions), weights.config
    project(read, first, buffers.projected, rows, scratch)
    key_begin = own.query_rank or weights.query_size
    latents = buffers.query_latents
    if weights.query is not None and weights.query_norm is not None and latents is not None:
        norm_queries(buffers.projected, weights.query_norm, LATENT_NORM_EPS, latents, rows)
        project(plain(latents, buffers.ones), weights.query, buffers.queries, rows, scratch)
    queries = buffers.queries[:, : weights.query_size].view(-1, query.shape[1], own.rope_dim + own.nope_dim)
    norm, slots = (weights.key_norm, LATENT_NORM_EPS), tables.slot_mapping
    stored = KeyRows(buffers.projected, key_begin, *norm, slots, keys)
    head_products(queries, weights.to_latents, query, tables.positions, rotation, stored)


def late_merge(
    weights: LatentWeights | None,
    tables: RowTables,
    scratch: AttentionScratch,
    scoring: Scoring,
    earliest: int = 0,
) -> Partials | None:
    """With few rows, the partials that `attend` leaves unmerged for `project_values`; else None."""
    if weights is None or not can_merge(weights.to_values) or is_left_out("late_merge"):
        return None
    return late_partials(tables, len(weights.to_values.weight), scratch, scoring, earliest)


def project_values(
    weights: LatentWeights,
    buffers: LatentBuffers,
    output: torch.Tensor,
    positions: torch.Tensor,
    partials: Partials | None = None,
) -> None:
    """Write W_uv times every head's attended latents to `output` [rows, at least heads * value].

    `partials`: attention has left its result unmerged.
    """
    heads, width = len(weights.to_values.weight), weights.config.value_dim
    mixed = buffers.mixed.view(-1, heads, weights.config.rank)
    values = output[:, : heads * width].view(-1, heads, width)
    if partials is not None:
        merged_values(partials, weights.to_values, values, positions)
        return
    head_products(mixed, weights.to_values, values, positions)
