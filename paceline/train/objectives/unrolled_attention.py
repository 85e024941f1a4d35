"""Attention of unrolled drafts: causal over the true slots, and each slot over its own earlier steps.

A query of step k has two kinds of keys: those of step 0 of the slots up to its own, and one of each of its
own steps 1 to k. The first kind is ordinary causal attention, which a flash kernel computes together with the
logarithm L0 of its softmax's denominator. The few keys of the second kind are merged into its result, one
after the other:

    L = log(exp(L0) + exp(s))        output = exp(L0 - L) output0 + exp(s - L) v

The backward pass of a flash kernel needs the output and L only, so with the merged ones it gives the exact
gradients of the first kind. See tests/train/objectives/test_unrolled_attention.py for the plain form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from paceline.train.loop.sequences import fused


class UnrolledAttention:
    """Attention for one step after another; stores the keys and values of earlier steps."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []  # per step, [batch, slots, kv_heads, head_dim]
        self.values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.keys.append(key)
        self.values.append(value)
        mixed: Tensor = _Merged.apply(query, *self.keys, *self.values)  # type: ignore[no-untyped-call]
        return mixed


class _Merged(torch.autograd.Function):
    """Causal attention over the keys and values of step 0, merged with those of a slot's own steps."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, *keys_values: Tensor) -> Tensor:
        (key, *own_keys), (value, *own_values) = _halves(keys_values)
        heads_first = [each.transpose(1, 2) for each in (query, *_for_heads(query, key, value))]
        first, log_sum, *ctx.rest = _flash(*heads_first)
        output, log_sum = first.transpose(1, 2), log_sum.transpose(1, 2)
        for own_key, own_value in zip(own_keys, own_values, strict=True):
            output, log_sum = _compiled(_merge, query.device.type)(query, output, log_sum, own_key, own_value)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, output, log_sum, *keys_values)
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        query, output, log_sum, *keys_values = ctx.saved_tensors
        (key, *own_keys), (value, *own_values) = _halves(keys_values)
        keys, values = _for_heads(query, key, value)
        heads_first = [each.transpose(1, 2) for each in (gradient, query, keys, values, output)]
        parts = _flash_backward(heads_first, log_sum.transpose(1, 2).contiguous(), ctx.rest)
        of_query, of_key, of_value = (each.transpose(1, 2) for each in parts)
        if keys is not key:
            of_key, of_value = (_grouped(each, key.shape[2]).sum(3) for each in (of_key, of_value))
        of_keys, of_values = [of_key], [of_value]
        for own_key, own_value in zip(own_keys, own_values, strict=True):
            of_query, of_key, of_value = _compiled(_own_backward, query.device.type)(
                gradient, query, output, log_sum, of_query, own_key, own_value
            )
            of_keys.append(of_key)
            of_values.append(of_value)
        return of_query.to(query.dtype), *of_keys, *of_values


def _halves(both: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    return both[: len(both) // 2], both[len(both) // 2 :]


def _merge(
    query: Tensor, before: Tensor, log_sum: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and log sum [batch, slots, heads] with one more key for each slot: its own one; in float32."""
    score, base = _own_score(query, key), _grouped(log_sum, key.shape[2])
    merged = torch.logaddexp(base, score)
    mixed = (base - merged).exp()[..., None] * _grouped(before, key.shape[2]).float()
    mixed = mixed + (score - merged).exp()[..., None] * value[:, :, :, None].float()
    return mixed.reshape(query.shape), merged.flatten(2)


def _own_backward(
    gradient: Tensor, query: Tensor, output: Tensor, log_sum: Tensor, rest: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the query in float32, to which `rest` is added, and of an own key and value."""
    kv_heads = key.shape[2]
    share = (_own_score(query, key) - _grouped(log_sum, kv_heads)).exp()[..., None]
    wide = _grouped(gradient, kv_heads).float()
    gain = (wide * (value[:, :, :, None].float() - _grouped(output, kv_heads).float())).sum(-1, keepdim=True)
    of_score = share * gain * query.shape[-1] ** -0.5
    of_query = (of_score * key[:, :, :, None].float()).reshape(query.shape) + rest.float()
    of_key = (of_score * _grouped(query, kv_heads).float()).sum(3)
    return of_query, of_key.to(key.dtype), (share * wide).sum(3).to(value.dtype)


def _own_score(query: Tensor, key: Tensor) -> Tensor:
    """float32 [batch, slots, kv_heads, group]."""
    scale: float = query.shape[-1] ** -0.5
    return (_grouped(query, key.shape[2]).float() * key[:, :, :, None].float()).sum(-1) * scale


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
