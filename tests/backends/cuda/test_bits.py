"""A token's bits are the same in a pass of one row and in one of hundreds, with the sizes of real models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from paceline.models.config import (
    AttentionShape,
    LatentConfig,
    ModelConfig,
    MoeConfig,
    PerLayerInput,
    RopeConfig,
    Temperature,
)
from paceline.models.files.layout import expected_tensors
from tests.backends.driver import Driven, drive, run

LENGTH, PAGES_EACH, COMPANY = 100, 19, 300
VOCAB_SIZE = 700
ROPE = RopeConfig(10000.0)
LATENTS: dict[int, dict[str, Any]] = {
    query_rank: {
        "attention_scale": 192**-0.5,
        "latent": LatentConfig(rank=512, query_rank=query_rank, rope_dim=64, nope_dim=128, value_dim=128),
    }
    for query_rank in (0, 1536)
}
ROPE_64 = RopeConfig(10000.0, dim=64)
EXPERTS = MoeConfig(128, 8, 768, True, frozenset({0, 1}))
GEMMA4: dict[str, Any] = {
    "activation": "gelu_tanh",
    "norm_placement": "sandwich",
    "attention_scale": 1.0,
    "qk_norm": True,
    "value_norm": True,
    "layer_scales": True,
}
# two layers with keys and values each, so that keys of the second tell all that happened in the first
SHAPES = {
    "smollm2-135m": ModelConfig("llama", VOCAB_SIZE, 576, 2, 9, 3, 64, 1536, 1e-5, ROPE, 512, True),
    "qwen3-0.6b": ModelConfig(
        "qwen3", VOCAB_SIZE, 1024, 2, 16, 8, 128, 3072, 1e-6, ROPE, 512, True, qk_norm=True
    ),
    "qwen2.5-1.5b": ModelConfig(
        "qwen2", VOCAB_SIZE, 1536, 2, 12, 2, 128, 8960, 1e-6, ROPE, 512, True, qkv_bias=True
    ),
    "llama-3.1-8b": ModelConfig("llama", VOCAB_SIZE, 4096, 2, 32, 8, 128, 14336, 1e-5, ROPE, 512, True),
    "deepseek-v2-lite": ModelConfig(
        "deepseek_v2", VOCAB_SIZE, 2048, 2, 16, 1, 576, 1408, 1e-6, ROPE_64, 512, True, **LATENTS[0]
    ),
    "qwen3-30b-a3b": ModelConfig(
        "qwen3_moe", VOCAB_SIZE, 2048, 2, 32, 4, 128, 6144, 1e-6, ROPE, 512, True, qk_norm=True, moe=EXPERTS
    ),
    "deepseek-v2-lite with experts": ModelConfig(
        "deepseek_v2",
        *(VOCAB_SIZE, 2048, 2, 16, 1, 576, 1408, 1e-6, ROPE_64, 512, True),
        **LATENTS[0],
        moe=MoeConfig(64, 6, 1408, False, frozenset({1}), shared_intermediate_size=2816),
    ),
    "gemma4-e2b": ModelConfig(  # the third layer reads the keys and values of the second
        *("gemma4_text", VOCAB_SIZE, 1536, 3, 8, 1, 256, 6144, 1e-6, ROPE, 512, True),
        **GEMMA4,
        embedding_scale=1536**0.5,
        sliding_windows=(64, None, None),
        layer_ropes=(RopeConfig(dim=256), *(RopeConfig(1e6, "proportional", dim=512, angles=64),) * 2),
        layer_shapes=(AttentionShape(256, 1), AttentionShape(512, 1), AttentionShape(512, 1, shared_with=1)),
        intermediate_sizes=(6144, 6144, 12288),
        per_layer_input=PerLayerInput(256, VOCAB_SIZE),
    ),
    "gemma4-31b": ModelConfig(
        *("gemma4_unified_text", VOCAB_SIZE, 5376, 2, 32, 16, 256, 21504, 1e-6, ROPE, 512, True),
        **GEMMA4,
        embedding_scale=5376**0.5,
        sliding_windows=(64, None),
        layer_ropes=(RopeConfig(dim=256), RopeConfig(1e6, "proportional", dim=512, angles=64)),
        layer_shapes=(AttentionShape(256, 16), AttentionShape(512, 4, values_are_keys=True)),
    ),
    "llama4-scout": ModelConfig(
        *("llama4_text", VOCAB_SIZE, 5120, 2, 40, 8, 128, 8192, 1e-5, ROPE, 512, True),
        layer_ropes=(ROPE, None),
        attention_chunks=(64, None),
        temperature=Temperature(0.1, 32, 1, with_rope=False),
        unit_qk=True,
        moe=MoeConfig(
            *(4, 1, 8192, False, frozenset({0, 1})),
            scoring="sigmoid",
            shared_intermediate_size=8192,
            scaled_inputs=True,
        ),
    ),
    "deepseek-v3": ModelConfig(
        "deepseek_v3", VOCAB_SIZE, 7168, 2, 128, 1, 576, 2048, 1e-6, ROPE_64, 512, True, **LATENTS[1536]
    ),
}
CASES = [(shape, "none") for shape in SHAPES] + [
    ("llama-3.1-8b", packing) for packing in ("fp8", "int8", "int4")
]
CASES.append(("deepseek-v3", "fp8_blocks"))


def random_backend(shape: str, quantization: str):  # type: ignore[no-untyped-def]
    from paceline.backends.cuda.backend import CudaBackend
    from paceline.backends.cuda.weights.model_weights import load_weights, packing_for

    config = SHAPES[shape]
    shapes, generator = dict(expected_tensors(config)), torch.Generator(device="cuda").manual_seed(1)

    def take(name: str) -> torch.Tensor:
        noise = torch.randn(shapes[name], generator=generator, device="cuda")
        values = 1 + 0.2 * noise if noise.ndim == 1 else noise * noise.shape[1] ** -0.5
        return values if quantization != "none" and "_proj.weight" in name else values.bfloat16()

    return CudaBackend(load_weights(config, take, packing_for(quantization, lambda name: "")), max_rows=512)


def first_difference(request: Driven, expected: Driven, ours: np.ndarray, logits: np.ndarray) -> str:
    """Where two requests with the same tokens part: an index of a layer's keys or values, or a row of logits;
    empty: nowhere."""
    places, others = ([own.place(index) for index in range(LENGTH)] for own in (request, expected))
    for layer in range(2):
        for kind, stored in zip(("keys", "values"), request.pool.layer(layer), strict=True):  # type: ignore[attr-defined]
            different = (stored[places] != stored[others]).flatten(1).any(1).nonzero()
            if len(different):
                return f"{kind} of layer {layer}, index {int(different[0])}"
    different_rows = np.flatnonzero((ours != logits).any(1))
    return f"logits of row {different_rows[0]}" if len(different_rows) else ""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter multiplies by numpy")
@pytest.mark.parametrize(("shape", "quantization"), CASES)
def test_a_token_has_the_same_bits_in_chunks_of_any_size_and_any_batch(shape: str, quantization: str) -> None:
    backend = random_backend(shape, quantization)
    alone, *others, company = drive(backend, PAGES_EACH, count=7)
    tokens = np.random.default_rng(2).integers(0, VOCAB_SIZE, COMPANY).tolist()
    expected = np.concatenate([alone.extend([token]) for token in tokens[:LENGTH]])
    chunks: Sequence[tuple[Sequence[int], int]] = [  # how the text is cut, and rows of another beside each
        ((LENGTH,), 0),
        ((1,) * 20 + (20, 60), 20),
        ((17, 30, 53), 3),
        ((LENGTH,), COMPANY),
        ((1,) * 10 + (90,), 127),
    ]
    for request, (lengths, rows) in zip(others, chunks, strict=True):
        logits = []
        for length in lengths:
            request.ask(tokens[request.context_length : request.context_length + length])
            pair = [company.ask(tokens[:rows]), request] if rows else [request]
            logits.append(run(pair).logits[-length:].copy())
            request.commit(range(length))
        assert not first_difference(request, alone, np.concatenate(logits), expected), (lengths, rows)
