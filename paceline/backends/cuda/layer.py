"""One layer of a model: what its kernels read, and how that is made of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from paceline.backends.cuda.kernels.heads import Rotation
from paceline.backends.cuda.kernels.latent import head_matrices
from paceline.backends.cuda.kernels.low_rank import LowRank
from paceline.backends.cuda.kernels.matrix import Matrix
from paceline.backends.cuda.kernels.packing import FP8_GROUP, SCALE_WORDS, step_of
from paceline.backends.cuda.kernels.routing import Mixture
from paceline.backends.cuda.kernels.scoring import LLAMA_SCORING, Scoring
from paceline.backends.cuda.latent import LatentWeights
from paceline.backends.cuda.shard import Shard
from paceline.backends.cuda.tiled import (
    heads_matrix,
    matrix,
    padded_line,
    padded_size,
    pair_lines,
    pair_matrix,
    same_sizes,
    stacked_matrix,
)
from paceline.models.blocks import Take
from paceline.models.config import LatentConfig, ModelConfig, MoeConfig, RopeConfig
from paceline.models.layout import NORMS, RECURRENT_MATRICES

PACKINGS = (
    "mxfp4",
    "int4",
    "q41",
    "q4k",
    "q6k",
    "fp8",
    "fp8_blocks",
    "int8",
    "none",
)  # in order of precision
SHARED = "mlp.shared_experts"
MULTIPLIES_E4M3 = (8, 9)  # compute capability
FP8_HEAD_SIZES = (64, 128, 256)  # head sizes whose attention output can be quantized to e4m3


@dataclass(frozen=True)
class LayerAdapters:
    """What adapters add to the products of a layer, if they do."""

    qkv: LowRank | None = None
    output: LowRank | None = None
    gate_up: LowRank | None = None
    down: LowRank | None = None

    @property
    def largest_rank(self) -> int:
        return max(own.rank if own else 0 for own in (self.qkv, self.output, self.gate_up, self.down))


@dataclass(frozen=True)
class Layer:
    """One layer: attention, then a gated feed-forward block."""

    attention_norm: torch.Tensor | None  # [padded hidden]
    qkv: Matrix  # tiles are heads: of queries, then of keys, then of values; of latents: see latent.py
    head_norms: tuple[torch.Tensor, torch.Tensor] | None  # [head_dim] of queries and of keys
    output: Matrix
    feed_forward_norm: torch.Tensor | None  # [padded hidden]
    gate_up: Matrix  # of all experts, in a mixture
    down: Matrix
    mixture: Mixture | None = None  # experts, if the layer has any
    rotation: Rotation | None = None  # of RoPE; None: no RoPE
    scoring: Scoring = LLAMA_SCORING
    activation: str = "silu"
    joint_norms: tuple[torch.Tensor, torch.Tensor] | None = None  # of all heads of queries, and of keys
    output_norms: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)  # after attention and MLP
    shared: tuple[Matrix, Matrix] | None = None  # gate_up and down of a shared expert outside of `mixture`
    shared_gate: Matrix | None = None  # of one column: the sigmoid of its output scales the shared expert
    gate: Matrix | None = None  # likewise, of every attention output
    is_recurrent: bool = False  # then `qkv` projects what the recurrence reads
    latent: LatentWeights | None = None  # of latent attention
    query_factors: torch.Tensor | None = None  # float32 [positions] by which queries grow
    adapters: LayerAdapters = LayerAdapters()

    @property
    def is_plain(self) -> bool:
        """Whether the CUDA C++ kernels can run it."""
        known = self.scoring.is_native and self.activation == "silu" and self.joint_norms is None
        return known and self.gate is None and not self.is_recurrent and self.query_factors is None


@dataclass(frozen=True)
class Reader:
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
        return padded_line(line, self.shard.padded(len(line)))

    def vocabulary(self, name: str) -> Matrix:
        """The rows of a matrix [vocab, hidden] that this rank has."""
        size, shard = self.config.vocab_size, self.shard
        return replace(matrix(self.part(self.take, name, shard.rows(size)), None, size, shard), shard=shard)

    def matrices(
        self, names: list[str], rows: Sequence[slice | None], dtype: torch.dtype
    ) -> tuple[list[torch.Tensor], str]:
        """Matrices that become one, and their common packing: that of the most precise one.

        Blocks of a file are kept only if all of these matrices have the same format.
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


def load_layer(read: Reader, dtype: torch.dtype, index: int) -> Layer:
    """A layer, or a rank's part of it."""
    return _LayerLoader(read, dtype, index).load()


@dataclass(frozen=True)
class _LayerLoader:
    """Makes the matrices of one layer."""

    read: Reader
    dtype: torch.dtype
    index: int

    def load(self) -> Layer:
        """Its attention or recurrence, with what follows it."""
        config = self.read.config
        recurrent = config.recurrent if config.is_recurrent(self.index) else None
        mixer = self._attention() if recurrent is None else self._recurrence(recurrent.kind)
        moe = config.moe if config.moe and self.index in config.moe.layers else None
        mlps = ["mlp"] if moe is None else self._experts(moe)
        gate_up, down = self._feed_forward(mlps, moe is not None and moe.biases)
        followed = replace(
            mixer,
            attention_norm=self._norm("input_layernorm"),
            feed_forward_norm=self._norm("post_attention_layernorm"),
            gate_up=gate_up,
            down=down,
            activation=config.activation,
            output_norms=(self._norm("attention_output_norm"), self._norm("feed_forward_output_norm")),
        )
        return followed if moe is None else self._with_experts(followed, moe)

    def _experts(self, moe: MoeConfig) -> list[str]:
        """The MLPs that are stacked: all experts, and the shared one if it is packed as they are.

        That is asked of all layers: they share buffers for as many experts (`routing_for`).
        """
        names = [f"mlp.experts.{expert}" for expert in range(moe.num_experts)]
        is_stacked = moe.shared_intermediate_size % moe.intermediate_size == 0 and not moe.biases
        if not moe.shared_intermediate_size or not is_stacked:
            return names
        for layer, part in product(moe.layers, ("gate_proj", "up_proj", "down_proj")):
            own = [f"model.layers.{layer}.{mlp}.{part}.weight" for mlp in (names[0], SHARED)]
            if len(set(map(self.read.packing, own))) > 1:
                return names
        return [*names, SHARED]

    def _with_experts(self, layer: Layer, moe: MoeConfig) -> Layer:
        """The same layer, with a router to its experts, and the shared expert, if there is one."""
        take, down = self._take, layer.down
        shared = layer.gate_up.padded_width // (2 * down.depth) - moe.num_experts
        scores = [take("mlp.gate.weight")]
        scores += [take("mlp.shared_expert_gate.weight")] if moe.shared_gate and shared else []
        router = matrix(torch.cat(scores), take("mlp.gate.bias") if moe.biases else None)
        correction = take("mlp.gate.e_score_correction_bias").float() if moe.correction_bias else None
        mixture = Mixture(router, layer.gate_up, down, moe, layer.activation, correction, shared)
        if shared or not moe.shared_intermediate_size:
            return replace(layer, mixture=mixture)
        return replace(
            layer,
            mixture=mixture,
            shared=self._feed_forward([SHARED]),
            shared_gate=matrix(take("mlp.shared_expert_gate.weight"), None) if moe.shared_gate else None,
        )

    def _take(self, part: str, rows: slice | None = None) -> torch.Tensor:
        return self.read.part(self.read.take, f"model.layers.{self.index}.{part}", rows)

    def _matrices(self, parts: list[str], *rows: slice | None) -> tuple[list[torch.Tensor], str]:
        """Matrices that become one, and their packing; `rows` of each, one for all, or none: all rows."""
        names = [f"model.layers.{self.index}.{part}.weight" for part in parts]
        each = rows if len(rows) == len(names) else (rows or (None,)) * len(names)
        return self.read.matrices(names, each, self.dtype)

    def _norm(self, part: str) -> torch.Tensor | None:
        """The weight of the norm of this name, if the family has it."""
        has_it = part in NORMS[self.read.config.norm_placement]
        return self.read.norm(f"model.layers.{self.index}.{part}.weight") if has_it else None

    def _feed_forward(self, mlps: list[str], biases: bool = False) -> tuple[Matrix, Matrix]:
        """The gates and ups of these MLPs as one matrix, and their downs."""
        config, shard, take = self.read.config, self.read.shard, self._take
        gates = [f"{own}.{part}_proj" for part in ("gate", "up") for own in mlps]
        downs = [f"{own}.down_proj" for own in mlps]
        weights, packing = self._matrices(gates, shard.rows(config.intermediate_size))
        gate_up = pair_matrix(same_sizes(weights, 0), packing, config.intermediate_size, shard)
        weights, packing = self._matrices(downs, shard.rows(config.hidden_size))
        down = stacked_matrix(same_sizes(weights, 1), packing, config.hidden_size, shard)
        if biases:
            gate_up = replace(gate_up, bias=pair_lines([take(f"{own}.bias") for own in gates], gate_up))
            lines = [take(f"{own}.bias") for own in downs]
            down = replace(down, bias=torch.cat([padded_line(own, padded_size(len(own))) for own in lines]))
        return gate_up, down

    def _recurrence(self, kind: str) -> Layer:
        """A layer's recurrence, without what follows it."""
        place, inputs, output = RECURRENT_MATRICES[kind]
        recurrent, take = self.read.config.recurrent, self._take
        biases = kind == "short_conv" and recurrent is not None and recurrent.conv_bias
        read_by, packed = self._matrices([f"{place}.{part}" for part in inputs])
        (given,), given_packed = self._matrices([f"{place}.{output}"])
        bias = take(f"{place}.in_proj.bias") if biases else None
        output_bias = take(f"{place}.{output}.bias") if biases else None
        into = matrix(torch.cat(read_by), bias, packing=packed)
        out = matrix(given, output_bias, packing=given_packed)
        return Layer(None, into, None, out, None, into, out, is_recurrent=True)

    def _attention(self) -> Layer:
        """A layer's attention, without what follows it."""
        config, take = self.read.config, self._take
        if config.latent is not None:
            return self._latent_attention(config.latent)
        into, norms = self._heads()
        sinks = take("self_attn.sinks") if config.attention_sinks else None
        out = self._attention_output()
        return Layer(
            None,
            into,
            norms if config.qk_norm else None,
            out,
            None,
            into,
            out,
            scoring=Scoring(config.attention_scale, config.attention_softcap, sinks),
            joint_norms=norms if config.joint_qk_norm else None,
            gate=self._attention_gate() if config.attention_gate else None,
        )

    def _latent_attention(self, latent: LatentConfig) -> Layer:
        """A layer's attention to latents: what its kernels multiply, head by head, is not packed."""
        config, take, place = self.read.config, self._take, "self_attn"
        first = "q_a_proj" if latent.query_rank else "q_proj"
        weights, packing = self._matrices([f"{place}.{first}", f"{place}.kv_a_proj_with_mqa"])
        bias = None
        if latent.biases:
            key_bias = take(f"{place}.kv_a_proj_with_mqa.bias")
            no_bias = key_bias.new_zeros(config.num_heads * (latent.rope_dim + latent.nope_dim))
            bias = torch.cat((take(f"{place}.q_a_proj.bias") if latent.query_rank else no_bias, key_bias))
        into, out = matrix(torch.cat(weights), bias, packing=packing), self._attention_output()
        query, query_norm = None, None
        if latent.query_rank:
            (rows,), packed = self._matrices([f"{place}.q_b_proj"])
            query, query_norm = matrix(rows, None, packing=packed), take(f"{place}.q_a_layernorm.weight")
        both = take(f"{place}.kv_b_proj.weight").to(self.dtype).view(config.num_heads, -1, latent.rank)
        to_keys, to_values = both[:, : latent.nope_dim], both[:, latent.nope_dim :]
        own = LatentWeights(
            latent,
            query,
            query_norm,
            take(f"{place}.kv_a_layernorm.weight"),
            head_matrices(to_keys.transpose(1, 2)),
            head_matrices(to_values),
        )
        scoring = Scoring(config.attention_scale, rope=latent.rope_dim)
        return Layer(None, into, None, out, None, into, out, scoring=scoring, latent=own)

    def _heads(self) -> tuple[Matrix, tuple[torch.Tensor, torch.Tensor] | None]:
        """The QKV projection, and the norms of queries and keys, if there are any."""
        config, take = self.read.config, self._take
        queries, shared_heads = self.read.shard.head_rows(config)
        rows = dict(zip("qkv", (queries, shared_heads, shared_heads), strict=True))
        heads, packing = self._matrices([f"self_attn.{part}_proj" for part in rows], *rows.values())
        biases = [take(f"self_attn.{part}_proj.bias", own) for part, own in rows.items() if config.qkv_bias]
        has_norms = config.qk_norm or config.joint_qk_norm
        norms = [take(f"self_attn.{part}_norm.weight") for part in "qk" if has_norms]
        order = head_order(config, config.rope_of(self.index), heads[0].device)
        for part in (heads, biases, norms):
            if order is not None:  # of queries and keys
                part[:2] = [reordered(own, config.head_dim, order) for own in part[:2]]
        bias, count = torch.cat(biases) if biases else None, config.num_heads + 2 * config.num_kv_heads
        into = heads_matrix(torch.cat(heads), config.head_dim, bias, packing, count)
        return into, (norms[0], norms[1]) if norms else None

    def _attention_output(self) -> Matrix:
        config, shard = self.read.config, self.read.shard
        rows = shard.rows(config.hidden_size)
        (output,), packed = self._matrices(["self_attn.o_proj"], rows)
        bias = self._take("self_attn.o_proj.bias", rows) if config.output_bias else None
        return matrix(output, bias, config.hidden_size, shard, packed)

    def _attention_gate(self) -> Matrix:
        (gates,), packed = self._matrices(["self_attn.gate_proj"])
        bias = self._take("self_attn.gate_proj.bias") if self.read.config.qkv_bias else None
        return matrix(gates, bias, packing=packed)


def has_residual(config: ModelConfig) -> bool:
    scales = config.embedding_scale, config.residual_scale
    return config.norm_placement != "pre" or config.norm != "rms" or scales != (1, 1)


def _has_fp8_input(config: ModelConfig, name: str) -> bool:
    """Whether the input of a layer's matrix is in e4m3: not that of experts, nor of odd sizes."""
    if config.recurrent or config.latent or has_residual(config):
        return False
    if ".mlp.experts." in name or config.hidden_size % FP8_GROUP:
        return False
    return ".self_attn.o_proj." not in name or config.head_dim in FP8_HEAD_SIZES


def _multiplies_e4m3(device: torch.device) -> bool:
    """Whether the device does; Triton's interpreter does."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= MULTIPLIES_E4M3


def head_order(config: ModelConfig, rope: RopeConfig | None, device: torch.device) -> torch.Tensor | None:
    """The order of a head's values in which RoPE rotates pairs of its two halves; None: their own.

    RoPE of a part of a head pairs the halves of this part. Scores are the same in any order that queries and
    keys share.
    """
    dim, rotated = config.head_dim, config.head_dim if rope is None else rope.dim or config.head_dim
    if rotated == dim:
        return None
    first, second = torch.arange(rotated, device=device).chunk(2)
    others = torch.arange(rotated, dim, device=device).chunk(2)
    return torch.cat((first, others[0], second, others[1]))


def reordered(heads: torch.Tensor, dim: int, order: torch.Tensor) -> torch.Tensor:
    """Lines [heads * dim, ...] with the lines of each head in this order."""
    return heads.reshape(-1, dim, *heads.shape[1:])[:, order].flatten(0, 1)
