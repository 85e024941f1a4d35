"""HeadWeights: the weights of a learned draft head in the layout of the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from paceline.backends.cuda.kernels.drafting.draft_inputs import NO_RESIDUAL, NORMED_RESIDUAL, STATE_RESIDUAL
from paceline.backends.cuda.kernels.products.matrix import Matrix, tile_matrix, tile_pair
from paceline.backends.cuda.layers.layer import Layer
from paceline.backends.cuda.weights.model_weights import Weights, load_layers, unpacked
from paceline.backends.cuda.weights.reader import Reader
from paceline.backends.cuda.weights.shard import WHOLE
from paceline.backends.cuda.weights.tiled import heads_matrix, padded_size, tiling_for
from paceline.core.arrays import Int32Array
from paceline.errors import BackendError, ConfigError
from paceline.models.config import ModelConfig
from paceline.models.heads.checkpoint import HeadCheckpoint
from paceline.models.heads.config import HeadConfig
from paceline.models.transformer.blocks import Take
from paceline.models.transformer.rope import rope_frequencies


@dataclass(frozen=True)
class Entry:
    """How embeddings and states are joined to the input of the layer."""

    norms: tuple[torch.Tensor, torch.Tensor] | None  # [padded hidden] of embeddings and of states
    residual: int  # initial residual stream: one of kernels/drafting/draft_inputs.py
    joining: Matrix | None  # projection of [embedding, state]; None: the attention reads both
    normed: bool  # the layer's norm is applied to the joined input


@dataclass(frozen=True)
class Fusion:
    """The fusion of the target's features to states (EAGLE-3's `fc`)."""

    norm: torch.Tensor | None  # [features * target hidden]
    eps: float
    groups: int  # groups of features that are normed separately
    matrix: Matrix | None  # `fc`; None: the normed features are the states


@dataclass(frozen=True)
class HeadWeights:
    """All weights of a head."""

    config: HeadConfig
    fusion: Fusion
    embedding: Matrix
    entry: Entry
    layer: Layer
    later_layers: tuple[Layer, ...]  # llama layers after `layer`, which alone reads [embedding, state]
    norm: torch.Tensor  # [padded hidden] of the LM head's input; ones if it is not normed
    is_normed: bool
    vocabulary: Matrix
    target_ids: torch.Tensor | None  # int32 [draft vocabulary] the target's ids; None: the same vocabulary
    rotation: tuple[torch.Tensor, torch.Tensor]  # cosine and sine: float32 [positions, head_dim // 2]
    model: Weights | None = None  # of `layer` alone, if it is one of the target's family
    mask: torch.Tensor | None = None  # [1, feature width] of a P-EAGLE head: the feature of masks

    @property
    def matrices(self) -> list[Matrix]:
        maybe = (self.fusion.matrix, self.entry.joining)
        layers = () if self.model else (self.layer, *self.later_layers)
        own = [each for layer in layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        own += self.model.matrices if self.model else []
        return own + [self.vocabulary] + [matrix for matrix in maybe if matrix is not None]

    @property
    def head_groups(self) -> tuple[int, int]:
        """The query heads, and the groups of them that share a program of attention."""
        if self.model is not None:
            return self.model.head_groups
        return self.config.num_heads, self.config.num_kv_heads


def load_head_weights(checkpoint: HeadCheckpoint, target: Weights) -> HeadWeights:
    """The weights of a head beside its target, in the target's dtype."""
    device, dtype = target.device, target.dtype

    def read(name: str) -> torch.Tensor:
        return torch.from_numpy(checkpoint.tensors[name].float32()).to(device=device, dtype=dtype)

    return make_head_weights(checkpoint.config, checkpoint.draft_ids, read, target)


def make_head_weights(config: HeadConfig, ids: Int32Array | None, read: Take, target: Weights) -> HeadWeights:
    """The weights that `read` returns by the names of heads/config.py; `ids` are the drafted target ids."""
    device = target.device
    if target.hidden != padded_size(target.config.hidden_size):
        raise BackendError(
            f"A hidden size of {target.config.hidden_size} is padded for packed weights, and heads cannot "
            "read padded states; use --quantization none, or draft with ngram or suffix."
        )
    frequencies = torch.from_numpy(rope_frequencies(config.rope, config.head_dim)).to(device)
    angles = torch.arange(config.max_position, device=device)[:, None].float() * frequencies
    is_normed, model = config.kind != "eagle", _load_model(config, read, target)
    return HeadWeights(
        config,
        load_fusion(config, read, target),
        _matrix(read("embed_tokens.weight")) if config.own_embedding else target.embedding,
        _load_entry(config, read),
        _load_layer(config, read) if model is None else model.layers[0],
        () if model is not None else _load_later_layers(config, read, target),
        _line(read("norm.weight")) if is_normed else _ones(config, read),
        is_normed,
        _matrix(read("lm_head.weight")) if config.own_lm_head else target.head,
        None if ids is None else torch.from_numpy(ids).to(device),
        (angles.cos(), angles.sin()),
        model,
        None if config.mask_token_id is None else read("mask_hidden").view(1, -1),
    )


class AnyHead(Protocol):
    """The weights of any kind of head: a dataclass of tensors, or of such dataclasses."""

    @property
    def config(self) -> HeadConfig: ...

    @property
    def target_ids(self) -> torch.Tensor | None: ...


def check_same_shapes(source: AnyHead, to: AnyHead) -> None:
    """ConfigError if two heads differ in more than the values of their weights."""
    differing = [
        each.name
        for each in fields(HeadConfig)
        if each.name != "target" and getattr(source.config, each.name) != getattr(to.config, each.name)
    ]
    if (source.target_ids is None) != (to.target_ids is None):
        differing.append("draft vocabulary")
    if differing:
        raise ConfigError(
            f"the new {to.config.kind} head is of another shape than the present one ({differing[0]}), and "
            "captured graphs of the cuda backend read weights of that shape. Restart with the other head."
        )


def copy_head_weights(source: AnyHead, to: AnyHead) -> None:
    """Overwrite the weights of a head with those of another of the same shapes, at the same addresses."""
    for new, old in zip(_tensors(source), _tensors(to), strict=True):
        if new is not old:  # else a weight that both share with the target
            old.copy_(new)


def _tensors(part: Any) -> Iterator[torch.Tensor]:
    """All tensors of a dataclass of weights, in the order of its fields."""
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from _tensors(each)
    elif is_dataclass(part):
        for each in fields(part):
            yield from _tensors(getattr(part, each.name))


def load_fusion(config: HeadConfig, read: Take, target: Weights) -> Fusion:
    """The fusion of a head; eagle and mtp read the target's last hidden state, optionally normed."""
    if config.kind in ("eagle", "mtp"):
        normed = config.kind == "eagle" or config.norm_features
        norm = target.norm[: config.target_hidden_size] if normed else None
        return Fusion(norm, target.config.rms_norm_eps, 1, None)
    norm, groups = None, config.num_features
    if config.fc_norm:
        norm = torch.cat([read(f"fc_norm.{number}.weight") for number in range(groups)])
    if config.norm_before_fc:
        norm, groups = read("input_norm.weight"), 1
    bias = read("fc.bias") if config.fc_bias else None
    return Fusion(norm, config.rms_norm_eps, groups, _matrix(read("fc.weight"), bias))


def _load_entry(config: HeadConfig, read: Take) -> Entry:
    names = {
        "eagle3": ("midlayer.input_layernorm", "midlayer.hidden_norm"),
        "mtp": ("embedding_norm", "state_norm"),
    }
    norms = None
    if config.kind in names:
        first, second = (_line(read(f"{name}.weight")) for name in names[config.kind])
        norms = first, second
    if config.kind == "eagle3":
        return Entry(norms, NORMED_RESIDUAL if config.norm_before_residual else STATE_RESIDUAL, None, False)
    bias = read("fc.bias") if config.fc_bias else None
    return Entry(norms, NO_RESIDUAL, _matrix(_halves(read("fc.weight")), bias), config.kind == "mtp")


def _load_layer(config: HeadConfig, read: Take) -> Layer:
    def part(name: str) -> torch.Tensor:
        return read(f"midlayer.{name}")

    qkv = torch.cat([part(f"self_attn.{name}_proj.weight") for name in "qkv"])
    bias = torch.cat([part(f"self_attn.{name}_proj.bias") for name in "qkv"]) if config.qkv_bias else None
    gate, up = (_padded(part(f"mlp.{name}_proj.weight")) for name in ("gate", "up"))
    return Layer(
        _line(part("input_layernorm.weight")) if config.kind == "mtp" else _ones(config, read),
        heads_matrix(_halves(qkv) if config.kind == "eagle3" else qkv, config.head_dim, bias),
        None,
        _matrix(part("self_attn.o_proj.weight")),
        _line(part("post_attention_layernorm.weight")),
        tile_pair(gate, up, tiling_for(2 * len(gate), gate.shape[1])),
        _matrix(part("mlp.down_proj.weight")),
    )


def _load_model(config: HeadConfig, read: Take, target: Weights) -> Weights | None:
    """The head's layer as a model of one, if it is a layer of the target's family (latents, experts)."""
    if config.layer is None:
        return None
    if target.shard.size > 1:
        raise BackendError(
            f"The mtp block of {config.layer.family} models runs on one GPU of the cuda backend only; leave "
            "tensor_parallel_size out, or draft with ngram or suffix."
        )

    def take(name: str, rows: slice | None = None) -> torch.Tensor:
        return read(name.replace("model.layers.0.", "midlayer."))

    layers = load_layers(Reader(config.layer, take, unpacked, None, WHOLE), target.dtype, target.device)
    return Weights(config.layer, target.embedding, layers, _line(read("norm.weight")), target.head)


def _load_later_layers(config: HeadConfig, read: Take, target: Weights) -> tuple[Layer, ...]:
    """The layers of an eagle3 head after the first, which are llama layers."""

    def take(name: str, rows: slice | None = None) -> torch.Tensor:
        _, _, number, part = name.split(".", 3)  # model.layers.NUMBER.PART
        return read(f"layers.{int(number) + 1}.{part}")

    model = model_of_layers(config, config.num_layers - 1)
    return load_layers(Reader(model, take, unpacked, None, WHOLE), target.dtype, target.device)


def model_of_layers(config: HeadConfig, layers: int) -> ModelConfig:
    """The layers of a head as those of a model."""
    return ModelConfig(
        "llama",
        config.draft_vocab_size,
        config.hidden_size,
        layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.intermediate_size,
        config.rms_norm_eps,
        config.rope,
        config.max_position,
        tie_embeddings=False,
        qkv_bias=config.qkv_bias,
        qk_norm=config.qk_norm,
    )


def _halves(weight: torch.Tensor) -> torch.Tensor:
    """A matrix over [embedding, state], with each half padded."""
    size = weight.shape[1] // 2
    return F.pad(weight.view(len(weight), 2, size), (0, padded_size(size) - size)).flatten(1)


def _padded(weight: torch.Tensor) -> torch.Tensor:
    rows, columns = (padded_size(size) - size for size in weight.shape)
    return F.pad(weight, (0, columns, 0, rows)).contiguous()


def _line(values: torch.Tensor) -> torch.Tensor:
    return F.pad(values, (0, padded_size(len(values)) - len(values)))


def _matrix(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Matrix:
    padded = _padded(weight)
    return tile_matrix(padded, len(weight), tiling_for(*padded.shape), None if bias is None else _line(bias))


def _ones(config: HeadConfig, read: Take) -> torch.Tensor:
    return _line(torch.ones_like(read("midlayer.post_attention_layernorm.weight")))
