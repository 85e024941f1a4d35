"""The parts of the transformer, each against its definition written out in loops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.models.config import MoeConfig, RopeConfig
from paceline.models.families.config_reader import model_config
from paceline.models.transformer.attention import attend, rotate
from paceline.models.transformer.blocks import MLP, RMSNorm
from paceline.models.transformer.experts import MixtureOfExperts
from paceline.models.transformer.rope import rope_frequencies
from tests.tiny_families import FAMILIES, ROPES_BY_LENGTH

LLAMA3 = RopeConfig(theta=500.0, scaling="llama3", factor=8.0, original_max_position=64)


def take(name: str) -> torch.Tensor:
    """Weights of a block of 5 experts, hidden size 6, intermediate size 7, which depend on the name only."""
    shape = {"gate": (5, 6), "gate_proj": (7, 6), "up_proj": (7, 6), "down_proj": (6, 7)}[name.split(".")[-2]]
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode())))


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


ROPES = {
    "llama-llama3-rope": FAMILIES,
    "llama-linear-rope": FAMILIES,
    "llama-yarn-rope": FAMILIES,
    "llama-dynamic-rope": ROPES_BY_LENGTH,
    "phi3-longrope": ROPES_BY_LENGTH,
}


@pytest.mark.parametrize("length", [12, 60])
@pytest.mark.parametrize("family", ROPES)
def test_scaled_frequencies_are_those_of_transformers(family: str, length: int) -> None:
    """Within the original context and beyond it."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs = ROPES[family][family].config()
    rope = model_config(theirs.to_dict(), "config.json").for_context(length).rope
    expected, factor = ROPE_INIT_FUNCTIONS[rope.scaling](theirs, torch.device("cpu"), seq_len=length)
    np.testing.assert_allclose(rope_frequencies(rope, head_dim=10), expected.numpy(), rtol=1e-6)
    assert rope.attention_factor == pytest.approx(factor)


def test_plain_frequencies_fall_from_one_to_nearly_one_over_theta() -> None:
    frequencies = rope_frequencies(RopeConfig(theta=10000.0), head_dim=8)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, [1, 0.1, 0.01, 0.001], rtol=1e-6)


def test_ready_divisors_of_a_gguf_file_do_what_llama3_scaling_does() -> None:
    plain = RopeConfig(theta=500.0)
    divisors = rope_frequencies(plain, 10) / rope_frequencies(LLAMA3, 10)
    ready = replace(plain, frequency_divisors=tuple(divisors.tolist()))
    np.testing.assert_allclose(rope_frequencies(ready, 10), rope_frequencies(LLAMA3, 10), rtol=1e-6)


def test_rotation_turns_each_pair_by_its_angle() -> None:
    heads, angles = normal(4, 2, 6), normal(4, 1, 3)
    pairs = torch.complex(heads[..., :3], heads[..., 3:]) * torch.polar(torch.ones_like(angles), angles)
    turned = rotate(heads, (angles.cos(), angles.sin()))
    torch.testing.assert_close(turned, torch.cat((pairs.real, pairs.imag), dim=-1))


def test_attention_mixes_the_visible_values_of_the_shared_key_head() -> None:
    query, keys, values = normal(3, 4, 6), normal(5, 2, 6), normal(5, 2, 6) + 1
    mask = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 1, 0], [0, 0, 1, 1, 1]], dtype=torch.bool)
    mixed = attend(query, keys, values, mask)
    for row in range(3):
        for head in range(4):
            shared, seen = head // 2, mask[row]
            weights = (keys[seen, shared] @ query[row, head] / 6**0.5).softmax(0)
            torch.testing.assert_close(mixed[row, head], weights @ values[seen, shared])


@pytest.mark.parametrize("normalize", [True, False])
def test_a_row_is_the_weighted_sum_of_its_most_probable_experts(normalize: bool) -> None:
    moe = MoeConfig(5, 2, 7, normalize, frozenset({0}))
    block = MixtureOfExperts(take, "mlp", 6, moe, "silu")
    experts = [MLP(take, f"mlp.experts.{expert}", 6, 7) for expert in range(5)]
    hidden = normal(9, 6)
    for row, output in zip(hidden, block(hidden), strict=True):
        probabilities = (take("mlp.gate.weight") @ row).softmax(0)
        best = probabilities.argsort(descending=True)[:2].tolist()
        total = sum(probabilities[expert] for expert in best) if normalize else 1
        expected = sum(probabilities[expert] / total * experts[expert](row) for expert in best)
        torch.testing.assert_close(output, expected)


def test_a_norm_sums_in_float32_whatever_the_dtype() -> None:
    norm = RMSNorm(lambda name: torch.ones(4096, dtype=torch.bfloat16), "norm", eps=1e-6)
    # 4096 equal squares: summed in bfloat16 they would stop growing long before the end
    normed = norm(torch.full((1, 4096), 3.0, dtype=torch.bfloat16))
    assert normed.dtype == torch.bfloat16
    assert torch.all(normed == 1)
