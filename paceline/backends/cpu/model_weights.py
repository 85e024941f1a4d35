"""The weights of a model as the compiled pass reads them: packed matrices and tables, by address."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu import job as fields
from paceline.backends.cpu.packing import PackedMatrix, address_of, aligned_zeros, pack_matrices
from paceline.backends.cpu.rows import ACTIVATIONS
from paceline.backends.cpu.tiles import GROUP
from paceline.models.checkpoint import Checkpoint
from paceline.models.config import ModelConfig, MoeConfig, RopeConfig
from paceline.models.rope import rope_tables

_LAYER = "model.layers.{}."
_ATTENTION = tuple(f"self_attn.{part}_proj" for part in "qkvo")
_MLP = ("gate_proj", "up_proj", "down_proj")


def round_up(value: int, multiple: int) -> int:
    """The next multiple."""
    return -(-value // multiple) * multiple


class ModelWeights:
    """What a pass reads of a model, and the job with its addresses."""

    def __init__(
        self, checkpoint: Checkpoint, quantization: str, threads: int, packed: Mapping[str, PackedMatrix]
    ) -> None:
        """`packed` are matrices already packed by another model, by their names in this one."""
        self.config = checkpoint.config
        self._tensors = checkpoint.tensors
        self._kept: list[npt.NDArray[np.generic]] = []  # keeps alive what the job's addresses point into
        self.job = np.zeros(fields.JOB_SIZE, dtype=np.int64)
        self.hidden = round_up(self.config.hidden_size, GROUP)
        self._matrices = _pack_matrices(checkpoint, quantization, threads, packed)
        self._norms = [self._norm(name) for name in self._norm_names()]  # addresses, the LM head's last
        self._set_weights()
        self._set_blocks()
        self.job[fields.HAS_EXPERTS_AT] = self._buffer(self.config.num_layers, dtype=np.int64)
        if self.config.moe is not None:
            self._set_experts(self.config.moe)
        del self._tensors

    @property
    def last_norm(self) -> int:
        """The address of the weights of the norm before the LM head."""
        return self._norms[-1]

    @property
    def embedding(self) -> PackedMatrix:
        return self._matrices["model.embed_tokens.weight"]

    @property
    def lm_head(self) -> PackedMatrix:
        return self.embedding if self.config.tie_embeddings else self._matrices["lm_head.weight"]

    def _keep(self, array: npt.NDArray[np.generic]) -> int:
        self._kept.append(array)
        return address_of(array)

    def _buffer(self, *shape: int, dtype: npt.DTypeLike = np.float32) -> int:
        return self._keep(aligned_zeros(shape, dtype))

    def _vectors(self, names: list[str], width: int) -> npt.NDArray[np.float32]:
        """Vectors, or matrices row by row, below each other, padded with zeros to `width`."""
        rows = [np.atleast_2d(self._tensors[name].float32()) for name in names]
        return np.concatenate([np.pad(row, ((0, 0), (0, width - row.shape[1]))) for row in rows])

    def _norm(self, name: str) -> int:
        """The address of the weights of a norm; 0 if the model lacks it."""
        return self._keep(self._vectors([name], self.hidden)) if name in self._tensors else 0

    def _layer_names(self, *suffixes: str) -> list[str]:
        return [_LAYER.format(i) + name for i in range(self.config.num_layers) for name in suffixes]

    def _norm_names(self) -> list[str]:
        """The norms before attention and MLP of each layer, and the one before the LM head."""
        before_mlp = "input_layernorm" if self._is_parallel else "post_attention_layernorm"
        return [*self._layer_names("input_layernorm.weight", f"{before_mlp}.weight"), "model.norm.weight"]

    def _set_weights(self) -> None:
        config, job = self.config, self.job
        windows = [config.window(layer) or 0 for layer in range(config.num_layers)]
        job[fields.EPSILON_AT] = self._keep(np.array([config.rms_norm_eps], dtype=np.float32))
        job[fields.NORMS_AT] = self._keep(np.array(self._norms, dtype=np.int64))
        job[fields.ROPES_AT] = self._keep(self._ropes())
        job[fields.WINDOWS_AT] = self._keep(np.array(windows, dtype=np.int64))
        job[fields.MATRICES_AT] = self._descriptors(matrix_names(config))
        if config.qk_norm or config.joint_qk_norm:
            names = self._layer_names("self_attn.q_norm.weight", "self_attn.k_norm.weight")
            width = self._qkv_widths()[0] if config.joint_qk_norm else config.head_dim
            job[fields.HEAD_NORMS_AT] = self._keep(self._vectors(names, width))
        if config.qkv_bias:
            parts = [
                self._vectors(self._layer_names(f"self_attn.{part}_proj.bias"), width)
                for part, width in zip("qkv", self._qkv_widths(), strict=True)
            ]
            job[fields.QKV_BIAS_AT] = self._keep(np.concatenate(parts, axis=1))
        if config.output_bias:
            names = self._layer_names("self_attn.o_proj.bias")
            job[fields.OUTPUT_BIAS_AT] = self._keep(self._vectors(names, self.hidden))

    @property
    def _is_parallel(self) -> bool:
        """Whether attention and MLP read the same norm."""
        return self.config.norm_placement == "parallel"

    def _set_blocks(self) -> None:
        """What the model has beyond llama: factors, caps, norms after attention and MLP, sinks."""
        config, job = self.config, self.job
        scales = {
            fields.SCORE_SCALE: config.attention_scale or 1.0 / math.sqrt(config.head_dim),
            fields.SCORE_CAP: config.attention_softcap,
            fields.EMBEDDING_SCALE: config.embedding_scale,
            fields.RESIDUAL_SCALE: config.residual_scale,
            fields.LOGITS_SCALE: config.logits_scale,
            fields.LOGITS_CAP: config.logits_softcap,
            fields.SHARE_SCALE: config.moe.weight_scale if config.moe else 1.0,
        }
        ordered = [scales[index] for index in range(len(scales))]
        job[fields.SCALES_AT] = self._keep(np.array(ordered, dtype=np.float32))
        job[fields.ACTIVATION], job[fields.CENTERED] = ACTIVATIONS[config.activation], config.norm == "layer"
        job[fields.PARALLEL], job[fields.JOINT_QK_NORM] = self._is_parallel, config.joint_qk_norm
        names = self._layer_names("attention_output_norm.weight", "feed_forward_output_norm.weight")
        norms = np.array([self._norm(name) for name in names], dtype=np.int64)
        if norms.any() or self._is_parallel or config.residual_scale != 1:
            job[fields.OUTPUT_NORMS_AT] = self._keep(norms)
        if config.attention_sinks:
            sinks = self._vectors(self._layer_names("self_attn.sinks"), config.num_heads)
            job[fields.SINKS_AT] = self._keep(sinks)

    def _ropes(self) -> npt.NDArray[np.int64]:
        """Every layer's rope: addresses of cosines and sines, and the rotated pairs of a head."""
        config = self.config
        ropes = [config.rope_of(layer) for layer in range(config.num_layers)]
        known: dict[RopeConfig | None, tuple[int, int, int]] = {None: (0, 0, 0)}
        for rope in ropes:
            if rope is not None and rope not in known:
                cosines, sines = rope_tables(rope, config.head_dim, config.max_position)
                known[rope] = self._keep(cosines), self._keep(sines), cosines.shape[1]
        return np.array([known[rope] for rope in ropes], dtype=np.int64)

    def _set_experts(self, moe: MoeConfig) -> None:
        """The routers and experts of the layers that have them; zeros in the others."""
        job, layers = self.job, range(self.config.num_layers)
        job[fields.EXPERTS], job[fields.EXPERTS_PER_TOKEN] = moe.num_experts, moe.experts_per_token
        job[fields.EXPERT_WIDTH] = round_up(moe.intermediate_size, GROUP)
        job[fields.NORMALIZE_SHARES] = moe.normalize_weights
        job[fields.SIGMOID_SCORES] = moe.scoring == "sigmoid"
        job[fields.EXPERT_GROUPS], job[fields.CHOSEN_GROUPS] = moe.groups, moe.chosen_groups
        job[fields.GROUP_EXPERTS] = moe.group_experts
        has_experts = np.array([layer in moe.layers for layer in layers], dtype=np.int64)
        job[fields.HAS_EXPERTS_AT] = self._keep(has_experts)
        job[fields.ROUTERS_AT] = self._of_experts(moe, "mlp.gate.weight", (moe.num_experts, self.hidden))
        job[fields.EXPERT_MATRICES_AT] = self._descriptors(
            [name if layer in moe.layers else None for layer in layers for name in _expert_names(moe, layer)]
        )
        if moe.correction_bias:
            name = "mlp.gate.e_score_correction_bias"
            job[fields.CORRECTIONS_AT] = self._of_experts(moe, name, (1, moe.num_experts))
        if moe.biases:
            job[fields.ROUTER_BIASES_AT] = self._of_experts(moe, "mlp.gate.bias", (1, moe.num_experts))
            job[fields.EXPERT_BIASES_AT] = self._expert_biases(moe)

    def _of_experts(self, moe: MoeConfig, name: str, shape: tuple[int, int]) -> int:
        """The address of a tensor of each layer with experts, padded to this shape."""
        table = np.zeros((self.config.num_layers, *shape), dtype=np.float32)
        for layer in moe.layers:
            table[layer] = self._vectors([_LAYER.format(layer) + name], shape[1])
        return self._keep(table)

    def _expert_biases(self, moe: MoeConfig) -> int:
        """The address of the biases of gate, up and down of every expert, each padded as its matrix is."""
        width = round_up(moe.intermediate_size, GROUP)
        table = np.zeros((self.config.num_layers, moe.num_experts, 2 * width + self.hidden), dtype=np.float32)
        for layer in moe.layers:
            names = [name.replace(".weight", ".bias") for name in _expert_names(moe, layer)]
            for part, size in enumerate((width, width, self.hidden)):
                table[layer, :, part * width : part * width + size] = self._vectors(names[part::3], size)
        return self._keep(table)

    def _descriptors(self, names: list[str | None]) -> int:
        """The table of these matrices; a line of zeros where there is none."""
        lines = [self._matrices[name].descriptor() if name else [0] * 5 for name in names]
        return self._keep(np.array(lines, dtype=np.int64))

    def _qkv_widths(self) -> tuple[int, int, int]:
        """Columns of queries, keys and values in the pass's buffer, each padded as their matrices are."""
        keys = round_up(self.config.num_kv_heads * self.config.head_dim, GROUP)
        return round_up(self.config.num_heads * self.config.head_dim, GROUP), keys, keys


def matrix_names(config: ModelConfig) -> list[str | None]:
    """Tensor names in the order of the descriptor table of job.py.

    Where a layer has experts, its MLP is the one that all rows share, or None.
    """
    sparse = config.moe.layers if config.moe else frozenset()
    shared = "mlp.shared_experts" if config.moe and config.moe.shared_intermediate_size else None
    names: list[str | None] = []
    for layer in range(config.num_layers):
        names += [_LAYER.format(layer) + f"{part}.weight" for part in _ATTENTION]
        mlp = shared if layer in sparse else "mlp"
        names += [_LAYER.format(layer) + f"{mlp}.{part}.weight" if mlp else None for part in _MLP]
    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    return [*names, "model.embed_tokens.weight", head]


def _expert_names(moe: MoeConfig, layer: int) -> list[str]:
    prefix = _LAYER.format(layer)
    return [
        f"{prefix}mlp.experts.{expert}.{part}.weight" for expert in range(moe.num_experts) for part in _MLP
    ]


def _pack_matrices(
    checkpoint: Checkpoint, quantization: str, threads: int, known: Mapping[str, PackedMatrix]
) -> dict[str, PackedMatrix]:
    """All matrices by name, packed by several threads unless they are known."""
    moe = checkpoint.config.moe
    names = [name for name in matrix_names(checkpoint.config) if name]
    names += [name for layer in sorted(moe.layers) for name in _expert_names(moe, layer)] if moe else []
    tensors = {name: checkpoint.tensors[name] for name in names if name not in known}
    return {**known, **pack_matrices(tensors, quantization, threads)}
