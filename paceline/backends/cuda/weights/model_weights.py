"""A model's weights on the device, stacked, padded and tiled as the kernels read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from paceline.backends.cuda.kernels.attention.heads import Rotation
from paceline.backends.cuda.kernels.attention.paged_attention import latent_groups
from paceline.backends.cuda.kernels.products.matrix import Matrix
from paceline.backends.cuda.kernels.products.packing import BLOCKS, SCALE_WORDS, step_of
from paceline.backends.cuda.kernels.recurrent.types import RecurrentParameters
from paceline.backends.cuda.kernels.residual import Residual
from paceline.backends.cuda.layers.layer import Layer as Layer
from paceline.backends.cuda.layers.layer import load_layer, mixed_groups
from paceline.backends.cuda.layers.per_layer import PerLayerInputs, load_per_layer_inputs
from paceline.backends.cuda.layers.recurrent import load_parameters
from paceline.backends.cuda.weights.reader import Reader, has_residual
from paceline.backends.cuda.weights.shard import WHOLE, Shard
from paceline.errors import ConfigError
from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.files.layout import expected_tensors
from paceline.models.quantizations import is_packed
from paceline.models.transformer.blocks import Take
from paceline.models.transformer.rope import query_factor_table, rope_frequencies

MAX_FILLING = 1.1  # largest ratio of a padded size to the size, for packed matrices


@dataclass(frozen=True)
class Weights:
    """All weights of a model, or a rank's part of them."""

    config: ModelConfig  # of the whole model
    embedding: Matrix  # also the LM head, if they are tied
    layers: tuple[Layer, ...]
    norm: torch.Tensor  # [padded hidden]
    head: Matrix
    shard: Shard = WHOLE
    residual: Residual | None = None  # None: llama's, whose norms are fused into products
    recurrent: RecurrentParameters | None = None  # of the recurrent layers, if there are any
    per_layer: PerLayerInputs | None = None  # per-layer embeddings
    adapters: Mapping[str, int] = field(default_factory=dict)  # the numbers of LoRA adapters by name

    @property
    def heads(self) -> tuple[int, int]:
        """The query heads and KV heads of this rank."""
        return self.shard.heads(self.config)

    @property
    def head_groups(self) -> tuple[int, int]:
        """The query heads of this rank, and the groups of them that share a program of attention."""
        heads, kv_heads = self.heads
        return heads, latent_groups(heads) if self.config.latent else mixed_groups(self.config) or kv_heads

    @property
    def hidden(self) -> int:
        """The padded hidden size."""
        return self.embedding.depth

    @property
    def device(self) -> torch.device:
        return self.norm.device

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.dtype

    @property
    def matrices(self) -> list[Matrix]:
        """All matrices of a pass. Their packings may differ."""
        layers = list[Matrix]()
        for own in self.layers:
            layers += [own.qkv, own.output] if own.attends else []
            layers += own.recurrence or ()
            layers += [own.gate_up, own.down] if own.feeds_forward else []
        routers = [own.mixture.router for own in self.layers if own.mixture is not None]
        shared = [matrix for own in self.layers for matrix in own.shared or ()]
        shared += [gate for own in self.layers for gate in (own.gate, own.shared_gate) if gate is not None]
        latents = [own.latent.query for own in self.layers if own.latent and own.latent.query]
        given = [] if self.per_layer is None else [self.per_layer.projection]
        for own in self.layers:
            given += [own.per_layer.gate, own.per_layer.projection] if own.per_layer else []
        return layers + routers + shared + latents + given + [self.head]


def unpacked(name: str) -> str:
    """A `packing` function that packs no matrix."""
    return "none"


def packing_for(quantization: str, kind_of: Callable[[str], str]) -> Callable[[str], str]:
    """The packing of each matrix under a quantization, by name; `kind_of` gives its type in the file.

    `native` keeps blocks of Q4_0, Q4_1, Q8_0, Q4_K, Q6_K and MXFP4, and FP8 with scales by row or block; else
    it is int8.
    """
    if quantization == "native":
        own = {"Q4_0": "int4", "MXFP4": "mxfp4", "FP8": "fp8", "FP8 in blocks": "fp8_blocks", **BLOCKS}
        return lambda name: own.get(kind_of(name), "int8")
    return lambda name: quantization


def load_weights(
    config: ModelConfig,
    take: Take,
    packing: Callable[[str], str] = unpacked,
    blocks: Take | None = None,
    shard: Shard = WHOLE,
) -> Weights:
    """The weights that `take` returns by name, in the layout of the kernels.

    `packing` gives the packing of a layer's matrix by name; embedding and LM head are not packed. `fp8`
    becomes `e4m3`, with activations in e4m3 too, on a device that multiplies such numbers. `take` returns
    matrices to be packed in float32; `blocks` returns the `block_lines` of those that keep the file's blocks.
    With several ranks, both are called with the rows of this rank.
    """
    filled = _with_whole_steps(config, packing)
    if filled != config:
        if shard.size > 1:
            raise ConfigError(
                f"tensor_parallel_size is {shard.size}, but with packed weights this model's sizes "
                f"({config.hidden_size} and {config.intermediate_size}) are padded, which works on one GPU "
                "only. Use --quantization none, or leave tensor_parallel_size out."
            )
        take = _filling(take, filled)
    read = Reader(config, take, packing, blocks, shard)
    table = read.vocabulary("model.embed_tokens.weight")
    norm = read.norm("model.norm.weight")
    layers = load_layers(read, norm.dtype, norm.device)
    head = table if config.tie_embeddings else read.vocabulary("lm_head.weight")
    rest = _residual(config), load_parameters(config, take), load_per_layer_inputs(config, take)
    return Weights(config, table, layers, norm, head, shard, *rest)


def load_layers(read: Reader, dtype: torch.dtype, device: torch.device) -> tuple[Layer, ...]:
    """All layers that a reader's config names."""
    config = read.config
    ropes = [(config.rope_of(index), config.shape_of(index).head_dim) for index in range(config.num_layers)]
    rotations = {own: _rotation(config, *own, device) for own in set(ropes)}
    factors = _query_factors(config, device)
    return tuple(
        replace(
            load_layer(read, dtype, index), rotation=rotations[own], query_factors=factors[own[0] is None]
        )
        for index, own in enumerate(ropes)
    )


def _with_whole_steps(config: ModelConfig, packing: Callable[[str], str]) -> ModelConfig:
    """The config with sizes padded so that packed matrices have whole steps.

    For example, matrices of gpt-oss have 2880 inputs, and a step of 4 bits has 256. Zeros change no product,
    but take memory.
    """
    names = [name for name, _ in expected_tensors(config) if is_packed(name)]
    kinds = {packing(name) for name in names} - {"none"}
    if config.recurrent is not None:
        return config
    step = 1 if kinds & SCALE_WORDS.keys() else max(map(step_of, kinds), default=1)  # blocks have whole steps

    def whole(size: int) -> int:
        filled = -(-size // step) * step
        return filled if filled <= MAX_FILLING * size else size

    moe = config.moe and replace(config.moe, intermediate_size=whole(config.moe.intermediate_size))
    sizes = whole(config.hidden_size), whole(config.intermediate_size)
    by_layer = tuple(map(whole, config.intermediate_sizes))
    return replace(
        config, hidden_size=sizes[0], intermediate_size=sizes[1], intermediate_sizes=by_layer, moe=moe
    )


def _filling(take: Take, filled: ModelConfig) -> Take:
    """A `take` whose tensors are padded with zeros to the shapes of this config."""
    shapes = dict(expected_tensors(filled))

    def take_filled(name: str) -> torch.Tensor:
        tensor = take(name)
        missing = [(0, size - own) for size, own in zip(shapes[name], tensor.shape, strict=True)]
        return torch.nn.functional.pad(tensor, [count for pair in reversed(missing) for count in pair])

    return take_filled


def _rotation(
    config: ModelConfig, rope: RopeConfig | None, head_dim: int, device: torch.device
) -> Rotation | None:
    """Cosines and sines of all positions; values outside of a partial RoPE are rotated by 0."""
    if rope is None:
        return None
    frequencies = torch.from_numpy(rope_frequencies(rope, head_dim)).to(device)
    angles = torch.arange(config.max_position, device=device)[:, None].float() * frequencies
    cosines, sines = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    rest = (0, 0 if config.latent else head_dim // 2 - len(frequencies))
    return torch.nn.functional.pad(cosines, rest, value=1.0), torch.nn.functional.pad(sines, rest)


def _query_factors(
    config: ModelConfig, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Query scales by position, for layers with RoPE and for layers without."""
    temperature = config.temperature
    if temperature is None:
        return None, None
    factors = torch.from_numpy(query_factor_table(temperature, config.max_position)).to(device)
    return (factors, None) if temperature.with_rope else (None, factors)


def _residual(config: ModelConfig) -> Residual | None:
    """How the residual stream differs from llama's, if it does."""
    if not has_residual(config):
        return None
    return Residual(
        config.hidden_size,
        config.rms_norm_eps,
        config.norm == "layer",
        config.residual_scale,
        config.embedding_scale,
        config.norm_placement == "parallel",
    )
