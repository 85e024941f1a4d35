"""Attention of unrolled drafts: causal over the true slots, and each slot over its own earlier steps.

A query of step k has two kinds of keys: those of step 0 of the slots up to its own, and one of each of its
own steps 1 to k. The first kind is ordinary causal attention, which a flash kernel computes together with the
logarithm L0 of its softmax's denominator. The few keys of the second kind are merged into its result:

    L = log(exp(L0) + sum_m exp(s_m))        output = exp(L0 - L) output0 + sum_m exp(s_m - L) v_m

The backward pass of a flash kernel needs the output and L only, so with the merged ones it gives the exact
gradients of the first kind. See tests/train/test_unrolled_attention.py for the plain form.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from paceline.train.sequences import fused

OwnSteps = tuple[Tensor, Tensor]  # keys and values [steps, batch, slots, kv_heads, head_dim]


class UnrolledAttention:
    """Attention for one step after another; stores the keys and values of earlier steps."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []  # per step, [batch, slots, kv_heads, head_dim]
        self.values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.keys.append(key)
        self.values.append(value)
        own = (torch.stack(self.keys[1:]), torch.stack(self.values[1:])) if len(self.keys) > 1 else ()
        mixed: Tensor = _Merged.apply(query, self.keys[0], self.values[0], *own)  # type: ignore[no-untyped-call]
        return mixed


class _Merged(torch.autograd.Function):
    """Causal attention over keys and values [batch, slots, kv_heads, head_dim], merged with own steps."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *own: Tensor) -> Tensor:
        heads_first = [each.transpose(1, 2) for each in (query, *_for_heads(query, key, value))]
        first, log_sum, *ctx.rest = _flash(*heads_first)
        output = first.transpose(1, 2)
        if own:
            output, log_sum = _compiled(_merge, query.device.type)(query, output, log_sum, *own)
        ctx.save_for_backward(query, key, value, output, log_sum, *own)
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        query, key, value, output, log_sum, *own = ctx.saved_tensors
        keys, values = _for_heads(query, key, value)
        heads_first = [each.transpose(1, 2) for each in (gradient, query, keys, values, output)]
        parts = _flash_backward(heads_first, log_sum, ctx.rest)
        of_query, of_key, of_value = (each.transpose(1, 2) for each in parts)
        if keys is not key:
            of_key, of_value = (_grouped(each, key.shape[2]).sum(3) for each in (of_key, of_value))
        if not own:
            return of_query, of_key, of_value
        own_backward = _compiled(_own_backward, query.device.type)
        of_query, *of_own = own_backward(gradient, query, output, log_sum, of_query, *own)
        return of_query, of_key, of_value, *of_own


def _merge(query: Tensor, first: Tensor, log_sum: Tensor, keys: Tensor, values: Tensor) -> OwnSteps:
    """The merged output, shaped as the query, and log sum [batch, heads, slots]."""
    scores = _own_scores(query, keys)
    base = _grouped(log_sum.transpose(1, 2), keys.shape[3])  # [batch, slots, kv_heads, group]
    merged = torch.logaddexp(base, scores.logsumexp(0))
    shares = (scores - merged).exp()[..., None]
    mixed = (base - merged).exp()[..., None] * _grouped(first, keys.shape[3]).float()
    mixed = mixed + (shares * values[:, :, :, :, None].float()).sum(0)
    return mixed.to(query.dtype).reshape(query.shape), merged.flatten(2).transpose(1, 2).contiguous()


def _own_backward(
    gradient: Tensor,
    query: Tensor,
    output: Tensor,
    log_sum: Tensor,
    rest: Tensor,
    keys: Tensor,
    values: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the query, to which `rest` is added, and of the own keys and values."""
    base = _grouped(log_sum.transpose(1, 2), keys.shape[3])
    shares = (_own_scores(query, keys) - base).exp()[..., None]  # [steps, batch, slots, kv_heads, group, 1]
    wide = _grouped(gradient, keys.shape[3]).float()
    mean = (wide * _grouped(output, keys.shape[3]).float()).sum(-1, keepdim=True)
    each = (wide * values[:, :, :, :, None].float()).sum(-1, keepdim=True)
    of_scores = shares * (each - mean) * query.shape[-1] ** -0.5
    of_query = (of_scores * keys[:, :, :, :, None].float()).sum(0).reshape(query.shape) + rest.float()
    of_keys = (of_scores * _grouped(query, keys.shape[3]).float()).sum(4)
    of_values = (shares * wide).sum(4)
    return of_query.to(query.dtype), of_keys.to(keys.dtype), of_values.to(values.dtype)


def _own_scores(query: Tensor, keys: Tensor) -> Tensor:
    """float32 [steps, batch, slots, kv_heads, group]."""
    products = _grouped(query, keys.shape[3]).float() * keys[:, :, :, :, None].float()
    scale: float = query.shape[-1] ** -0.5
    return products.sum(-1) * scale


def _grouped(per_head: Tensor, kv_heads: int) -> Tensor:
    """[batch, slots, heads, ...] as [batch, slots, kv_heads, group, ...]."""
    return per_head.reshape(*per_head.shape[:2], kv_heads, -1, *per_head.shape[3:])


@cache
def _compiled(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    return fused(function) if device_type == "cuda" else function


# Flash attention, heads first: [batch, heads, slots, head_dim]. A GPU's kernel shares KV heads.


def _for_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as the kernel of this device takes them."""
    group = query.shape[2] // key.shape[2]
    if query.is_cuda or group == 1:
        return key, value
    return key.repeat_interleave(group, 2), value.repeat_interleave(group, 2)


def _flash(query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, ...]:
    """Output, log sum [batch, heads, slots], and what else the backward pass takes."""
    if query.is_cuda:
        found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)
        return found[:8]  # type: ignore[no-any-return]
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
        query, key, value, 0.0, True
    )


def _flash_backward(given: list[Tensor], log_sum: Tensor, rest: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. `given`: the output's gradient, these three, and the output."""
    if log_sum.is_cuda:
        sequences, random = rest[:4], rest[4:]
        backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
        return backward(*given, log_sum, *sequences, 0.0, True, *random)  # type: ignore[no-any-return]
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(*given, log_sum, 0.0, True)  # type: ignore[no-any-return]
