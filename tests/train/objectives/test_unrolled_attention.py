"""The merged attention of unrolled drafts equals its plain form: one softmax over all keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.train.loop.attention import causal_attention, packed_attention
from paceline.train.loop.batches import pack
from paceline.train.objectives.unrolled_attention import Flash, PackedFlash, PaddedFlash, UnrolledAttention

BATCH, SLOTS, HEADS, KV_HEADS, HEAD_DIM, STEPS = 2, 9, 6, 2, 16, 4
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class PlainAttention:
    """The same, with all scores in one matrix."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        group = query.shape[2] // key.shape[2]
        self.keys.append(key.repeat_interleave(group, 2))
        self.values.append(value.repeat_interleave(group, 2))
        slots = query.shape[1]
        true = torch.einsum("bqhd,bkhd->bhqk", query, self.keys[0])
        true = true.masked_fill(
            torch.ones(slots, slots, dtype=torch.bool, device=query.device).triu(1), float("-inf")
        )
        own = [torch.einsum("bqhd,bqhd->bhq", query, each)[..., None] for each in self.keys[1:]]
        weights = (torch.cat((true, *own), -1) * query.shape[-1] ** -0.5).softmax(-1)
        mixed = torch.einsum("bhqk,bkhd->bqhd", weights[..., :slots], self.values[0])
        for step, each in enumerate(self.values[1:]):
            mixed = mixed + weights[..., slots + step].transpose(1, 2)[..., None] * each
        return mixed


class PackedByPadding:
    """PackedFlash's contract by the CPU's kernel, for documents of SLOTS tokens each."""

    def __init__(self) -> None:
        self.padded = PaddedFlash()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *given: Any
    ) -> tuple[Any, ...]:
        bounds, same, longest, longest_key, dropout, causal, debug = given
        assert bounds.tolist() == same.tolist() == [0, SLOTS, 2 * SLOTS]
        assert (longest, longest_key, dropout, causal, debug) == (SLOTS, SLOTS, 0.0, True, False)
        output, log_sum, _ = self.padded.forward(*(self.apart(each) for each in (query, key, value)))
        return output.flatten(0, 1), log_sum.flatten(0, 1).T, "state", "unused", None

    def backward(self, *given: Any) -> tuple[torch.Tensor, ...]:
        *rows, log_sum, bounds, _, longest, _, _, causal, state, unused = given
        assert (longest, causal, state, unused) == (SLOTS, True, "state", "unused")
        assert bounds.dtype == torch.int32
        assert log_sum.is_contiguous()
        gradient, *inputs, output = (self.apart(each) for each in rows)
        found = self.padded.backward(gradient, inputs, output, self.apart(log_sum.T), None)
        return tuple(each.flatten(0, 1) for each in found)

    @staticmethod
    def apart(row: torch.Tensor) -> torch.Tensor:
        """[tokens, ...] as [documents, slots, ...]."""
        return row.reshape(BATCH, SLOTS, *row.shape[1:])


def given_steps(device: str) -> list[torch.Tensor]:
    """Query, key and value of each step: [batch, slots, heads, head_dim]."""
    generator = torch.Generator().manual_seed(3)
    sizes = [HEADS, KV_HEADS, KV_HEADS] * STEPS
    return [torch.randn(BATCH, SLOTS, size, HEAD_DIM, generator=generator).to(device) for size in sizes]


def outputs_and_gradients(
    attend: Any, given: list[torch.Tensor], dtype: torch.dtype, packed: bool = False
) -> list[torch.Tensor]:
    """Outputs of all steps, and gradients of all inputs; `packed`: the documents as one row."""
    inputs = [each.to(dtype).requires_grad_() for each in given]
    shaped = [each.reshape(1, -1, *each.shape[2:]) for each in inputs] if packed else inputs
    outputs = torch.stack([attend(*shaped[3 * step : 3 * step + 3]) for step in range(STEPS)])
    outputs = outputs.reshape(STEPS, BATCH, SLOTS, HEADS, HEAD_DIM)
    wanted = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(4)).to(outputs.device)
    return [outputs.detach(), *torch.autograd.grad((outputs.float() * wanted).sum(), inputs)]


def check_against_plain(
    flash: Flash, packed: bool, device: str, dtype: torch.dtype, tolerance: float
) -> None:
    given = given_steps(device)
    plain = outputs_and_gradients(PlainAttention(), given, torch.float32)
    merged = outputs_and_gradients(UnrolledAttention(flash), given, dtype, packed)
    for right, found in zip(plain, merged, strict=True):
        assert float((found.float() - right).abs().max() / right.abs().max()) < tolerance


def packed_flash(device: str) -> PackedFlash:
    bounds = torch.arange(BATCH + 1, dtype=torch.int32, device=device) * SLOTS
    return PackedFlash(bounds, SLOTS)


def test_padded_documents_equal_the_plain_form() -> None:
    check_against_plain(PaddedFlash(), False, "cpu", torch.float32, 1e-5)


@needs_gpu
def test_packed_documents_equal_the_plain_form() -> None:
    check_against_plain(packed_flash("cuda"), True, "cuda", torch.bfloat16, 0.02)


def test_packed_documents_reach_the_kernel_as_it_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = PackedByPadding()
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", kernel.forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", kernel.backward)
    check_against_plain(packed_flash("cpu"), True, "cpu", torch.float32, 1e-5)


@needs_gpu
@pytest.mark.parametrize("window", [None, 4])
def test_packed_attention_stays_within_documents(window: int | None) -> None:
    sizes = [5, 12, 3]
    batch = pack([[1] * size for size in sizes], [1, 1, 1], torch.device("cuda"))
    generator = torch.Generator().manual_seed(5)
    shapes = [(1, sum(sizes), heads, 64) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    row = [torch.randn(shape, generator=generator).to("cuda", torch.bfloat16) for shape in shapes]
    found = packed_attention(batch, row[0], row[1], row[2], window)
    alone = [
        causal_attention(query, key, value, window)
        for query, key, value in zip(*(each.split(sizes, 1) for each in row), strict=True)
    ]
    assert float((found - torch.cat(alone, 1)).abs().max()) < 0.02
