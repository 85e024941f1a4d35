"""BlockWeights: the weights of a parallel head (DFlash, DFlash2, JetSpec, DSpark) on the device.

Its layers are loaded and run as a small model. Keys and values of the context come from the same matrices as
those of the slots: the part of each layer's QKV matrix after the queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from paceline.backends.cuda.heads.head_weights import Fusion, load_fusion, model_of_layers
from paceline.backends.cuda.kernels.products.matrix import Matrix
from paceline.backends.cuda.layers.layer import Layer
from paceline.backends.cuda.weights.model_weights import Weights, load_layers, unpacked
from paceline.backends.cuda.weights.reader import Reader
from paceline.backends.cuda.weights.shard import WHOLE
from paceline.backends.cuda.weights.tiled import matrix, padded_line, padded_size
from paceline.core.arrays import Int32Array
from paceline.errors import ConfigError
from paceline.models.heads.checkpoint import HeadCheckpoint
from paceline.models.heads.config import BlockAttention, BlockConfig, HeadConfig
from paceline.models.transformer.blocks import Take

MIN_RANK = 16  # of a product on tensor cores


@dataclass(frozen=True)
class MarkovWeights:
    """A Markov head, which adds after @ before[previous token] to the logits."""

    before: torch.Tensor  # [target's vocabulary, rank] the rank is padded to a power of two
    after: torch.Tensor  # [draft vocabulary, rank]


@dataclass(frozen=True)
class ConfidenceWeights:
    """A confidence head: chance of acceptance = sigmoid(weight . [output, before[previous token]] + bias)."""

    weight: torch.Tensor  # float32 [hidden, or hidden + rank]
    bias: torch.Tensor  # float32 [1]


@dataclass(frozen=True)
class Convolution:
    """The convolutions over slots before and after a sublayer (DFlash2)."""

    kernels: torch.Tensor  # float32 [2, 2, padded hidden] of inputs and outputs; of a slot, the one before it
    corrections: Matrix  # from a slot's state to corrections of the kernels


@dataclass(frozen=True)
class SelectorWeights:
    """A pair selector, which adds after @ (before[previous token] * (projection @ output)) to top logits."""

    pair: MarkovWeights
    projection: Matrix
    candidates: int  # guesses of a slot that are scored


@dataclass(frozen=True)
class BlockWeights:
    """All weights of a parallel head."""

    config: HeadConfig
    block: BlockConfig
    fusion: Fusion
    context_norm: torch.Tensor  # [padded hidden] of the fused features, which all layers read
    model: Weights  # the layers over the slots, with the head's embedding, output norm and LM head
    markov: MarkovWeights | None
    confidence: ConfidenceWeights | None
    target_ids: torch.Tensor | None  # int32 [draft vocabulary] the target's ids; None: the same vocabulary
    convolutions: tuple[tuple[Convolution, Convolution], ...] = ()  # by layer, of attention and MLP
    selector: SelectorWeights | None = None

    @property
    def matrices(self) -> list[Matrix]:
        assert self.fusion.matrix is not None
        own = [convolution.corrections for layer in self.convolutions for convolution in layer]
        own += [] if self.selector is None else [self.selector.projection]
        return [*self.model.matrices, self.fusion.matrix, *own]

    def context_matrix(self, layer: Layer) -> Matrix:
        """The projection of keys and values alone; a tile is a head."""
        heads, columns, bias = self.config.num_heads, layer.qkv.tiling.columns, layer.qkv.bias
        width = 2 * self.config.num_kv_heads * self.config.head_dim
        bias = None if bias is None else bias[heads * columns :]
        return replace(layer.qkv, weight=layer.qkv.weight[heads:], width=width, bias=bias)


def load_block_weights(checkpoint: HeadCheckpoint, target: Weights) -> BlockWeights:
    """The weights of a head beside its target, in the target's dtype."""
    device, dtype = target.device, target.dtype

    def read(name: str) -> torch.Tensor:
        return torch.from_numpy(checkpoint.tensors[name].float32()).to(device=device, dtype=dtype)

    return make_block_weights(checkpoint.config, checkpoint.draft_ids, read, target)


def make_block_weights(
    config: HeadConfig, ids: Int32Array | None, read: Take, target: Weights
) -> BlockWeights:
    """The weights that `read` returns by the names of heads/config.py; `ids` are the drafted target ids."""
    block = _supported(config, target)
    model = model_of_layers(config, len(block.layers))
    reader = Reader(model, lambda name: read(name.removeprefix("model.")), unpacked, None, WHOLE)
    hidden = padded_size(config.hidden_size)
    weights = Weights(
        model,
        matrix(read("embed_tokens.weight"), None) if config.own_embedding else target.embedding,
        load_layers(reader, target.dtype, target.device),
        padded_line(read("norm.weight"), hidden),
        matrix(read("lm_head.weight"), None) if config.own_lm_head else target.head,
    )
    return BlockWeights(
        config,
        block,
        load_fusion(config, read, target),
        padded_line(read("hidden_norm.weight"), hidden),
        weights,
        _load_markov(read) if block.markov_rank else None,
        _load_confidence(read) if block.confidence else None,
        None if ids is None else torch.from_numpy(ids).to(target.device),
        tuple(_load_convolutions(block, read, hidden)) if block.convolution_group else (),
        _load_selector(block, read) if block.selector_rank else None,
    )


def _load_markov(read: Take) -> MarkovWeights:
    return _pair(*(read(f"markov_head.markov_w{n}.weight") for n in (1, 2)))


def _pair(before: torch.Tensor, after: torch.Tensor) -> MarkovWeights:
    rank = before.shape[1]
    padding = (0, max(MIN_RANK, 1 << (rank - 1).bit_length()) - rank)
    return MarkovWeights(F.pad(before, padding), F.pad(after, padding))


def _load_convolutions(
    block: BlockConfig, read: Take, hidden: int
) -> Iterator[tuple[Convolution, Convolution]]:
    def load(name: str) -> Convolution:
        kernels = read(f"{name}.base_kernel").float()
        padded = F.pad(kernels, (0, hidden - kernels.shape[2]))
        return Convolution(padded, matrix(read(f"{name}.kernel_projection.weight"), None))

    for layer in range(len(block.layers)):
        yield load(f"layers.{layer}.attention_conv"), load(f"layers.{layer}.mlp_conv")


def _load_selector(block: BlockConfig, read: Take) -> SelectorWeights:
    names = "predecessor_codebook", "successor_codebook"
    pair = _pair(*(read(f"candidate_selector.{name}") for name in names))
    projection = matrix(read("candidate_selector.hidden_projection.weight"), None)
    return SelectorWeights(pair, projection, block.selector_candidates)


def _load_confidence(read: Take) -> ConfidenceWeights:
    weight, bias = (read(f"confidence_head.proj.{part}").float().flatten() for part in ("weight", "bias"))
    return ConfidenceWeights(weight, bias)


def _supported(config: HeadConfig, target: Weights) -> BlockConfig:
    """The head's BlockConfig. ConfigError if the kernels do not support it."""
    block = config.block
    assert block is not None, "the head is a parallel one"
    if block.mask_embedding or set(block.layers) - {BlockAttention(None, block.layers[0].causal)}:
        raise ConfigError(
            f"the cuda backend does not run {config.kind} heads with windows, or with an embedding of their "
            "own for MASK. Use --backend torch."
        )
    if target.shard.size > 1 or target.hidden != padded_size(target.config.hidden_size):
        raise ConfigError(
            f"the cuda backend runs {config.kind} heads on one GPU, beside a model whose hidden size is not "
            "padded for packed weights. Use --tensor-parallel-size 1 and --quantization none, or an eagle3 "
            "head."
        )
    return block
