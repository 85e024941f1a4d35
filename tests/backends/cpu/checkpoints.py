"""Checkpoints made in memory: blocks as a GGUF file holds them, and sizes the tiny families leave out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np

from paceline.models.checkpoint import Checkpoint, Tensor
from paceline.models.config import LatentConfig, ModelConfig, MoeConfig, RecurrentConfig, RopeConfig
from paceline.models.files.layout import expected_tensors
from paceline.models.gguf.blocks import FORMATS
from paceline.models.gguf.reader import GgufTensor

# Where a block has its half floats: the scale, and the scale of the minimums where there are any.
HALVES_AT = {"Q4_0": (0,), "Q8_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2)}
HALVES_AT |= {"IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": ()}
HALVES_AT |= {"Q2_K": (80, 82), "Q3_K": (108,), "Q5_K": (0, 2), "Q6_K": (208,)}

ROPE = RopeConfig(theta=1000.0)
SIZES = {"num_layers": 2, "rms_norm_eps": 1e-5, "rope": ROPE, "max_position": 256}

# Deep enough for blocks of 256; every format has a matrix, and a head is a whole number of vectors.
BLOCKS = ModelConfig(
    family="llama",
    vocab_size=300,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=512,
    tie_embeddings=False,
    **SIZES,
)
KINDS = {
    "embed_tokens": "Q4_K",
    "q_proj": "Q4_0",
    "k_proj": "Q4_1",
    "v_proj": "Q6_K",
    "o_proj": "Q4_K",
    "gate_proj": "Q8_0",
    "up_proj": "Q4_1",
    "down_proj": "Q4_K",
    "lm_head": "Q6_K",
}
# Every size ends in the first half of a group of 32, so that its last group has one tile of two.
UNEVEN = ModelConfig(
    family="llama",
    vocab_size=65,
    hidden_size=70,
    num_heads=5,
    num_kv_heads=1,
    head_dim=20,
    intermediate_size=100,
    tie_embeddings=False,
    **SIZES,
)

# Blocks that no family has together: norms after experts, sinks under a soft cap, a part of a head turned
ALL_BLOCKS = ModelConfig(
    family="glm4_moe",
    vocab_size=90,
    hidden_size=52,
    num_heads=6,
    num_kv_heads=2,
    head_dim=12,
    intermediate_size=70,
    tie_embeddings=True,
    qkv_bias=True,
    output_bias=True,
    joint_qk_norm=True,
    unit_qk=True,
    value_norm=True,
    sliding_windows=(9, None),
    attention_chunks=(None, 11),
    activation="gelu_tanh",
    attention_sinks=True,
    norm="layer",
    norm_placement="sandwich",
    layer_ropes=(RopeConfig(theta=500.0, dim=8), None),
    attention_scale=0.4,
    attention_softcap=3.0,
    logits_softcap=4.0,
    embedding_scale=3.0,
    residual_scale=0.7,
    logits_scale=1.5,
    moe=MoeConfig(
        num_experts=6,
        experts_per_token=2,
        intermediate_size=40,
        normalize_weights=False,
        layers=frozenset({1}),
        scoring="sigmoid",
        correction_bias=True,
        groups=3,
        chosen_groups=2,
        weight_scale=1.3,
        shared_intermediate_size=100,
        biases=True,
        scaled_inputs=True,
    ),
    **SIZES,
)

# experts beside an MLP, through norms of their own, as in Gemma 4
NORMED_EXPERTS = replace(
    ALL_BLOCKS,
    norm="rms",
    moe=MoeConfig(
        num_experts=6,
        experts_per_token=2,
        intermediate_size=40,
        normalize_weights=True,
        layers=frozenset({0, 1}),
        shared_intermediate_size=70,
        own_norms=True,
    ),
)

# A recurrent layer of each kind, then one that attends; heads are no multiples of a vector
HEADS = {"key_heads": 2, "value_heads": 6, "key_dim": 18, "value_dim": 22}
RECURRENCES = {
    "short_conv": RecurrentConfig("short_conv", frozenset({0}), 3, conv_bias=True),
    "gated_delta": RecurrentConfig("gated_delta", frozenset({0}), 4, **HEADS),
    "mamba2": RecurrentConfig("mamba2", frozenset({0}), 4, conv_bias=True, norm_groups=2, **HEADS),
}


def floats(values: np.ndarray) -> GgufTensor:
    """An array as a tensor of a file."""
    values = np.ascontiguousarray(values, np.float32)
    return GgufTensor(values.shape, "F32", values.view(np.uint8).reshape(len(values), -1))


def quantized(values: np.ndarray, kind: str) -> GgufTensor:
    """A matrix quantized by the gguf package."""
    blocks = gguf.quants.quantize(values.astype(np.float32), gguf.GGMLQuantizationType[kind])
    return GgufTensor(values.shape, kind, blocks.view(np.uint8))


def random_blocks(kind: str, rows: int, depth: int, seed: int = 3) -> GgufTensor:
    """A matrix whose blocks are random bytes but for the scales, which are any finite halves."""
    random, form = np.random.default_rng(seed), FORMATS[kind]
    if form.block_size == 1:
        return quantized(random.standard_normal((rows, depth), dtype=np.float32), kind)
    blocks = random.integers(0, 256, (rows, depth // form.block_size, form.block_bytes)).astype(np.uint8)
    if kind == "MXFP4":  # its scale is an exponent, less 127
        blocks[:, :, 0] = random.integers(103, 132, blocks.shape[:2])
    for place in HALVES_AT[kind]:
        # from the smallest halves there are to large ones, of both signs
        scales = 2.0 ** random.uniform(-24, 4, blocks.shape[:2]) * random.choice([-1, 1], blocks.shape[:2])
        blocks[:, :, place : place + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return GgufTensor((rows, depth), kind, blocks.reshape(rows, -1))


def _scaled_blocks(kind: str, rows: int, depth: int, seed: int) -> GgufTensor:
    """A matrix of random blocks whose values have mean 0 and the size of 1 / sqrt(depth)."""
    if kind not in ("Q4_K", "Q6_K"):  # which the gguf package cannot write
        values = np.random.default_rng(seed).standard_normal((rows, depth)) / np.sqrt(depth)
        return quantized(values, kind)
    tensor, form = random_blocks(kind, rows, depth, seed), FORMATS[kind]
    blocks = tensor.data.reshape(-1, form.block_bytes).copy()
    scale = {"Q4_K": 1 / 190, "Q6_K": 1 / 1400}[kind] / np.sqrt(depth)
    for place, factor in zip(HALVES_AT[kind], (1, 7.5), strict=False):
        blocks[:, place : place + 2] = np.array([scale * factor], np.float16).view(np.uint8)
    return GgufTensor((rows, depth), kind, blocks.reshape(rows, -1))


def _checkpoint(config: ModelConfig, kinds: Mapping[str, str]) -> Checkpoint:
    """Random tensors of the config, matrices in the kinds given by the last part of their names."""
    random, tensors = np.random.default_rng(7), dict[str, Tensor]()
    for seed, (name, shape) in enumerate(expected_tensors(config)):
        kind = kinds.get(name.split(".")[-2], "F32")
        if kind != "F32":
            tensors[name] = _scaled_blocks(kind, *shape, seed)
        elif len(shape) == 2:
            tensors[name] = floats(random.standard_normal(shape) / np.sqrt(shape[1]))
        else:
            tensors[name] = floats(1 + 0.2 * random.standard_normal(shape))
    return Checkpoint(config, tensors, Path("made in memory"))


def blocks_checkpoint() -> Checkpoint:
    """A model with a matrix of every format the tiles know."""
    return _checkpoint(BLOCKS, KINDS)


def uneven_checkpoint() -> Checkpoint:
    """A model whose sizes all leave half of their last group empty."""
    return _checkpoint(UNEVEN, {})


def recurrent_checkpoint(kind: str) -> Checkpoint:
    """A model with a recurrent layer of this kind."""
    config = replace(UNEVEN, recurrent=RECURRENCES[kind], attention_gate=kind == "gated_delta")
    return _checkpoint(config, {})


def latent_checkpoint() -> Checkpoint:
    """A model with latent attention; sizes of heads are no multiples of a vector."""
    latent = LatentConfig(rank=42, query_rank=50, rope_dim=10, nope_dim=22, value_dim=18, biases=True)
    rope = replace(ROPE, dim=latent.rope_dim)
    sizes = {"head_dim": latent.rope_dim + latent.rank, "attention_scale": 0.2, "output_bias": True}
    return _checkpoint(replace(UNEVEN, family="deepseek_v3", rope=rope, latent=latent, **sizes), {})


def normed_experts_checkpoint() -> Checkpoint:
    """A model whose experts have norms of their own."""
    return _checkpoint(NORMED_EXPERTS, {})


def all_blocks_checkpoint() -> Checkpoint:
    """A model with the blocks that families have beyond llama's, most of them at once."""
    return _checkpoint(ALL_BLOCKS, {})
