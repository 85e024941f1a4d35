"""Attention of unrolled drafts: causal over the true slots, and each slot over its own earlier steps.

A query of step k has two kinds of keys: those of step 0 of the slots up to its own, and one of each of its
own steps 1 to k. The first kind is ordinary causal attention, which a flash kernel computes together with the
logarithm L0 of its softmax's denominator. The few keys of the second kind, with scores s, are merged into its
result:

    L = log(exp(L0) + sum(exp(s)))        output = exp(L0 - L) output0 + sum(exp(s - L) v)

The backward pass of a flash kernel needs the output and L only, so with the merged ones it gives the exact
gradients of the first kind. See tests/train/objectives/test_unrolled_attention.py for the plain form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.train.loop.sequences import fused


class Flash(Protocol):
    """A kernel of causal attention. All have the axes [batch, slots, heads, head_dim]."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Output, log sum float32 [batch, slots, heads], and what else `backward` takes."""
        ...

    def backward(
        self, gradient: Tensor, inputs: Sequence[Tensor], output: Tensor, log_sum: Tensor, rest: Any
    ) -> Sequence[Tensor]:
        """Gradients of query, key and value, which are the `inputs`. `gradient`: the output's."""
        ...


class PaddedFlash:
    """The CPU's kernel, over sequences padded to one length. It wants as many KV heads as heads."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Any]:
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *self._heads_first(query, key, value), 0.0, True
        )
        return found[0].transpose(1, 2), found[1].transpose(1, 2), None

    def backward(
        self, gradient: Tensor, inputs: Sequence[Tensor], output: Tensor, log_sum: Tensor, rest: Any
    ) -> Sequence[Tensor]:
        query, key, value = inputs
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient.transpose(1, 2),
            *self._heads_first(query, key, value),
            output.transpose(1, 2),
            log_sum.transpose(1, 2).contiguous(),
            0.0,
            True,
        )
        of_query, of_key, of_value = (each.transpose(1, 2) for each in found)
        kv_heads = key.shape[2]
        return of_query, _grouped(of_key, kv_heads).sum(3), _grouped(of_value, kv_heads).sum(3)

    @staticmethod
    def _heads_first(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        group = query.shape[2] // key.shape[2]
        wide = query, key.repeat_interleave(group, 2), value.repeat_interleave(group, 2)
        return [each.transpose(1, 2) for each in wide]


@dataclass(frozen=True)
class PackedFlash:
    """A GPU's kernel, over documents packed into one row: the batch axis has one entry."""

    bounds: Tensor  # int32 [documents + 1] where they begin, and the end of the last one
    longest: int  # tokens of the longest

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Any]:
        bounds, longest = (self.bounds, self.bounds), (self.longest, self.longest)
        found = torch.ops.aten._flash_attention_forward(
            query[0], key[0], value[0], *bounds, *longest, 0.0, True, False
        )
        return found[0][None], found[1].T[None], found[2:4]

    def backward(
        self, gradient: Tensor, inputs: Sequence[Tensor], output: Tensor, log_sum: Tensor, rest: Any
    ) -> Sequence[Tensor]:
        bounds, longest = (self.bounds, self.bounds), (self.longest, self.longest)
        row = [each[0] for each in (gradient, *inputs, output)]
        found = torch.ops.aten._flash_attention_backward(
            *row, log_sum[0].T.contiguous(), *bounds, *longest, 0.0, True, *rest
        )
        return [each[None] for each in found]


class UnrolledAttention:
    """Attention for one step after another; stores the keys and values of earlier steps."""

    def __init__(self, flash: Flash) -> None:
        self._flash = flash
        self.keys: list[Tensor] = []  # per step, [batch, slots, kv_heads, head_dim]
        self.values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.keys.append(key)
        self.values.append(value)
        mixed: Tensor = _Merged.apply(self._flash, query, *self.keys, *self.values)  # type: ignore[no-untyped-call]
        return mixed


class _Merged(torch.autograd.Function):
    """Causal attention over the keys and values of step 0, merged with those of a slot's own steps."""

    @staticmethod
    def forward(ctx: Any, flash: Flash, query: Tensor, *keys_values: Tensor) -> Tensor:
        (key, *own_keys), (value, *own_values) = _halves(keys_values)
        output, log_sum, rest = flash.forward(query, key, value)
        if own_keys:
            own = torch.stack(own_keys), torch.stack(own_values)
            output, log_sum = _compiled(_merge, query.device.type)(query, output, log_sum, *own)
        ctx.flash, ctx.rest = flash, rest
        ctx.save_for_backward(query, output, log_sum, *keys_values)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, output, log_sum, *keys_values = ctx.saved_tensors
        (key, *own_keys), (value, *own_values) = _halves(keys_values)
        inputs = query, key, value
        of_query, of_key, of_value = ctx.flash.backward(gradient, inputs, output, log_sum, ctx.rest)
        of_keys, of_values = [of_key], [of_value]
        if own_keys:
            own = torch.stack(own_keys), torch.stack(own_values)
            of_query, of_own_keys, of_own_values = _compiled(_own_backward, query.device.type)(
                gradient, query, output, log_sum, of_query, *own
            )
            of_keys += of_own_keys.unbind()
            of_values += of_own_values.unbind()
        return None, of_query, *of_keys, *of_values


def _halves(both: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    return both[: len(both) // 2], both[len(both) // 2 :]


# `keys` and `values` below are those of a slot's own steps: [steps, batch, slots, kv_heads, head_dim].


def _merge(
    query: Tensor, before: Tensor, log_sum: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Output, as the query, and log sum [batch, slots, heads] with one more key of each own step."""
    kv_heads = keys.shape[3]
    scores, base = _own_scores(query, keys), _grouped(log_sum, kv_heads)
    merged = torch.logaddexp(base, scores.logsumexp(0))
    mixed = (base - merged).exp()[..., None] * _grouped(before, kv_heads).float()
    mixed = mixed + ((scores - merged).exp()[..., None] * values[:, :, :, :, None].float()).sum(0)
    return mixed.reshape(query.shape).to(query.dtype), merged.flatten(2)


def _own_backward(
    gradient: Tensor,
    query: Tensor,
    output: Tensor,
    log_sum: Tensor,
    of_query: Tensor,
    keys: Tensor,
    values: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the query, to which `of_query` is added, and of the own keys and values."""
    kv_heads = keys.shape[3]
    shares = (_own_scores(query, keys) - _grouped(log_sum, kv_heads)).exp()[..., None]
    wide = _grouped(gradient, kv_heads).float()
    gains = (wide * (values[:, :, :, :, None].float() - _grouped(output, kv_heads).float())).sum(-1, True)
    of_scores = shares * gains * query.shape[-1] ** -0.5
    own = (of_scores * keys[:, :, :, :, None].float()).sum(0).reshape(query.shape)
    of_keys = (of_scores * _grouped(query, kv_heads).float()).sum(4)
    of_values = (shares * wide).sum(4)
    return (own + of_query.float()).to(query.dtype), of_keys.to(keys.dtype), of_values.to(values.dtype)


def _own_scores(query: Tensor, keys: Tensor) -> Tensor:
    """float32 [steps, batch, slots, kv_heads, group]."""
    scale: float = query.shape[-1] ** -0.5
    return (_grouped(query, keys.shape[3]).float() * keys[:, :, :, :, None].float()).sum(-1) * scale


def _grouped(per_head: Tensor, kv_heads: int) -> Tensor:
    """[batch, slots, heads, ...] as [batch, slots, kv_heads, group, ...]."""
    return per_head.reshape(*per_head.shape[:2], kv_heads, -1, *per_head.shape[3:])


@cache
def _compiled(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    return fused(function) if device_type == "cuda" else function
