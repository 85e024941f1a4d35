"""The merged attention of unrolled drafts equals its plain form: one softmax over all keys."""

from __future__ import annotations

import pytest
import torch

from paceline.train.objectives.unrolled_attention import UnrolledAttention

BATCH, SLOTS, HEADS, KV_HEADS, HEAD_DIM, STEPS = 2, 9, 6, 2, 16, 4


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


ON_GPU = pytest.param(
    "cuda",
    torch.bfloat16,
    0.02,
    marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), [("cpu", torch.float32, 1e-5), ON_GPU])
def test_outputs_and_gradients_of_every_step_equal_the_plain_ones(
    device: str, dtype: torch.dtype, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(3)
    sizes = [HEADS, KV_HEADS, KV_HEADS] * STEPS
    given = [torch.randn(BATCH, SLOTS, size, HEAD_DIM, generator=generator).to(device) for size in sizes]
    wanted = torch.randn(STEPS, BATCH, SLOTS, HEADS, HEAD_DIM, generator=generator).to(device)
    found = []
    for attend, precision in ((PlainAttention(), torch.float32), (UnrolledAttention(), dtype)):
        inputs = [each.to(precision).requires_grad_() for each in given]
        outputs = torch.stack([attend(*inputs[3 * step : 3 * step + 3]) for step in range(STEPS)])
        found.append((outputs.detach(), *torch.autograd.grad((outputs.float() * wanted).sum(), inputs)))
    for plain, merged in zip(*found, strict=True):
        assert float((merged.float() - plain).abs().max() / plain.abs().max()) < tolerance
