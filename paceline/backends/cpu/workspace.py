"""Workspace: a model's job with its weights and the buffers of passes."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu import job as fields
from paceline.backends.cpu.attention.paged_attention import PAGE, RESULT_ROWS, STATE_BYTES, TASK_HEADS
from paceline.backends.cpu.attention.tiles import run_products
from paceline.backends.cpu.phases.projections import GATED_BYTES, UNPACKED_SPACE
from paceline.backends.cpu.phases.recurrent_memory import BLOCK
from paceline.backends.cpu.phases.sampling import run_gumbel_argmax
from paceline.backends.cpu.primitives.rows import ROW_BLOCK, record_stride
from paceline.backends.cpu.primitives.simd import LANES
from paceline.backends.cpu.tiles.matmul import run_tile, unit_bytes
from paceline.backends.cpu.tiles.weight_tile import GROUP, RECORD
from paceline.backends.cpu.weights.matrix_names import matrix_names
from paceline.backends.cpu.weights.model_weights import ModelWeights, round_up
from paceline.backends.cpu.weights.packing import PackedMatrix, address_of
from paceline.models.checkpoint import Checkpoint
from paceline.models.config import LatentConfig, MoeConfig, PerLayerInput, RecurrentConfig
from paceline.models.families.hybrid_fields import MAX_KERNEL


class Workspace(ModelWeights):
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
        """`packed`: matrices that another model has packed already, by their names in this one.

        `entry_width`: floats of a row in the widest input stage of a draft head (entry.py).
        """
        super().__init__(checkpoint, quantization, threads, packed or {})
        self.threads, self.rows = threads, rows
        self.quantized = quantization != "none"
        self.half_kv = self.quantized
        self.max_pages = round_up(self.config.max_position, PAGE) // PAGE  # of one request
        self._record = RECORD if self.quantized else 4 * GROUP
        self._entry_width = entry_width
        counters = fields.ENTRY_COUNTERS + fields.LAST_COUNTERS
        counters += fields.COUNTERS_PER_LAYER * self.config.num_layers
        self.counters = np.zeros((counters, threads, 8), dtype=np.int64)
        self.feature_slots = np.full(self.config.num_layers + 1, -1, dtype=np.int64)
        self.row_requests = np.zeros(rows, dtype=np.int32)  # the request of each row
        self.chains = np.zeros(rows, dtype=np.int32)  # for each request, whether its rows are a chain
        self._set_sizes()
        self._set_buffers()
        if self.config.moe is not None:
            self._set_expert_buffers(self.config.moe)
        if self.config.recurrent is not None:
            self._set_recurrent_buffers(self.config.recurrent)

    def first_layers(self, count: int) -> Workspace:
        """The first `count` layers. Weights and buffers are shared, so passes of the two must not overlap."""
        early = copy(self)
        early.config = replace(self.config, num_layers=count)
        early.job, early._kept = self.job.copy(), [*self._kept]
        early.job[fields.LAYERS] = count
        # in these tables, entries of the LM head follow those of the last layer
        early.job[fields.MATRICES_AT] = early._descriptors(matrix_names(early.config))
        norms = np.array([*self._norms[: 2 * count], self._norms[-1]], dtype=np.int64)
        early.job[fields.NORMS_AT] = early._keep(norms)
        early.feature_slots = np.full(count + 1, -1, dtype=np.int64)
        early.job[fields.FEATURE_SLOT_AT] = address_of(early.feature_slots)
        return early

    @property
    def head_width(self) -> int:
        """Numbers of a query and of a key in the widest layer; a latent is padded to whole groups."""
        latent = self.config.latent
        return latent.rope_dim + round_up(latent.rank, GROUP) if latent else self.widest_head

    def _block_bytes(self, width: int) -> int:
        """Bytes of the keys and values of one page and KV head; latents are both."""
        values = 0 if self.config.latent else round_up(width, LANES)
        return (2 if self.half_kv else 4) * PAGE * (width + values)

    def kv_shapes(self) -> list[tuple[int, int, int]]:
        """For each layer of the KV pool: KV heads, numbers of a key, bytes of a page and KV head."""
        shapes = list[tuple[int, int, int]]()
        for heads in map(self.config.shape_of, self.config.kv_layers):
            width = self.head_width if self.config.latent else heads.head_dim
            shapes.append((heads.num_kv_heads, width, self._block_bytes(width)))
        return shapes

    def _shapes(self) -> npt.NDArray[np.int64]:
        """A line for each layer, see SHAPE of job.py; zeros where a layer does not attend."""
        config, known = self.config, self.kv_shapes()
        lines = np.zeros((config.num_layers, fields.SHAPE), dtype=np.int64)
        for layer in config.attending_layers:
            shape = config.shape_of(layer)
            source = fields.VALUES_ARE_KEYS if shape.values_are_keys else fields.OWN
            source = source if shape.shared_with is None else fields.SHARED
            index = config.kv_layer(layer)
            lines[layer] = index, *known[index], source
        return lines

    def _set_sizes(self) -> None:
        config, job = self.config, self.job
        job[fields.LAYERS] = config.num_layers
        job[fields.HIDDEN], job[fields.HIDDEN_PADDED] = config.hidden_size, self.hidden
        job[fields.HEADS], job[fields.SHAPES_AT] = config.num_heads, self._keep(self._shapes())
        job[fields.QUANTIZED], job[fields.HALF_KV] = self.quantized, self.half_kv
        job[fields.RUN_TILE] = run_tile.address
        job[fields.RUN_PRODUCTS] = run_products.address
        job[fields.RUN_GUMBEL_ARGMAX], job[fields.VOCABULARY] = run_gumbel_argmax.address, config.vocab_size

    def _set_buffers(self) -> None:
        config, job, rows = self.config, self.job, self.rows
        mixed, qkv = int(job[fields.LATENT_PADDED]) or self.widest_head, self.inputs_width
        attention = round_up(config.num_heads * mixed, GROUP)
        job[fields.STATE_AT] = self._buffer(rows, self.hidden)
        if job[fields.OUTPUT_NORMS_AT]:
            job[fields.BRANCH_AT] = self._buffer(rows, self.hidden)
        job[fields.QKV_AT], job[fields.QKV_STRIDE] = self._buffer(rows, qkv), 4 * qkv
        job[fields.QUERIES_AT], job[fields.QUERIES_STRIDE] = job[fields.QKV_AT], job[fields.QKV_STRIDE]
        if config.latent is not None:
            self._set_latent_buffers(config.latent)
        job[fields.ATTENTION_AT], job[fields.ATTENTION_PADDED] = self._buffer(rows, attention), attention
        if config.per_layer_input is not None:
            self._set_input_buffers(config.per_layer_input)
        most = max(
            self.hidden,
            attention,
            self._entry_width,
            int(job[fields.INPUT_SIZE]) + GROUP,
            self._mixed_width,
            self._latent_width,
        )
        job[fields.RECORDS_AT] = self._records(most // GROUP)
        shared = config.moe.shared_intermediate_size if config.moe else 0
        widest = max([config.intermediate_size, *config.intermediate_sizes, shared])
        job[fields.WIDE_RECORDS_AT] = self._records(round_up(widest, GROUP) // GROUP)
        scratch = round_up(self._scratch_bytes(), 64)
        job[fields.SCRATCH_BYTES] = scratch
        job[fields.SCRATCH_AT] = self._buffer(self.threads, scratch, dtype=np.uint8)
        job[fields.COUNTERS_AT] = address_of(self.counters)
        job[fields.FEATURE_SLOT_AT] = address_of(self.feature_slots)
        job[fields.REQUEST_AT], job[fields.CHAIN_AT] = address_of(self.row_requests), address_of(self.chains)

    @property
    def _latent_width(self) -> int:
        """The most floats of a row that latent attention writes as records, except its output."""
        own, heads = self.config.latent, self.config.num_heads
        widths = (
            (heads * round_up(own.nope_dim, GROUP), own.query_rank, heads * own.value_dim) if own else (0,)
        )
        return round_up(max(widths), GROUP)

    def _set_latent_buffers(self, latent: LatentConfig) -> None:
        job, heads = self.job, self.config.num_heads
        queries = round_up(heads * self.head_width, LANES)
        job[fields.QUERIES_AT], job[fields.QUERIES_STRIDE] = self._buffer(self.rows, queries), 4 * queries
        widest = max(latent.rope_dim + latent.nope_dim, round_up(latent.value_dim, GROUP))
        widest = round_up(heads * widest, GROUP)
        job[fields.HEAD_ROWS_AT], job[fields.HEAD_ROWS_STRIDE] = self._buffer(self.rows, widest), 4 * widest

    def _set_input_buffers(self, inputs: PerLayerInput) -> None:
        job, width = self.job, round_up(self.config.num_layers * inputs.size, GROUP)
        job[fields.LAYER_INPUTS_AT] = self._buffer(self.rows, width)
        job[fields.LAYER_INPUTS_STRIDE] = 4 * width
        job[fields.INPUT_GATES_AT] = self._buffer(self.rows, round_up(inputs.size, GROUP))

    def _scratch_bytes(self) -> int:
        """The most bytes of scratch memory that a thread needs in any phase."""
        config, width = self.config, self.head_width
        attention = (8 + 4 * PAGE * TASK_HEADS) * self.max_pages + 4 * TASK_HEADS * width
        attention += 64 + STATE_BYTES + 4 * RESULT_ROWS * (width + 15)
        attention += (self.rows // PAGE + 2) * self._block_bytes(width)
        routing = 4 * (self.hidden + LANES)
        routing += 4 * (2 * config.moe.num_experts + config.moe.groups) if config.moe else 0
        deepest = max(self._entry_width // GROUP, *(matrix.groups for matrix in self._matrices.values()))
        widest = max(self.hidden, int(self.job[fields.EXPERT_HIDDEN]))
        gated = 2 * unit_bytes.py_func(widest // GROUP)
        unpacked: int = max(UNPACKED_SPACE, unit_bytes.py_func(deepest), gated)
        memory = 4 * BLOCK * (config.recurrent.key_dim + MAX_KERNEL) if config.recurrent else 0
        latents = 4 * max(self._latent_width, width)
        table = self._matrices.get("model.embed_tokens_per_layer.weight")
        latents = max(latents, 4 * GROUP * table.groups if table else 0)
        return max(attention, GATED_BYTES + unpacked, routing, 4 * self._entry_width, memory, latents)

    @property
    def _mixed_width(self) -> int:
        """Floats of a row that recurrent layers' output projections read."""
        own = self.config.recurrent
        return round_up(own.value_heads * own.value_dim or self.config.hidden_size, GROUP) if own else 0

    def _set_recurrent_buffers(self, recurrent: RecurrentConfig) -> None:
        job, rows, layers = self.job, self.rows, len(self.config.recurrent_layers)
        channels, heads = int(job[fields.CHANNELS]), round_up(recurrent.value_heads, LANES)
        kept, blocks = channels + 2 * heads, round_up(recurrent.value_dim, BLOCK) // BLOCK
        job[fields.KEPT_ROWS_AT] = self._buffer(layers, rows, kept)
        job[fields.KEPT_STRIDE], job[fields.KEPT_LAYER] = 4 * kept, 4 * kept * rows
        job[fields.MIXED_AT] = self._buffer(rows, self._mixed_width)
        job[fields.MIXED_PADDED] = self._mixed_width
        job[fields.CONVOLVED_AT] = self._buffer(rows * channels + LANES)  # the last vector is whole
        job[fields.READS_AT] = self._buffer(rows, recurrent.value_heads, blocks * BLOCK)

    def _set_expert_buffers(self, moe: MoeConfig) -> None:
        job, pairs, width = (
            self.job,
            self.rows * moe.experts_per_token,
            round_up(moe.intermediate_size, GROUP),
        )
        job[fields.CHOICES_AT] = self._buffer(pairs, 2, dtype=np.int64)
        job[fields.SHARES_AT] = self._buffer(pairs)
        if moe.shared_gate:
            job[fields.SHARED_SHARES_AT] = self._buffer(self.rows)
        job[fields.SPANS_AT] = self._buffer(moe.num_experts, 2, dtype=np.int64)
        hidden = int(job[fields.EXPERT_HIDDEN])
        groups = hidden // GROUP
        if moe.latent_size:
            job[fields.EXPERT_LATENTS_AT] = self._buffer(self.rows, hidden)
            job[fields.EXPERT_LATENT_RECORDS_AT] = self._records(groups)
        job[fields.EXPERT_RECORDS_AT] = self._buffer(pairs, groups, self._record, dtype=np.uint8)
        job[fields.EXPERT_WIDE_RECORDS_AT] = self._buffer(pairs, width // GROUP, self._record, dtype=np.uint8)
        job[fields.PAIR_OUTPUTS_AT] = self._buffer(pairs, hidden)

    def _records(self, groups: int) -> int:
        """The address of a buffer of records of all rows, of this number of groups each."""
        padded_rows = -(-self.rows // ROW_BLOCK) * record_stride.py_func(self.rows)
        return self._buffer(groups, padded_rows, self._record, dtype=np.uint8)
