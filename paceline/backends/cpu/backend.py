"""The compiled CPU backend: int8 activations, 4-bit or 8-bit weights, one call per pass.

A token's logits are the same bits whether it runs alone, in a prefill chunk of any size, as a row
of a draft, or beside other requests; tiles.py, rows.py and attention.py say why, each for its part.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.backends.base import Float32Array, ForwardBatch, ForwardOutput, Int32Array, KVPool
from paceline.backends.cpu import forward_pass as fields
from paceline.backends.cpu.attention import copy_key_value
from paceline.backends.cpu.attention_tiles import MOST_HEADS, PAGE, run_mix, run_score
from paceline.backends.cpu.compiled import compiled
from paceline.backends.cpu.isa import ISA
from paceline.backends.cpu.matmul import run_tile
from paceline.backends.cpu.packing import PackedMatrix, pack
from paceline.backends.cpu.team import Team, default_threads
from paceline.backends.cpu.tiles import COLUMNS, GROUP
from paceline.errors import BackendError, ConfigError
from paceline.models.checkpoint import Checkpoint
from paceline.models.config import ModelConfig
from paceline.models.rope import rope_frequencies

QUANTIZATIONS = ("auto", "native", "int8", "none")
_SCRATCH_ROWS = 64  # rows a thread multiplies before it consumes the result; see forward_pass.py


@dataclass(frozen=True)
class CpuPool:
    """Keys and values in one array; attention.py describes a block."""

    num_pages: int
    bytes_per_page: int
    data: npt.NDArray[np.uint8]  # [layers, pages, KV heads, bytes of a block]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _address(array: npt.NDArray[np.generic]) -> int:
    return int(array.__array_interface__["data"][0])


class CpuBackend:
    """A model run by compiled code on `threads` cores."""

    name = "cpu"
    page_size = PAGE
    batch_invariant = True
    supports_features = True

    def __init__(self, checkpoint: Checkpoint, quantization: str, threads: int, max_rows: int) -> None:
        self.config = checkpoint.config
        self.quantization = quantization
        self.max_rows = max_rows
        self.threads = threads
        self._half_kv = quantization != "none" and ISA.native_half
        self._arrays: list[npt.NDArray[np.generic]] = []  # what the job's addresses point into
        self._job = np.zeros(fields.JOB_SIZE, dtype=np.int64)
        self._matrices = _pack_matrices(checkpoint, quantization, threads)
        self._describe_model(checkpoint)
        self._make_buffers()
        self._logits = np.empty((0, 0), dtype=np.float32)
        self._team = Team(threads, fields.run_passes, _address(self._job))

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        *,
        quantization: str = "auto",
        threads: int | None = None,
        max_rows: int = 512,
    ) -> CpuBackend:
        """A backend with the checkpoint's weights.

        `quantization`: "native" keeps a GGUF file's own 4-bit blocks and makes the rest int8,
        "int8" makes everything int8, "none" is float32; "auto" takes what is fastest on this CPU.
        """
        if quantization not in QUANTIZATIONS:
            raise ConfigError(
                f"quantization is {quantization!r}, but the cpu backend knows {', '.join(QUANTIZATIONS)}."
            )
        if threads is not None and threads < 1:
            raise ConfigError(
                f"threads is {threads}, but a pass needs at least 1; leave it out to use every core."
            )
        if checkpoint.config.moe is not None:
            raise BackendError(
                "The cpu backend does not run mixtures of experts yet; use the torch backend: backend='torch'."
            )
        if checkpoint.config.head_dim % 2:
            raise BackendError(f"The cpu backend needs an even head size, not {checkpoint.config.head_dim}.")
        if quantization == "auto":
            quantization = "native" if ISA.prefers_4bit else "int8"
        return cls(checkpoint, quantization, threads or default_threads(), max_rows)

    # What the compiled pass reads ------------------------------------------------------------------

    def _keep(self, array: npt.NDArray[np.generic]) -> int:
        """The address of an array that lives as long as the backend."""
        self._arrays.append(array)
        return _address(array)

    def _describe_model(self, checkpoint: Checkpoint) -> None:
        config, job, tensors = self.config, self._job, checkpoint.tensors
        hidden = _round_up(config.hidden_size, GROUP)

        def vectors(names: list[str], width: int) -> npt.NDArray[np.float32]:
            stacked = np.zeros((len(names), width), dtype=np.float32)
            for row, name in enumerate(names):
                values = tensors[name].float32()
                stacked[row, : len(values)] = values
            return stacked

        layer = "model.layers.{}."
        layers = range(config.num_layers)
        norms = [
            layer.format(i) + name
            for i in layers
            for name in ("input_layernorm.weight", "post_attention_layernorm.weight")
        ]
        frequencies = rope_frequencies(config.rope, config.head_dim)
        angles = np.arange(config.max_position, dtype=np.float32)[:, None] * frequencies
        job[fields.LAYERS] = config.num_layers
        job[fields.HIDDEN], job[fields.HIDDEN_PADDED] = config.hidden_size, hidden
        job[fields.HEADS], job[fields.KV_HEADS] = config.num_heads, config.num_kv_heads
        job[fields.HEAD_WIDTH] = config.head_dim
        job[fields.INTERMEDIATE] = _round_up(config.intermediate_size, GROUP)
        job[fields.QUANTIZED], job[fields.HALF_KV] = self.quantization != "none", self._half_kv
        job[fields.EPSILON_AT] = self._keep(np.array([config.rms_norm_eps], dtype=np.float32))
        job[fields.NORMS_AT] = self._keep(vectors([*norms, "model.norm.weight"], hidden))
        job[fields.COSINES_AT] = self._keep(np.cos(angles))
        job[fields.SINES_AT] = self._keep(np.sin(angles))
        job[fields.WINDOWS_AT] = self._keep(np.array([config.window(i) or 0 for i in layers], dtype=np.int64))
        job[fields.MATRICES_AT] = self._keep(
            np.array([m.descriptor() for m in self._matrices], dtype=np.int64)
        )
        if config.qk_norm:
            heads = [layer.format(i) + f"self_attn.{part}_norm.weight" for i in layers for part in "qk"]
            job[fields.HEAD_NORMS_AT] = self._keep(vectors(heads, config.head_dim))
        if config.qkv_bias:
            parts = [
                vectors([layer.format(i) + f"self_attn.{part}_proj.bias" for i in layers], width)
                for part, width in zip("qkv", self._qkv_widths(), strict=True)
            ]
            job[fields.QKV_BIAS_AT] = self._keep(np.concatenate(parts, axis=1))
        if config.output_bias:
            biases = [layer.format(i) + "self_attn.o_proj.bias" for i in layers]
            job[fields.OUTPUT_BIAS_AT] = self._keep(vectors(biases, hidden))

    def _qkv_widths(self) -> tuple[int, int, int]:
        """Columns of queries, keys and values in the pass's buffer, each padded to whole tiles."""
        keys = _round_up(self.config.num_kv_heads * self.config.head_dim, COLUMNS)
        return _round_up(self.config.num_heads * self.config.head_dim, COLUMNS), keys, keys

    def _make_buffers(self) -> None:
        config, job, rows = self.config, self._job, self.max_rows
        hidden = int(job[fields.HIDDEN_PADDED])
        attention = _round_up(config.num_heads * config.head_dim, GROUP)
        record = 48 if job[fields.QUANTIZED] else 4 * GROUP
        qkv = sum(self._qkv_widths())
        max_pages = _round_up(config.max_position, PAGE) // PAGE

        def buffer(*shape: int, dtype: npt.DTypeLike = np.float32) -> int:
            return self._keep(np.zeros(shape, dtype=dtype))

        job[fields.STATE_AT] = buffer(rows, hidden)
        job[fields.QKV_AT], job[fields.QKV_STRIDE] = buffer(rows, qkv), 4 * qkv
        job[fields.ATTENTION_AT], job[fields.ATTENTION_PADDED] = buffer(rows, attention), attention
        narrow = max(hidden, attention) // GROUP
        job[fields.RECORDS_AT] = buffer(narrow, rows, record, dtype=np.uint8)
        job[fields.WIDE_RECORDS_AT] = buffer(
            int(job[fields.INTERMEDIATE]) // GROUP, rows, record, dtype=np.uint8
        )
        block = self._block_bytes()
        attention_scratch = (8 + 4 * PAGE * MOST_HEADS) * max_pages + 64 + 4 * MOST_HEADS * (config.head_dim + 15)
        attention_scratch += (rows // PAGE + 2) * block
        scratch = max(attention_scratch, 2 * _SCRATCH_ROWS * 4 * GROUP, 4 * hidden)
        job[fields.SCRATCH_BYTES] = _round_up(scratch, 64)
        job[fields.SCRATCH_AT] = buffer(self.threads, _round_up(scratch, 64), dtype=np.uint8)
        counters = 4 + fields.COUNTERS_PER_LAYER * config.num_layers
        self._counters = np.zeros((counters, self.threads, 8), dtype=np.int64)
        job[fields.COUNTERS_AT] = _address(self._counters)
        job[fields.RUN_TILE] = run_tile.address
        job[fields.RUN_SCORE], job[fields.RUN_MIX] = run_score.address, run_mix.address
        self._feature_slots = np.full(config.num_layers + 1, -1, dtype=np.int64)
        job[fields.FEATURE_SLOT_AT] = _address(self._feature_slots)
        self._row_requests = np.zeros(rows, dtype=np.int32)
        job[fields.REQUEST_AT] = _address(self._row_requests)

    # The contract ----------------------------------------------------------------------------------

    def _block_bytes(self) -> int:
        width = self.config.head_dim
        return (2 if self._half_kv else 4) * PAGE * (width + _round_up(width, COLUMNS))

    def bytes_per_page(self) -> int:
        """Bytes of keys and values of 16 tokens in all layers."""
        return self.config.num_layers * self.config.num_kv_heads * self._block_bytes()

    def make_pool(self, num_pages: int) -> CpuPool:
        """Storage for `num_pages` pages of keys and values."""
        shape = (self.config.num_layers, num_pages, self.config.num_kv_heads, self._block_bytes())
        try:
            return CpuPool(num_pages, self.bytes_per_page(), np.zeros(shape, dtype=np.uint8))
        except MemoryError as error:
            raise BackendError(
                f"No memory for a KV pool of {num_pages} pages ({num_pages * self.bytes_per_page() / 1e9:.1f} GB); "
                "lower kv_cache_memory_bytes or max_model_len."
            ) from error

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Logits of the wanted rows and, if asked, features of all rows."""
        rows, outputs, job = batch.num_rows, len(batch.logit_rows), self._job
        assert 0 < rows <= self.max_rows, f"{rows} rows, but max_rows is {self.max_rows}"
        assert isinstance(batch.pool, CpuPool)
        if outputs > len(self._logits):
            self._logits = np.empty((outputs, _round_up(self.config.vocab_size, COLUMNS)), dtype=np.float32)
        counts = np.diff(batch.row_offsets)
        self._row_requests[:rows] = np.repeat(np.arange(batch.num_requests, dtype=np.int32), counts)
        chain = _chains(batch)
        arrays = (
            (fields.TOKENS_AT, batch.tokens),
            (fields.POSITIONS_AT, batch.positions),
            (fields.PARENTS_AT, batch.parents),
            (fields.ROW_START_AT, batch.row_offsets),
            (fields.CONTEXT_AT, batch.context_lengths),
            (fields.PAGES_AT, batch.page_tables),
            (fields.CHAIN_AT, chain),
            (fields.LOGIT_ROWS_AT, batch.logit_rows),
        )
        held = [np.ascontiguousarray(array, dtype=np.int32) for _, array in arrays]
        for (index, _), array in zip(arrays, held, strict=True):
            job[index] = _address(array)
        job[fields.ROWS], job[fields.OUTPUTS] = rows, outputs
        job[fields.MAX_PAGES] = batch.page_tables.shape[1]
        job[fields.LOGITS_AT], job[fields.LOGITS_STRIDE] = _address(self._logits), self._logits.strides[0]
        job[fields.KV_AT], job[fields.NUM_PAGES] = _address(batch.pool.data), batch.pool.num_pages
        features = self._prepare_features(batch)
        self._counters.fill(0)
        self._team.start()
        fields.run_passes(self._team.control, 0, self.threads, _address(job), 0)
        return ForwardOutput(self._logits[:outputs, : self.config.vocab_size], features)

    def _prepare_features(self, batch: ForwardBatch) -> Float32Array | None:
        self._feature_slots.fill(-1)
        if not batch.feature_layers:
            return None
        self._feature_slots[list(batch.feature_layers)] = np.arange(len(batch.feature_layers))
        width = self.config.hidden_size * len(batch.feature_layers)
        features = np.empty((batch.num_rows, width), dtype=np.float32)
        self._job[fields.FEATURES_AT], self._job[fields.FEATURES_STRIDE] = (
            _address(features),
            features.strides[0],
        )
        return features

    def move(self, pool: KVPool, source: Int32Array, destination: Int32Array) -> None:
        """Copy keys and values from KV places to others; sources are read before destinations are written."""
        assert isinstance(pool, CpuPool)
        width, half = self.config.head_dim, int(self._half_kv)
        blocks = pool.data.shape[0], pool.data.shape[2], pool.data.shape[3]
        spare = np.empty((len(source), blocks[2]), dtype=np.uint8)
        sources, targets = source.astype(np.int64), destination.astype(np.int64)
        _move(_address(pool.data), pool.num_pages, *blocks, sources, targets, _address(spare), width, half)

    def close(self) -> None:
        """End the worker threads."""
        self._team.close()


def _chains(batch: ForwardBatch) -> Int32Array:
    """For each request, whether its rows are a chain: each row's parent is the row before it."""
    if np.array_equal(
        batch.parents,
        np.arange(batch.num_rows) - batch.row_offsets[:-1].repeat(np.diff(batch.row_offsets)) - 1,
    ):
        return np.ones(batch.num_requests, dtype=np.int32)
    chain = np.empty(batch.num_requests, dtype=np.int32)
    for request in range(batch.num_requests):
        first, last = batch.row_offsets[request], batch.row_offsets[request + 1]
        chain[request] = np.array_equal(batch.parents[first:last], np.arange(-1, last - first - 1))
    return chain


@compiled(cached=True)
def _move(data, pages, layers, heads, block, sources, targets, spare, width, half):  # type: ignore[no-untyped-def]
    for layer in range(layers):
        for head in range(heads):
            for i in range(len(sources)):
                address = data + ((layer * pages + sources[i] // PAGE) * heads + head) * block
                copy_key_value(address, sources[i] % PAGE, spare + i * block, 0, width, half)
            for i in range(len(sources)):
                address = data + ((layer * pages + targets[i] // PAGE) * heads + head) * block
                copy_key_value(spare + i * block, 0, address, targets[i] % PAGE, width, half)


def _matrix_names(config: ModelConfig) -> list[str]:
    """Tensor names in the order of the descriptor table of forward_pass.py."""
    parts = [f"self_attn.{part}_proj" for part in "qkvo"] + [
        f"mlp.{part}_proj" for part in ("gate", "up", "down")
    ]
    names = [f"model.layers.{layer}.{part}.weight" for layer in range(config.num_layers) for part in parts]
    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    return [*names, "model.embed_tokens.weight", head]


def _pack_matrices(checkpoint: Checkpoint, quantization: str, threads: int) -> list[PackedMatrix]:
    """All matrices, packed by several threads; tied ones are packed once."""
    names = _matrix_names(checkpoint.config)
    distinct = list(dict.fromkeys(names))
    with ThreadPoolExecutor(threads) as pool:
        packed = dict(
            zip(
                distinct, pool.map(lambda n: pack(checkpoint.tensors[n], quantization), distinct), strict=True
            )
        )
    return [packed[name] for name in names]
