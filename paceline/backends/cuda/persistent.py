"""A persistent megakernel: all layers of a pass over few rows in one kernel.

With few rows, the separate kernels of a layer do not keep memory busy: each waits for the one before it,
starts loading, and ends with its slowest program. In one kernel for all layers, the weights of the next
phases are loaded while programs wait for each other at grid barriers.

It is CUDA C++ (source/persistent_*.cu), compiled by torch when first needed: Triton has no shared-memory
pipeline that outlives a loop, and no grid barrier. It has the bits of the Triton kernels: the same numbers,
summed in the same order. Where it is not available, those kernels run the layers.

Programs wait for each other, so all of them must be resident at once, and only one such kernel may run at a
time. The backend uses a single stream, which guarantees that.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from paceline.backends.cuda.compiling import compiled, compiles_only, on_device
from paceline.backends.cuda.kernels.attention import BLOCK, LANES, MERGE_FAN_IN, tile_height
from paceline.backends.cuda.kernels.matrix import Matrix
from paceline.backends.cuda.kernels.pdl import HOPPER
from paceline.backends.cuda.kernels.row_tables import RowTables
from paceline.backends.cuda.kernels.rows import embed
from paceline.backends.cuda.native import compiler, float_bits, is_left_out
from paceline.backends.cuda.weights import Layer, Weights
from paceline.backends.cuda.workspace import Pool, Workspace

logger = logging.getLogger(__name__)

# concatenated in this order
SOURCES = (
    "instructions",
    "softmax",
    "persistent_memory",
    "persistent_shapes",
    "persistent_products",
    "persistent_epilogues",
    "persistent_attention",
    "persistent_layers",
)
WARPS = 8  # computing warps of a program
THREADS = WARPS * 32 + 128  # computing and loading threads
STEP = 128  # of the depth: the layout of weights
PIECE = 64  # of the depth: pipeline slots hold multiples of it
ROW_SLOTS = 10  # pieces of rows in flight or in use, per warp
MAX_ROWS = 8  # rows of an MMA instruction; separate kernels take 1.26 times as long at 8
HEAD_SIZES = (64, 128)  # others were not tried, or need too many registers
MAX_HIDDEN = 2048  # larger models keep memory busy with separate kernels
MAX_SLOTS, MIN_SLOTS = 16, 6  # slots of the weight pipeline
OTHER_BYTES, LAYER_BYTES = 2048, 80  # of shared memory: small variables, and each layer's addresses


class PersistentLayers:
    """`run_layers` for passes of few rows at fixed addresses, where the megakernel supports them."""

    def __init__(self, weights: Weights, workspace: Workspace, pool: Pool, page_size: int) -> None:
        self._known = weights, workspace, pool, page_size
        self._passes: dict[tuple[int, int], _Pass | None] = {}  # by (rows, address of their positions)

    def run(
        self,
        tokens: torch.Tensor,
        tables: RowTables,
        features: torch.Tensor | None = None,
        feature_layers: tuple[int, ...] = (),
    ) -> bool:
        """Do what `run_layers` does; False if the megakernel cannot: trees, many rows, adapters and others.

        Shared prefixes are left to separate kernels, which read them once for all rows.

        `features` and `feature_layers` must be the same in all calls.
        """
        if tables.paths is not None or tables.shared_prefix is not None or is_left_out("persistent"):
            return False
        if tables.adapters is not None:
            return False
        weights, workspace, _, _ = self._known
        key = len(tokens), tables.positions.data_ptr()
        if key in self._passes:
            own = self._passes[key]
        else:
            own = self._prepare(tables, features, feature_layers)
            if not compiles_only():
                self._passes[key] = own
        if own is None:
            return False
        norm = weights.layers[0].attention_norm
        assert norm is not None, "such layers are not plain"
        embed(tokens, weights.embedding, workspace.hidden, norm, workspace.attention_input)
        own.run()
        return True

    def _prepare(
        self, tables: RowTables, features: torch.Tensor | None, feature_layers: tuple[int, ...]
    ) -> _Pass | None:
        """The megakernel for the rows of `tables`, or None if device, model or torch do not support it."""
        weights, workspace, pool, page_size = self._known
        sizes = _sizes(weights, tables, page_size, workspace.attention.blocks)
        if sizes is None or compiler() is None:
            return None
        try:
            own = _Pass(sizes, weights, workspace, tables, pool, features, feature_layers)
            own.run()  # a trial: the pass itself overwrites its results
        except Exception as error:  # a private function of torch may raise anything
            logger.warning("layers run as separate kernels, since the one for few rows failed: %s", error)
            return None
        return own


class _Pass:
    """The compiled kernel and its argument: addresses, in the order of source/persistent_shapes.cu."""

    def __init__(
        self,
        sizes: dict[str, int],
        weights: Weights,
        workspace: Workspace,
        tables: RowTables,
        pool: Pool,
        features: torch.Tensor | None,
        feature_layers: tuple[int, ...],
    ) -> None:
        device, hidden = weights.device, sizes["ROWS"] * sizes["HIDDEN"]
        heads = sizes["ATTENTION_TILES"] * sizes["KV_HEADS"]
        lanes = heads * sizes["PARTS"] * LANES

        def zeros(count: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(count, dtype=kind, device=device)

        def feature(index: int) -> torch.Tensor | None:
            """Where the residual stream before layer `index` goes, if it is wanted."""
            if features is None or index not in feature_layers:
                return None
            return features[:, feature_layers.index(index) * sizes["HIDDEN"] :]

        used: list[torch.Tensor | int | None] = [
            workspace.hidden,
            workspace.attention_input.rows,
            workspace.attention_input.squares,
            workspace.feed_forward_input.rows,
            zeros(hidden // 4),  # sums of squares of every four columns
            zeros(hidden // 4),
            workspace.query,
            workspace.attention_output,
            workspace.activated,
            tables.positions,
            tables.slot_mapping,
            tables.tile_rows,
            tables.tile_counts,
            tables.tile_pages,
            tables.pages,
            *(weights.layers[0].rotation or (None, None)),
            zeros(lanes * sizes["DIM"]),  # partial_acc of attention
            zeros(lanes * 2),
            zeros(2 + heads, torch.int32),  # counters
            feature(len(weights.layers)),
            0 if features is None else features.stride(0),
        ]
        norms = [layer.attention_norm for layer in weights.layers[1:]] + [weights.norm]
        parts = zip(weights.layers, norms, pool.keys, pool.values, strict=True)
        for index, (layer, norm, keys, values) in enumerate(parts):
            used += [layer.qkv.weight, layer.qkv.bias, layer.output.weight, layer.feed_forward_norm]
            used += [layer.gate_up.weight, layer.down.weight, norm, keys, values, feature(index)]
        self._used = used  # tensors must live as long as the kernel holds their addresses
        addresses = [own.data_ptr() if isinstance(own, torch.Tensor) else own or 0 for own in used]
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._programs, self._shared = sizes["PROGRAMS"], _shared_bytes(sizes)
        self._kernel = _compile(tuple(sizes.items()), self._shared, device)

    def run(self) -> None:
        """Run all layers; `workspace.attention_input` is then what the head reads."""
        if self._kernel is not None:  # otherwise passes only compile
            self._kernel((self._programs, 1, 1), (THREADS, 1, 1), [self._addresses], self._shared)


def _compile(sizes: tuple[tuple[str, int], ...], shared: int, device: torch.device) -> Any:
    """The kernel for these constants: it is called with grid, block, arguments and bytes of shared memory.

    None while passes only compile.
    """
    make = compiler()
    assert make is not None, "asked before"
    folder = Path(__file__).with_name("source")
    source = "".join((folder / f"{name}.cu").read_text() for name in SOURCES)
    defined = "".join(f"#define {name} {value}\n" for name, value in sizes)

    def compile_source() -> Any:
        with on_device(device):
            kernel = make(defined + source, "persistent_layers")
            kernel.set_shared_memory_config(shared)
        return kernel

    return compiled((defined, shared, device), compile_source)


def _sizes(weights: Weights, tables: RowTables, page_size: int, blocks: int) -> dict[str, int] | None:
    """The constants that the source is compiled with; None if device, model or rows are not supported."""
    config, layer, rows, device = weights.config, weights.layers[0], len(tables.positions), weights.device
    if device.type != "cuda" or rows > MAX_ROWS or not _is_plain(weights):
        return None
    properties = torch.cuda.get_device_properties(device)
    programs, hidden = properties.multi_processor_count, config.hidden_size
    tiles = len(tables.tile_rows)
    if properties.major != HOPPER or tiles * config.num_kv_heads > programs:
        return None

    def columns(units: int, each: int) -> int:
        """Of a program, at most."""
        return -(-units // programs) * each

    heads = columns((config.num_heads + 2 * config.num_kv_heads) * config.head_dim // 16, 16)
    stream = columns(hidden // 4, 4)
    gate = -(-columns(config.intermediate_size // 4, 8) // 16) * 16
    slot = gate * PIECE * 2

    def slab(count: int, matrix: Matrix) -> int:
        """How much of the depth of each split fits a slot."""
        return slot // (count * matrix.tiling.splits * 2) // PIECE * PIECE

    slabs = slab(heads, layer.qkv), slab(stream, layer.output), slab(stream, layer.down)
    if not all(slabs) or heads > 64 or stream > 128:
        return None
    pairs = (heads, layer.qkv), (stream, layer.output), (stream, layer.down)
    jobs = max(-(-count // 16) * matrix.tiling.splits for count, matrix in pairs)
    sizes = {
        "LAYERS": config.num_layers,
        "HIDDEN": hidden,
        "INTERMEDIATE": config.intermediate_size,
        "HEADS": config.num_heads,
        "KV_HEADS": config.num_kv_heads,
        "DIM": config.head_dim,
        "HEADS_BIAS": int(layer.qkv.bias is not None),
        "HEADS_SPLITS": layer.qkv.tiling.splits,
        "OUTPUT_SPLITS": layer.output.tiling.splits,
        "DOWN_SPLITS": layer.down.tiling.splits,
        "HEADS_SLAB": slabs[0],
        "OUTPUT_SLAB": slabs[1],
        "DOWN_SLAB": slabs[2],
        "GATE_SLAB": PIECE,
        "SLOT": slot,
        "ROWS": rows,
        "JOBS": max(-(-jobs // WARPS), -(-gate // 16 // WARPS)),
        "SPLIT_JOBS": jobs,
        "STREAMERS": min(WARPS, jobs),
        "PROGRAMS": programs,
        "EPS_BITS": float_bits(config.rms_norm_eps),
        "ATTENTION_TILES": tiles,
        "HEIGHT": tile_height(config.num_heads, config.num_kv_heads),
        "PARTS": max(programs // (tiles * config.num_kv_heads), -(-blocks // MERGE_FAN_IN)),
        "PAGE": page_size,
        "SCALE_BITS": float_bits(layer.scoring.scale(config.head_dim)),
    }
    shared = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    room = shared - _room(sizes)
    sizes["SLOTS"] = min(MAX_SLOTS, room // slot)
    return sizes if sizes["SLOTS"] >= MIN_SLOTS else None


def _is_plain(weights: Weights) -> bool:
    """Whether the kernel supports all layers of the model."""
    config = weights.config

    def plain(layer: Layer) -> bool:
        matrices = (layer.qkv, layer.output, layer.gate_up, layer.down)
        return (
            all(own.tiling.packing == "none" and own.tiling.step == STEP for own in matrices)
            and layer.head_norms is None
            and layer.is_plain
            and layer.rotation is weights.layers[0].rotation is not None
            and layer.output.bias is None
            and layer.gate_up.tiling.splits == 1
            and layer.qkv.tiling.columns == config.head_dim in HEAD_SIZES
        )

    windows = any(config.window(index) is not None for index in range(config.num_layers))
    whole = weights.shard.size == 1  # ranks gather between its phases
    whole = whole and config.hidden_size % 128 == 0 and config.hidden_size <= MAX_HIDDEN
    whole = whole and config.intermediate_size % 64 == 0 and config.num_heads * config.head_dim % 128 == 0
    dtype = weights.dtype == torch.bfloat16
    return (
        whole
        and dtype
        and not windows
        and config.moe is None
        and weights.residual is None
        and all(map(plain, weights.layers))
    )


def _room(sizes: dict[str, int]) -> int:
    """Bytes of shared memory beside the weight pipeline. Products and attention use them by turns."""
    whole = max(sizes["HIDDEN"], sizes["HEADS"] * sizes["DIM"])
    streamed = sizes["STREAMERS"] * ROW_SLOTS * PIECE
    products = sizes["ROWS"] * max(whole, streamed) * 2 + sizes["SPLIT_JOBS"] * 512
    attention = (2 * BLOCK + LANES) * sizes["DIM"] * 2 + LANES * (BLOCK + 8) * 4
    return max(products, attention) + OTHER_BYTES + sizes["LAYERS"] * LAYER_BYTES


def _shared_bytes(sizes: dict[str, int]) -> int:
    return sizes["SLOTS"] * sizes["SLOT"] + _room(sizes)
