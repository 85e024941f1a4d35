"""A model's weights on the device, stacked, padded and tiled as the kernels read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from paceline.backends.cuda.kernels.matrix import Matrix, Tiling, tile_heads, tile_matrix, tile_pair
from paceline.backends.cuda.kernels.packing import BLOCKS, FP8_GROUP, SCALE_WORDS, depth_of, step_of
from paceline.backends.cuda.kernels.routing import Mixture
from paceline.backends.cuda.shard import TILE, WHOLE, Shard
from paceline.models.blocks import Take
from paceline.models.config import ModelConfig
from paceline.models.rope import rope_frequencies

PROGRAMS = 132  # multiprocessors of an H100 or H200; a constant, because it decides the bits
PACKED_PROGRAMS = 528  # more programs: unpacking takes time in which others can load
FP8_PROGRAMS = 264  # e4m3 is not unpacked, but its steps are short
MAX_SPLITS = 4
MIN_STEPS = 3  # steps of a split, at least: the pipeline must fill
PACKINGS = ("int4", "q4k", "q6k", "fp8", "int8", "none")  # in order of precision
MULTIPLIES_E4M3 = (8, 9)  # compute capability
FP8_HEAD_SIZES = (64, 128, 256)  # head sizes whose attention output can be quantized to e4m3


@dataclass(frozen=True)
class Layer:
    """One layer: attention, then a gated feed-forward block."""

    attention_norm: torch.Tensor  # [padded hidden]
    qkv: Matrix  # tiles are heads: of queries, then of keys, then of values
    head_norms: tuple[torch.Tensor, torch.Tensor] | None  # [head_dim] of queries and of keys
    output: Matrix
    feed_forward_norm: torch.Tensor  # [padded hidden]
    gate_up: Matrix  # of all experts, in a mixture
    down: Matrix
    mixture: Mixture | None = None  # experts, if the layer has any


@dataclass(frozen=True)
class Weights:
    """All weights of a model, or a rank's part of them."""

    config: ModelConfig  # of the whole model
    embedding: Matrix  # also the LM head, if they are tied
    layers: tuple[Layer, ...]
    norm: torch.Tensor  # [padded hidden]
    head: Matrix
    rotation: tuple[torch.Tensor, torch.Tensor]  # cosine and sine: float32 [positions, head_dim // 2]
    shard: Shard = WHOLE

    @property
    def heads(self) -> tuple[int, int]:
        """The query heads and KV heads of this rank."""
        return self.shard.heads(self.config)

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
        """Every matrix of a pass. Those of layers may be packed in different ways."""
        layers = [(own.qkv, own.output, own.gate_up, own.down) for own in self.layers]
        routers = [own.mixture.router for own in self.layers if own.mixture is not None]
        return [matrix for layer in layers for matrix in layer] + routers + [self.head]


def unpacked(name: str) -> str:
    """No packing, for any matrix."""
    return "none"


def packing_for(quantization: str, kind_of: Callable[[str], str]) -> Callable[[str], str]:
    """The packing of each matrix under a quantization, by name; `kind_of` gives its type in the file.

    `native` keeps the file's blocks of Q4_0, Q8_0, Q4_K and Q6_K, and quantizes everything else to int8.
    """
    if quantization == "native":
        own = {"Q4_0": "int4", **BLOCKS}
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

    `packing` gives the packing of a layer's matrix by name. `fp8` becomes `e4m3`, with activations in e4m3
    too, on a device that multiplies such numbers. `take` returns packed ones in float32; `blocks` returns
    the `block_lines` of those that keep the file's blocks. Embedding and LM head are not packed. Of several
    ranks, `take` and `blocks` get the rows that the rank has, too.
    """
    read = _Reader(config, take, packing, blocks, shard)
    table = read.vocabulary("model.embed_tokens.weight")
    norm = read.norm("model.norm.weight")
    layers = tuple(_load_layer(read, norm.dtype, index) for index in range(config.num_layers))
    frequencies = torch.from_numpy(rope_frequencies(config.rope, config.head_dim)).to(norm.device)
    angles = torch.arange(config.max_position, device=norm.device)[:, None].float() * frequencies
    head = table if config.tie_embeddings else read.vocabulary("lm_head.weight")
    factor = config.rope.attention_factor
    rotation = angles.cos() * factor, angles.sin() * factor
    return Weights(config, table, layers, norm, head, rotation, shard)


@dataclass(frozen=True)
class _Reader:
    """What a rank reads of a checkpoint."""

    config: ModelConfig
    take: Take
    packing: Callable[[str], str]
    blocks: Take | None
    shard: Shard

    def part(self, take: Take, name: str, rows: slice | None) -> torch.Tensor:
        """A tensor, or these rows of it: all of them, on one GPU."""
        return take(name) if rows is None or self.shard.size == 1 else take(name, rows)

    def norm(self, name: str) -> torch.Tensor:
        """A norm's weights [hidden of all ranks]."""
        line = self.take(name)
        return _padded_line(line, self.shard.padded(len(line)))

    def vocabulary(self, name: str) -> Matrix:
        """The rows of a matrix [vocab, hidden] that this rank has."""
        size, shard = self.config.vocab_size, self.shard
        return replace(_matrix(self.part(self.take, name, shard.rows(size)), None, size, shard), shard=shard)

    def matrices(
        self, names: list[str], rows: list[slice], dtype: torch.dtype
    ) -> tuple[list[torch.Tensor], str]:
        """Matrices that become one, and how they are packed: alike, the largest of them decides.

        A file's own blocks do not stay such beside others.
        """
        kinds = {self.packing(own) for own in names}
        kind = max(kinds, key=PACKINGS.index)
        if kind in SCALE_WORDS and len(kinds) == 1 and self.blocks is not None:
            return [self.part(self.blocks, *own) for own in zip(names, rows, strict=True)], kind
        kind = "int8" if kind in SCALE_WORDS else kind
        weights = [self.part(self.take, *own) for own in zip(names, rows, strict=True)]
        if kind == "fp8" and _has_fp8_input(self.config, names[0]) and _multiplies_e4m3(weights[0].device):
            kind = "e4m3"
        if kind != "none" and weights[0].shape[1] % step_of(kind) == 0:
            return weights, kind
        return [weight.to(dtype) for weight in weights], "none"


def _load_layer(read: _Reader, dtype: torch.dtype, index: int) -> Layer:
    config, shard, name = read.config, read.shard, f"model.layers.{index}"
    queries, shared = shard.head_rows(config)
    hidden, intermediate = shard.rows(config.hidden_size), shard.rows(config.intermediate_size)

    def matrices(parts: list[str], rows: list[slice]) -> tuple[list[torch.Tensor], str]:
        return read.matrices([f"{name}.{part}.weight" for part in parts], rows, dtype)

    def bias(part: str, rows: slice) -> torch.Tensor:
        return read.part(read.take, f"{name}.self_attn.{part}_proj.bias", rows)

    def head_norm(part: str) -> torch.Tensor:
        return read.take(f"{name}.self_attn.{part}_norm.weight")

    of_heads = dict(zip("qkv", (queries, shared, shared), strict=True))
    heads, heads_packing = matrices([f"self_attn.{part}_proj" for part in of_heads], list(of_heads.values()))
    biases = torch.cat([bias(*own) for own in of_heads.items()]) if config.qkv_bias else None
    (output,), output_packing = matrices(["self_attn.o_proj"], [hidden])
    output_bias = bias("o", hidden) if config.output_bias else None
    moe = config.moe if config.moe and index in config.moe.layers else None
    mlps = ["mlp"] if moe is None else [f"mlp.experts.{expert}" for expert in range(moe.num_experts)]
    pairs = [f"{own}.{part}_proj" for part in ("gate", "up") for own in mlps]
    gate_up = _pairs(*matrices(pairs, [intermediate] * len(pairs)), config.intermediate_size, shard)
    down = _stacked(
        *matrices([f"{own}.down_proj" for own in mlps], [hidden] * len(mlps)), config.hidden_size, shard
    )
    mixture = None
    if moe is not None:
        router = _matrix(read.take(f"{name}.mlp.gate.weight"), None)
        mixture = Mixture(router, gate_up, down, moe.experts_per_token, moe.normalize_weights)
    return Layer(
        read.norm(f"{name}.input_layernorm.weight"),
        heads_matrix(
            torch.cat(heads),
            config.head_dim,
            biases,
            heads_packing,
            config.num_heads + 2 * config.num_kv_heads,
        ),
        (head_norm("q"), head_norm("k")) if config.qk_norm else None,
        _matrix(output, output_bias, config.hidden_size, shard, output_packing),
        read.norm(f"{name}.post_attention_layernorm.weight"),
        gate_up,
        down,
        mixture,
    )


def _has_fp8_input(config: ModelConfig, name: str) -> bool:
    """Whether the input of a layer's matrix is in e4m3: not that of experts, nor of odd sizes."""
    if ".mlp.experts." in name or config.hidden_size % FP8_GROUP:
        return False
    return ".self_attn.o_proj." not in name or config.head_dim in FP8_HEAD_SIZES


def _multiplies_e4m3(device: torch.device) -> bool:
    """Whether the device does; Triton's interpreter does."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= MULTIPLIES_E4M3


def _pairs(weights: list[torch.Tensor], packing: str, size: int, shard: Shard) -> Matrix:
    """The gates and ups of experts, or of one block, as one matrix; all gates come first.

    They are a rank's rows of matrices of `size` rows.
    """
    own, whole = _filled_rows(weights[0], size, shard)
    padded = [_padded(weight, packing, own) for weight in weights]
    experts = len(weights) // 2
    # half a tile is one group of e4m3 numbers
    columns = 2 * TILE if packing == "e4m3" else TILE
    tiling = _expert_tiling(2 * whole, depth_of(padded[0], packing), packing, experts, columns)
    return tile_pair(torch.cat(padded[:experts]), torch.cat(padded[experts:]), tiling)


def _stacked(weights: list[torch.Tensor], packing: str, size: int, shard: Shard) -> Matrix:
    """The matrices of experts, or of one block, as one; they are a rank's rows of matrices of `size` rows."""
    own, whole = _filled_rows(weights[0], size, shard)
    padded = [_padded(weight, packing, own) for weight in weights]
    tiling = _expert_tiling(whole, depth_of(padded[0], packing), packing, len(weights))
    return tile_matrix(torch.cat(padded), sum(map(len, weights)), tiling)


def _filled_rows(weight: torch.Tensor, size: int, shard: Shard) -> tuple[int, int]:
    """The rows of a rank, and of the matrix of `size` rows that it shares, filled up to whole tiles."""
    size = len(weight) if shard.size == 1 else size  # experts have a size of their own
    return shard.width(size), padded_size(size)


def _expert_tiling(width: int, depth: int, packing: str, experts: int, columns: int = TILE) -> Tiling:
    """How to cut matrices of this padded shape: not along the depth if a row has several experts."""
    tiling = tiling_for(width, depth, columns, packing)
    return tiling if experts == 1 else replace(tiling, splits=1)


def tiling_for(width: int, depth: int, columns: int = TILE, packing: str = "none") -> Tiling:
    """How a matrix of this padded shape is tiled. It depends on the shape alone: it decides the bits."""
    step = step_of(packing) if packing != "none" else 128 if depth % 128 == 0 else 64
    tiles, steps = width // columns, depth // step
    programs, most = (PROGRAMS, MAX_SPLITS) if packing == "none" else (PACKED_PROGRAMS, 4 * MAX_SPLITS)
    programs = FP8_PROGRAMS if packing == "e4m3" else programs
    splits = 1
    while splits < most and 2 * splits * tiles <= programs and steps >= 2 * splits * MIN_STEPS:
        splits *= 2
    return Tiling(columns, step, splits, warps=columns // 16, packing=packing)


def _matrix(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    size: int = 0,
    shard: Shard = WHOLE,
    packing: str = "none",
) -> Matrix:
    """A matrix, or a rank's rows of one of `size` rows."""
    own, whole = _filled_rows(weight, size, shard)
    padded = _padded(weight, packing, own)
    tiling = tiling_for(whole, depth_of(padded, packing), TILE, packing)
    return tile_matrix(padded, len(weight), tiling, None if bias is None else _padded_line(bias, own))


def heads_matrix(
    weight: torch.Tensor, dim: int, bias: torch.Tensor | None, packing: str = "none", heads: int | None = None
) -> Matrix:
    """A matrix [heads * dim, hidden] whose tiles are heads, or a rank's part of one of so many heads."""
    columns = max(TILE, 1 << (dim - 1).bit_length())
    line = weight.shape[1] if packing in SCALE_WORDS else padded_size(weight.shape[1])
    padded = torch.nn.functional.pad(weight, (0, line - weight.shape[1]))
    width = (heads or len(weight) // dim) * columns
    return tile_heads(padded, dim, tiling_for(width, depth_of(padded, packing), columns, packing), bias)


def padded_size(size: int) -> int:
    """The size, rounded up to whole tiles."""
    return -(-size // TILE) * TILE


def _padded(weight: torch.Tensor, packing: str, rows: int) -> torch.Tensor:
    """The matrix with zeros up to these rows, and to whole tiles of columns, as `block_lines` have."""
    columns = weight.shape[1] if packing in SCALE_WORDS else padded_size(weight.shape[1])
    if (rows, columns) == tuple(weight.shape):
        return weight.contiguous()
    return torch.nn.functional.pad(weight, (0, columns - weight.shape[1], 0, rows - weight.shape[0]))


def _padded_line(line: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(line, (0, size - len(line)))
