"""The job of a model: its packed weights, tables and buffers, and the addresses the compiled pass reads."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu import job as fields
from paceline.backends.cpu.attention_choice import RESULT_ROWS, TASK_HEADS, run_mix, run_score
from paceline.backends.cpu.attention_tiles import PAGE
from paceline.backends.cpu.matmul import run_tile
from paceline.backends.cpu.packing import PackedMatrix, address_of, pack_matrices
from paceline.backends.cpu.phases import CHUNK_ROWS
from paceline.backends.cpu.rows import record_stride
from paceline.backends.cpu.sampling import run_gumbel_argmax
from paceline.backends.cpu.simd import LANES
from paceline.backends.cpu.tiles import GROUP, RECORD
from paceline.models.checkpoint import Checkpoint
from paceline.models.config import ModelConfig, MoeConfig
from paceline.models.rope import rope_tables

_LAYER = "model.layers.{}."
_ATTENTION = tuple(f"self_attn.{part}_proj" for part in "qkvo")
_MLP = ("gate_proj", "up_proj", "down_proj")


def round_up(value: int, multiple: int) -> int:
    """The next multiple."""
    return -(-value // multiple) * multiple


class Workspace:
    """Everything a pass of this model reads and writes, except the batch and the KV pool."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        quantization: str,
        threads: int,
        rows: int,
        *,
        packed: Mapping[str, PackedMatrix] | None = None,
        entry_width: int = 0,
    ) -> None:
        """`packed` are matrices already packed by another model, by their names in this one.

        `entry_width` is the most floats of a row that the entry of a draft head works on.
        """
        self.config, self.threads, self.rows = checkpoint.config, threads, rows
        self._tensors = checkpoint.tensors
        self._kept: list[npt.NDArray[np.generic]] = []  # keeps alive what the job's addresses point into
        self.job = np.zeros(fields.JOB_SIZE, dtype=np.int64)
        self.quantized = quantization != "none"
        self.half_kv = self.quantized
        self.hidden = round_up(self.config.hidden_size, GROUP)
        self.max_pages = round_up(self.config.max_position, PAGE) // PAGE  # of one request
        self._record = RECORD if self.quantized else 4 * GROUP
        self._entry_width = entry_width
        self._matrices = _pack_matrices(checkpoint, quantization, threads, packed or {})
        self._set_sizes()
        self._set_weights()
        self._set_buffers()
        if self.config.moe is not None:
            self._set_experts(self.config.moe)
        del self._tensors

    def first_layers(self, count: int) -> Workspace:
        """The same without the layers from `count` on. Weights and buffers are shared: passes take turns."""
        early = copy(self)
        early.config = replace(self.config, num_layers=count)
        early.job, early._kept = self.job.copy(), [*self._kept]
        early.job[fields.LAYERS] = count
        # in these tables, entries of the LM head follow those of the last layer
        early.job[fields.MATRICES_AT] = early._descriptors(_matrix_names(early.config))
        norms = np.array([*self._norms[: 2 * count], self._norms[-1]], dtype=np.int64)
        early.job[fields.NORMS_AT] = early._keep(norms)
        early.feature_slots = np.full(count + 1, -1, dtype=np.int64)
        early.job[fields.FEATURE_SLOT_AT] = address_of(early.feature_slots)
        return early

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

    @property
    def block_bytes(self) -> int:
        """Bytes of the keys and values of one page, layer and KV head."""
        width = self.config.head_dim
        return (2 if self.half_kv else 4) * PAGE * (width + round_up(width, LANES))

    def _keep(self, array: npt.NDArray[np.generic]) -> int:
        self._kept.append(array)
        return address_of(array)

    def _buffer(self, *shape: int, dtype: npt.DTypeLike = np.float32) -> int:
        return self._keep(np.zeros(shape, dtype=dtype))

    def _vectors(self, names: list[str], width: int) -> npt.NDArray[np.float32]:
        """Vectors, or matrices row by row, below each other, padded with zeros to `width`."""
        rows = [np.atleast_2d(self._tensors[name].float32()) for name in names]
        stacked = np.zeros((sum(map(len, rows)), width), dtype=np.float32)
        joined = np.concatenate(rows)
        stacked[:, : joined.shape[1]] = joined
        return stacked

    def _norm(self, name: str) -> int:
        """The address of the weights of a norm; 0 if the model lacks it."""
        return self._keep(self._vectors([name], self.hidden)) if name in self._tensors else 0

    def _layer_names(self, *suffixes: str) -> list[str]:
        return [_LAYER.format(i) + name for i in range(self.config.num_layers) for name in suffixes]

    def _set_sizes(self) -> None:
        config, job = self.config, self.job
        job[fields.LAYERS] = config.num_layers
        job[fields.HIDDEN], job[fields.HIDDEN_PADDED] = config.hidden_size, self.hidden
        job[fields.HEADS], job[fields.KV_HEADS] = config.num_heads, config.num_kv_heads
        job[fields.HEAD_WIDTH] = config.head_dim
        job[fields.INTERMEDIATE] = round_up(config.intermediate_size, GROUP)
        job[fields.QUANTIZED], job[fields.HALF_KV] = self.quantized, self.half_kv
        job[fields.RUN_TILE] = run_tile.address
        job[fields.RUN_SCORE], job[fields.RUN_MIX] = run_score.address, run_mix.address
        job[fields.RUN_GUMBEL_ARGMAX], job[fields.VOCABULARY] = run_gumbel_argmax.address, config.vocab_size

    def _set_weights(self) -> None:
        config, job = self.config, self.job
        names = [
            *self._layer_names("input_layernorm.weight", "post_attention_layernorm.weight"),
            "model.norm.weight",
        ]
        cosines, sines = rope_tables(config.rope, config.head_dim, config.max_position)
        windows = [config.window(layer) or 0 for layer in range(config.num_layers)]
        job[fields.EPSILON_AT] = self._keep(np.array([config.rms_norm_eps], dtype=np.float32))
        self._norms = [self._norm(name) for name in names]  # addresses
        job[fields.NORMS_AT] = self._keep(np.array(self._norms, dtype=np.int64))
        job[fields.COSINES_AT], job[fields.SINES_AT] = self._keep(cosines), self._keep(sines)
        job[fields.WINDOWS_AT] = self._keep(np.array(windows, dtype=np.int64))
        job[fields.MATRICES_AT] = self._descriptors(_matrix_names(config))
        if config.qk_norm:
            names = self._layer_names("self_attn.q_norm.weight", "self_attn.k_norm.weight")
            job[fields.HEAD_NORMS_AT] = self._keep(self._vectors(names, config.head_dim))
        if config.qkv_bias:
            parts = [
                self._vectors(self._layer_names(f"self_attn.{part}_proj.bias"), width)
                for part, width in zip("qkv", self._qkv_widths(), strict=True)
            ]
            job[fields.QKV_BIAS_AT] = self._keep(np.concatenate(parts, axis=1))
        if config.output_bias:
            names = self._layer_names("self_attn.o_proj.bias")
            job[fields.OUTPUT_BIAS_AT] = self._keep(self._vectors(names, self.hidden))

    def _descriptors(self, names: list[str | None]) -> int:
        """The table of these matrices; a line of zeros where there is none."""
        lines = [self._matrices[name].descriptor() if name else [0] * 5 for name in names]
        return self._keep(np.array(lines, dtype=np.int64))

    def _qkv_widths(self) -> tuple[int, int, int]:
        """Columns of queries, keys and values in the pass's buffer, each padded as their matrices are."""
        keys = round_up(self.config.num_kv_heads * self.config.head_dim, GROUP)
        return round_up(self.config.num_heads * self.config.head_dim, GROUP), keys, keys

    def _set_buffers(self) -> None:
        config, job, rows = self.config, self.job, self.rows
        attention, qkv = round_up(config.num_heads * config.head_dim, GROUP), sum(self._qkv_widths())
        job[fields.STATE_AT] = self._buffer(rows, self.hidden)
        job[fields.QKV_AT], job[fields.QKV_STRIDE] = self._buffer(rows, qkv), 4 * qkv
        job[fields.ATTENTION_AT], job[fields.ATTENTION_PADDED] = self._buffer(rows, attention), attention
        groups, stride = max(self.hidden, attention, self._entry_width) // GROUP, record_stride.py_func(rows)
        job[fields.RECORDS_AT] = self._buffer(groups, stride, self._record, dtype=np.uint8)
        wide = int(job[fields.INTERMEDIATE]) // GROUP
        job[fields.WIDE_RECORDS_AT] = self._buffer(wide, stride, self._record, dtype=np.uint8)
        scratch = round_up(self._scratch_bytes(), 64)
        job[fields.SCRATCH_BYTES] = scratch
        job[fields.SCRATCH_AT] = self._buffer(self.threads, scratch, dtype=np.uint8)
        job[fields.HAS_EXPERTS_AT] = self._buffer(config.num_layers, dtype=np.int64)
        self.counters = np.zeros(
            (4 + fields.ENTRY_COUNTERS + fields.COUNTERS_PER_LAYER * config.num_layers, self.threads, 8),
            dtype=np.int64,
        )
        self.feature_slots = np.full(config.num_layers + 1, -1, dtype=np.int64)
        self.row_requests = np.zeros(rows, dtype=np.int32)  # the request of each row
        self.chains = np.zeros(rows, dtype=np.int32)  # for each request, whether its rows are a chain
        job[fields.COUNTERS_AT] = address_of(self.counters)
        job[fields.FEATURE_SLOT_AT] = address_of(self.feature_slots)
        job[fields.REQUEST_AT], job[fields.CHAIN_AT] = address_of(self.row_requests), address_of(self.chains)

    def _scratch_bytes(self) -> int:
        """The most bytes of scratch memory that a thread needs in any phase."""
        config = self.config
        attention = (8 + 4 * PAGE * TASK_HEADS) * self.max_pages + 4 * TASK_HEADS * config.head_dim
        attention += 64 + 4 * RESULT_ROWS * (config.head_dim + 15)
        attention += (self.rows // PAGE + 2) * self.block_bytes
        routing = 4 * self.hidden + 4 * ((config.moe.num_experts if config.moe else 0) + LANES)
        return max(attention, 2 * CHUNK_ROWS * 4 * GROUP, routing, 4 * self._entry_width)

    def _set_experts(self, moe: MoeConfig) -> None:
        config, job, pairs = self.config, self.job, self.rows * moe.experts_per_token
        width = round_up(moe.intermediate_size, GROUP)
        layers = range(config.num_layers)
        job[fields.EXPERTS], job[fields.EXPERTS_PER_TOKEN] = moe.num_experts, moe.experts_per_token
        job[fields.EXPERT_WIDTH], job[fields.NORMALIZE_SHARES] = width, moe.normalize_weights
        job[fields.HAS_EXPERTS_AT] = self._keep(
            np.array([layer in moe.layers for layer in layers], dtype=np.int64)
        )
        routers = np.zeros((config.num_layers, moe.num_experts, self.hidden), dtype=np.float32)
        for layer in moe.layers:
            routers[layer, :, : config.hidden_size] = self._tensors[
                _LAYER.format(layer) + "mlp.gate.weight"
            ].float32()
        job[fields.ROUTERS_AT] = self._keep(routers)
        job[fields.EXPERT_MATRICES_AT] = self._descriptors(
            [name if layer in moe.layers else None for layer in layers for name in _expert_names(moe, layer)]
        )
        job[fields.CHOICES_AT] = self._buffer(pairs, 2, dtype=np.int64)
        job[fields.SHARES_AT] = self._buffer(pairs)
        job[fields.SPANS_AT] = self._buffer(moe.num_experts, 2, dtype=np.int64)
        groups = self.hidden // GROUP
        job[fields.EXPERT_RECORDS_AT] = self._buffer(pairs, groups, self._record, dtype=np.uint8)
        job[fields.EXPERT_WIDE_RECORDS_AT] = self._buffer(pairs, width // GROUP, self._record, dtype=np.uint8)
        job[fields.PAIR_OUTPUTS_AT] = self._buffer(pairs, self.hidden)


def _matrix_names(config: ModelConfig) -> list[str | None]:
    """Tensor names in the order of the descriptor table of job.py; None where a layer has experts instead."""
    sparse = config.moe.layers if config.moe else frozenset()
    names: list[str | None] = []
    for layer in range(config.num_layers):
        names += [_LAYER.format(layer) + f"{part}.weight" for part in _ATTENTION]
        names += [None if layer in sparse else _LAYER.format(layer) + f"mlp.{part}.weight" for part in _MLP]
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
    names = [name for name in _matrix_names(checkpoint.config) if name]
    names += [name for layer in sorted(moe.layers) for name in _expert_names(moe, layer)] if moe else []
    tensors = {name: checkpoint.tensors[name] for name in names if name not in known}
    return {**known, **pack_matrices(tensors, quantization, threads)}
