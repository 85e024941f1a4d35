"""Layer: the weights of one layer in the layout of the kernels, and their loading from a checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product

import torch

from paceline.backends.cuda.kernels.attention.heads import Rotation
from paceline.backends.cuda.kernels.attention.latent import head_matrices
from paceline.backends.cuda.kernels.attention.scoring import LLAMA_SCORING, Scoring
from paceline.backends.cuda.kernels.attention.split_heads import HeadSplit
from paceline.backends.cuda.kernels.experts.routing import Mixture
from paceline.backends.cuda.kernels.products.low_rank import LowRank
from paceline.backends.cuda.kernels.products.matrix import Matrix
from paceline.backends.cuda.layers.latent import LatentWeights
from paceline.backends.cuda.layers.per_layer import PerLayerGate
from paceline.backends.cuda.weights.reader import Reader
from paceline.backends.cuda.weights.tiled import (
    heads_matrix,
    matrix,
    padded_line,
    padded_size,
    pair_lines,
    pair_matrix,
    same_sizes,
    stacked_matrix,
)
from paceline.models.config import FEED_FORWARD, LatentConfig, ModelConfig, MoeConfig, RopeConfig
from paceline.models.files.layout import NORMS, RECURRENT_MATRICES

SHARED = "mlp.shared_experts"


@dataclass(frozen=True)
class LayerAdapters:
    """The LoRA matrices for the products of a layer; None: no adapter changes the product."""

    qkv: LowRank | None = None
    output: LowRank | None = None
    gate_up: LowRank | None = None
    down: LowRank | None = None

    @property
    def largest_rank(self) -> int:
        return max(own.rank if own else 0 for own in (self.qkv, self.output, self.gate_up, self.down))


@dataclass(frozen=True)
class ExpertNorms:
    """Norms before and after experts, and after a shared MLP: weights [padded hidden]."""

    experts: torch.Tensor
    router: torch.Tensor  # ones: the scale of the router's input is folded into its matrix
    experts_output: torch.Tensor
    shared_output: torch.Tensor


@dataclass(frozen=True)
class Layer:
    """One layer: attention, then a gated feed-forward block."""

    attention_norm: torch.Tensor | None  # [padded hidden]
    qkv: Matrix  # tiles are heads: queries, then keys, then values; latent attention: see latent.py
    head_norms: tuple[torch.Tensor, torch.Tensor] | None  # [head_dim] QK norms of queries and keys
    output: Matrix
    feed_forward_norm: torch.Tensor | None  # [padded hidden]
    gate_up: Matrix  # in a mixture, of all experts
    down: Matrix
    mixture: Mixture | None = None  # routed experts; None: a dense layer
    rotation: Rotation | None = None  # RoPE tables; None: no RoPE
    scoring: Scoring = LLAMA_SCORING
    activation: str = "silu"
    joint_norms: tuple[torch.Tensor, torch.Tensor] | None = None  # QK norms over all heads together
    output_norms: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)  # of attention and MLP
    shared: tuple[Matrix, Matrix] | None = None  # gate_up and down of a shared expert outside of `mixture`
    shared_gate: Matrix | None = None  # one column: its sigmoid scales the shared expert
    gate: Matrix | None = None  # its sigmoid scales the attention output
    recurrence: tuple[Matrix, Matrix] | None = None  # input and output projections
    attends: bool = True  # False: no attention; `qkv` and `output` are unused
    feeds_forward: bool = True  # False: no MLP; `gate_up` and `down` are unused
    latent: LatentWeights | None = None  # latent attention
    query_factors: torch.Tensor | None = None  # float32 [positions] scales of queries
    split: HeadSplit | None = None  # heads are split by a separate kernel: tiles of `qkv` are ordinary tiles
    scale: float = 1.0  # of the layer's output
    per_layer: PerLayerGate | None = None  # per-layer embeddings
    expert_norms: ExpertNorms | None = None  # norms of `mixture` and `shared`
    adapters: LayerAdapters = LayerAdapters()

    @property
    def mixes(self) -> bool:
        """Whether it has attention or a recurrence; otherwise it is only an MLP."""
        return self.attends or self.recurrence is not None

    @property
    def is_plain(self) -> bool:
        """Whether it has only what llama has, so that CUDA C++ kernels can run it."""
        known = self.scoring.is_native and self.activation == "silu" and self.joint_norms is None
        whole = self.attends and self.feeds_forward and self.recurrence is None
        return known and whole and self.gate is None and self.query_factors is None


def load_layer(read: Reader, dtype: torch.dtype, index: int) -> Layer:
    """A layer, or a rank's part of it."""
    return _LayerLoader(read, dtype, index).load()


@dataclass(frozen=True)
class _LayerLoader:
    """Loads the weights of one layer."""

    read: Reader
    dtype: torch.dtype
    index: int

    def load(self) -> Layer:
        """The layer: attention, recurrence and feed-forward block, as far as it has them."""
        config, index = self.read.config, self.index
        moe = config.moe if config.moe and index in config.moe.layers else None
        mixer, recurrence, mlp = None, None, None
        if index in config.attending_layers:
            mixer = self._attention()
        if config.recurrent is not None and config.is_recurrent(index):
            recurrence = self._recurrence(config.recurrent.kind)
        if config.has_part(index, FEED_FORWARD):
            mlps = ["mlp"] if moe is None else self._experts(moe)
            mlp = self._feed_forward(mlps, moe is not None and moe.biases)
        if mixer is None:
            first = recurrence or mlp
            assert first is not None, "a layer has one of them at least"
            into, out = first
            mixer = Layer(None, into, None, out, None, into, out, attends=False)
        gate_up, down = mlp or (mixer.qkv, mixer.output)
        followed = replace(
            mixer,
            attention_norm=self._norm("input_layernorm"),
            feed_forward_norm=self._norm("post_attention_layernorm"),
            gate_up=gate_up,
            down=down,
            activation=config.activation,
            recurrence=recurrence,
            feeds_forward=mlp is not None,
            output_norms=(self._norm("attention_output_norm"), self._norm("feed_forward_output_norm")),
            scale=float(self._take("layer_scalar")) if config.layer_scales else 1.0,
            per_layer=self._per_layer() if config.per_layer_input else None,
        )
        return followed if moe is None else self._with_experts(followed, moe)

    def _experts(self, moe: MoeConfig) -> list[str]:
        """The names of the stacked MLPs: all experts, and the shared one if it has the same packing.

        It must have it in all layers, because they share buffers for a number of experts (`routing_for`).
        """
        names = [f"mlp.experts.{expert}" for expert in range(moe.num_experts)]
        is_stacked = moe.shared_intermediate_size % moe.intermediate_size == 0
        is_stacked = is_stacked and not moe.biases and not moe.own_norms
        if not moe.shared_intermediate_size or not is_stacked:
            return names
        for layer, part in product(moe.layers, ("gate_proj", "up_proj", "down_proj")):
            own = [f"model.layers.{layer}.{mlp}.{part}.weight" for mlp in (names[0], SHARED)]
            if len(set(map(self.read.packing, own))) > 1:
                return names
        return [*names, SHARED]

    def _with_experts(self, layer: Layer, moe: MoeConfig) -> Layer:
        """The layer with its router, experts and shared expert."""
        take, down = self._take, layer.down
        shared = layer.gate_up.padded_width // (self._sides * down.depth) - moe.num_experts
        scores = [take("mlp.gate.weight")]
        if moe.own_norms:  # the router's input is scaled
            scale = take("mlp.gate.scale").float() * self.read.config.hidden_size**-0.5
            scores = [(scores[0].float() * scale).to(self.dtype)]
        scores += [take("mlp.shared_expert_gate.weight")] if moe.shared_gate and shared else []
        router = matrix(torch.cat(scores), take("mlp.gate.bias") if moe.biases else None)
        correction = take("mlp.gate.e_score_correction_bias").float() if moe.correction_bias else None
        factors = take("mlp.gate.per_expert_scale").float() if moe.own_norms else None
        mixture = Mixture(router, layer.gate_up, down, moe, layer.activation, correction, shared, factors)
        if shared or not moe.shared_intermediate_size:
            return replace(layer, mixture=mixture)
        return replace(
            layer,
            mixture=mixture,
            shared=self._feed_forward([SHARED]),
            shared_gate=matrix(take("mlp.shared_expert_gate.weight"), None) if moe.shared_gate else None,
            expert_norms=self._expert_norms() if moe.own_norms else None,
        )

    def _expert_norms(self) -> ExpertNorms:
        names = ("experts", "experts_output", "shared_output")
        place = f"model.layers.{self.index}.mlp"
        norms = {name: self.read.norm(f"{place}.{name}_norm.weight") for name in names}
        return ExpertNorms(**norms, router=torch.ones_like(norms["experts"]))

    def _take(self, part: str, rows: slice | None = None) -> torch.Tensor:
        return self.read.part(self.read.take, f"model.layers.{self.index}.{part}", rows)

    def _matrices(self, parts: list[str], *rows: slice | None) -> tuple[list[torch.Tensor], str]:
        """Matrices to concatenate, and their packing. `rows`: slices of each, one for all; none: all rows."""
        names = [f"model.layers.{self.index}.{part}.weight" for part in parts]
        each = rows if len(rows) == len(names) else (rows or (None,)) * len(names)
        return self.read.matrices(names, each, self.dtype)

    @property
    def _sides(self) -> int:
        """The columns of `gate_up` per input of `down`: 2, or 1 without a gate."""
        return 2 if self.read.config.is_gated else 1

    def _norm(self, part: str) -> torch.Tensor | None:
        """The weight of the norm of this name, if the family has it."""
        config = self.read.config
        has_it = part in (NORMS[config.norm_placement] if not config.layer_parts else ("input_layernorm",))
        return self.read.norm(f"model.layers.{self.index}.{part}.weight") if has_it else None

    def _feed_forward(self, mlps: list[str], biases: bool = False) -> tuple[Matrix, Matrix]:
        """The gate and up matrices of these MLPs as one matrix (or up alone), and their down matrices."""
        config, shard, take = self.read.config, self.read.shard, self._take
        sides = ("gate", "up") if config.is_gated else ("up",)
        gates = [f"{own}.{part}_proj" for part in sides for own in mlps]
        downs = [f"{own}.down_proj" for own in mlps]
        weights, packing = self._matrices(gates, shard.rows(config.intermediate_size))
        tiled = pair_matrix if config.is_gated else stacked_matrix
        gate_up = tiled(same_sizes(weights, 0), packing, config.intermediate_size, shard)
        weights, packing = self._matrices(downs, shard.rows(config.hidden_size))
        down = stacked_matrix(same_sizes(weights, 1), packing, config.hidden_size, shard)
        if biases:
            gate_up = replace(gate_up, bias=pair_lines([take(f"{own}.bias") for own in gates], gate_up))
            lines = [take(f"{own}.bias") for own in downs]
            down = replace(down, bias=torch.cat([padded_line(own, padded_size(len(own))) for own in lines]))
        return gate_up, down

    def _recurrence(self, kind: str) -> tuple[Matrix, Matrix]:
        """The input and output projections of a layer's recurrence."""
        place, inputs, output = RECURRENT_MATRICES[kind]
        recurrent, take = self.read.config.recurrent, self._take
        biases = kind == "short_conv" and recurrent is not None and recurrent.conv_bias
        read_by, packed = self._matrices([f"{place}.{part}" for part in inputs])
        (given,), given_packed = self._matrices([f"{place}.{output}"])
        bias = take(f"{place}.in_proj.bias") if biases else None
        output_bias = take(f"{place}.{output}.bias") if biases else None
        into = matrix(torch.cat(read_by), bias, packing=packed)
        return into, matrix(given, output_bias, packing=given_packed)

    def _attention(self) -> Layer:
        """The layer with its attention only."""
        config, take = self.read.config, self._take
        if config.latent is not None:
            return self._latent_attention(config.latent)
        split = self._split()
        into, norms = self._heads() if split is None else self._split_heads(split)
        sinks = take("self_attn.sinks") if config.attention_sinks else None
        out, chunk = self._attention_output(), config.reach(self.index).chunk or 0
        scale, cap, groups = config.attention_scale, config.attention_softcap, mixed_groups(config)
        return Layer(
            None,
            into,
            None if config.joint_qk_norm else norms,
            out,
            None,
            into,
            out,
            scoring=Scoring(scale, cap, sinks, chunk=chunk, groups=groups),
            joint_norms=norms if config.joint_qk_norm else None,
            gate=self._attention_gate() if config.attention_gate else None,
            split=split,
        )

    def _latent_attention(self, latent: LatentConfig) -> Layer:
        """The layer with its latent attention only. Per-head matrices are never packed."""
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
        if config.unit_qk and config.rope_of(self.index) is not None:  # RoPE does not change a length
            norms = [torch.ones(config.head_dim, dtype=self.dtype, device=heads[0].device)] * 2
        order = head_order(config, config.rope_of(self.index), heads[0].device)
        for part in (heads, biases, norms):
            if order is not None:  # of queries and keys
                part[:2] = [reordered(own, config.head_dim, order) for own in part[:2]]
        bias, count = torch.cat(biases) if biases else None, config.num_heads + 2 * config.num_kv_heads
        into = heads_matrix(torch.cat(heads), config.head_dim, bias, packing, count)
        return into, (norms[0], norms[1]) if norms else None

    def _split(self) -> HeadSplit | None:
        """How rows split into heads, if a separate kernel does that (head shapes by layer, or a V norm)."""
        config, shape = self.read.config, self.read.config.shape_of(self.index)
        if not config.layer_shapes and not config.value_norm:
            return None
        own = shape.num_kv_heads if shape.shared_with is None else 0
        return HeadSplit(config.num_heads, own, shape.head_dim, shape.values_are_keys, config.value_norm)

    def _split_heads(self, split: HeadSplit) -> tuple[Matrix, tuple[torch.Tensor, torch.Tensor] | None]:
        """The same as `_heads`, for heads that are split by a separate kernel."""
        config, take = self.read.config, self._take
        parts = "q" if not split.kv_heads else "qk" if split.values_are_keys else "qkv"
        heads, packing = self._matrices([f"self_attn.{part}_proj" for part in parts])
        biases = [take(f"self_attn.{part}_proj.bias") for part in parts if config.qkv_bias]
        norms = [take(f"self_attn.{part}_norm.weight") for part in parts[:2] if config.qk_norm]
        into = matrix(torch.cat(heads), torch.cat(biases) if biases else None, packing=packing)
        return into, (norms[0], norms[-1]) if norms else None

    def _per_layer(self) -> PerLayerGate:
        norm = self.read.norm(f"model.layers.{self.index}.post_per_layer_input_norm.weight")
        names = "per_layer_input_gate.weight", "per_layer_projection.weight"
        gate, projection = (matrix(self._take(name), None) for name in names)
        return PerLayerGate(gate, projection, norm)

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


def mixed_groups(config: ModelConfig) -> int:
    """The groups of query heads in every layer, if head shapes differ by layer; 0: a group per KV head."""
    return math.lcm(*(shape.num_kv_heads for shape in config.layer_shapes)) if config.layer_shapes else 0


def head_order(config: ModelConfig, rope: RopeConfig | None, device: torch.device) -> torch.Tensor | None:
    """The order of a head's values that turns partial RoPE into RoPE of its two halves; None: unchanged.

    Partial RoPE pairs the halves of the rotated part. Scores do not depend on the order, if queries and keys
    have the same.
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
