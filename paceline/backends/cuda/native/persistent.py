"""A persistent megakernel: all layers of a pass with few rows in one kernel.

With few rows, separate kernels do not saturate memory bandwidth: each waits for its predecessor, fills its
pipeline, and ends with its slowest program. In one kernel for all layers, the weights of the next phases are
loaded while programs wait for each other at grid barriers.

It is CUDA C++ (source/persistent_*.cu), because Triton has no shared-memory pipeline that outlives a loop and
no grid barrier. It has the bits of the Triton kernels, its fallback: the same sums in the same order.

Programs wait for each other, so all of them must be resident at once, and only one such kernel may run at a
time. The backend uses a single stream, which guarantees that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.backends.cuda.kernels.attention.paged_attention import (
    BLOCK,
    LANES,
    MAX_PATH,
    MERGE_FAN_IN,
    tile_height,
)
from paceline.backends.cuda.kernels.attention.row_tables import RowTables
from paceline.backends.cuda.kernels.experts.routing import Mixture
from paceline.backends.cuda.kernels.pdl import HOPPER
from paceline.backends.cuda.kernels.rows import embed
from paceline.backends.cuda.native.nvrtc import compiler, float_bits, is_left_out
from paceline.backends.cuda.passes.compiling import compiled, compiles_only, on_device
from paceline.backends.cuda.passes.kv_pool import Pool
from paceline.backends.cuda.passes.workspace import Workspace
from paceline.backends.cuda.weights.model_weights import Layer, Weights
from paceline.backends.cuda.weights.shard import TILE
from paceline.backends.fallbacks import record_fallback

# concatenated in this order
SOURCES = (
    "instructions",
    "softmax",
    "persistent_constants",
    "persistent_instructions",
    "persistent_shapes",
    "persistent_products",
    "persistent_epilogues",
    "persistent_attention",
    "persistent_experts",
    "persistent_layers",
)
WARPS = 8  # computing warps of a program
THREADS = WARPS * 32 + 128  # computing and loading threads
STEP = 128  # of the depth: the layout of weights
PIECE = 64  # of the depth: pipeline slots hold multiples of it
ROW_SLOTS = 10  # pieces of rows in flight or in use, per warp
MAX_ROWS = 8  # rows of an MMA instruction; with 8, separate kernels take 1.26 times as long
HEAD_SIZES = (64, 128)  # other sizes were not tried, or need too many registers
MAX_HIDDEN = 2048  # in larger models separate kernels saturate memory bandwidth
MAX_SLOTS, MIN_SLOTS = 16, 6  # slots of the weight pipeline
MAX_CHOSEN = 8  # most experts of a row: one computing warp each
MAX_OFFSET = 1 << 32  # most numbers of a matrix
OTHER_BYTES, LAYER_BYTES = 2048, 104  # of shared memory: small variables, and each layer's addresses


class PersistentLayers:
    """`run_layers` by the megakernel, for passes of few rows at fixed addresses."""

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
        """Run all layers like `run_layers`; False if the megakernel does not support this pass.

        Not supported: many rows, LoRA adapters, shared prefixes (separate kernels read them once for all
        rows) and parts of draft trees. `features` and `feature_layers` must be the same in all calls.
        """
        has_nodes = tables.paths is None or (tables.uniform is not None and tables.uniform.settled)
        if not has_nodes or tables.shared_prefix is not None or is_left_out("persistent"):
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
            record_fallback("persistent", "separate kernels run", error)
            return None
        return own


class _Pass:
    """The compiled kernel and its argument, the addresses in the order of source/persistent_shapes.cu."""

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
        qk_rows = sizes["ROWS"] * (sizes["HEADS"] + sizes["KV_HEADS"])
        lanes = heads * sizes["PARTS"] * LANES

        def zeros(count: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(count, dtype=kind, device=device)

        def feature(index: int) -> torch.Tensor | None:
            """The buffer for the residual stream before layer `index`, if it is a wanted feature."""
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
            workspace.activated if workspace.routing is None else workspace.routing.activated,
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
            zeros(qk_rows * sizes["DIM"]),
            zeros(qk_rows * sizes["DIM"] // 8),
            zeros(sizes["EXPERTS"]),
            tables.contiguous_until,
            tables.paths,
        ]
        norms = [layer.attention_norm for layer in weights.layers[1:]] + [weights.norm]
        parts = zip(weights.layers, norms, pool.keys, pool.values, strict=True)
        for index, (layer, norm, keys, values) in enumerate(parts):
            used += [layer.qkv.weight, layer.qkv.bias, layer.output.weight, layer.feed_forward_norm]
            used += [layer.gate_up.weight, layer.down.weight, norm, keys, values, feature(index)]
            used += layer.head_norms or (None, None)
            used += [None if layer.mixture is None else layer.mixture.router.weight]
        self._used = used  # keeps tensors alive whose addresses the kernel holds
        addresses = [own.data_ptr() if isinstance(own, torch.Tensor) else own or 0 for own in used]
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._programs, self._shared = sizes["PROGRAMS"], _shared_bytes(sizes)
        self._kernel = _compile(tuple(sizes.items()), self._shared, device)

    def run(self) -> None:
        """Run all layers; `workspace.attention_input` is then the LM head's input."""
        if self._kernel is not None:  # otherwise passes only compile
            self._kernel((self._programs, 1, 1), (THREADS, 1, 1), [self._addresses], self._shared)


def _compile(sizes: tuple[tuple[str, int], ...], shared: int, device: torch.device) -> Any:
    """The kernel for these constants, a function of (grid, block, arguments, bytes of shared memory).

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
    if weights.device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(weights.device)
    shared = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    programs = properties.multi_processor_count if properties.major == HOPPER else 0
    return kernel_sizes(weights, tables, page_size, blocks, programs, shared)


def kernel_sizes(
    weights: Weights, tables: RowTables, page_size: int, blocks: int, programs: int, shared: int
) -> dict[str, int] | None:
    """The constants for a device with this many multiprocessors and bytes of shared memory."""
    config, layer, tiles = weights.config, weights.layers[0], len(tables.tile_rows)
    rows, kv_heads = len(tables.positions), config.num_kv_heads
    if rows > MAX_ROWS or not _is_plain(weights, rows) or tiles * kv_heads > programs:
        return None

    def columns(units: int, each: int) -> int:
        """Of a program, at most."""
        return -(-units // programs) * each

    chosen = 1 if layer.mixture is None else layer.mixture.chosen
    heads = columns((config.num_heads + 2 * kv_heads) * config.head_dim // 16, 16)
    stream = columns(config.hidden_size // 4, 4)
    gate = -(-columns(chosen * layer.down.depth // 4, 8) // 16) * 16
    splits = {
        "HEADS": layer.qkv.tiling.splits,
        "OUTPUT": layer.output.tiling.splits,
        "DOWN": layer.down.tiling.splits if layer.mixture is None else chosen,
    }
    widths = {"HEADS": heads, "OUTPUT": stream, "DOWN": stream}
    slot = (gate if layer.mixture is None else max(gate, stream * chosen)) * PIECE * 2
    # how much of the depth of each split fits a slot
    slabs = {name: slot // (widths[name] * count * 2) // PIECE * PIECE for name, count in splits.items()}
    if not all(slabs.values()) or heads > 64 or stream > 128:
        return None
    jobs = max(-(-widths[name] // 16) * count for name, count in splits.items())
    sizes = {
        **_model_sizes(weights, tables),
        **{f"{name}_SPLITS": count for name, count in splits.items()},
        **{f"{name}_SLAB": deep for name, deep in slabs.items()},
        "GATE_SLAB": PIECE,
        "SLOT": slot,
        "JOBS": max(-(-jobs // WARPS), -(-gate // 16 // WARPS)),
        "SPLIT_JOBS": jobs,
        "STREAMERS": min(WARPS, jobs),
        "PROGRAMS": programs,
        "PARTS": max(programs // (tiles * kv_heads), -(-blocks // MERGE_FAN_IN)),
        "PAGE": page_size,
    }
    sizes["SLOTS"] = min(MAX_SLOTS, (shared - _room(sizes)) // slot)
    return sizes if sizes["SLOTS"] >= MIN_SLOTS else None


def _model_sizes(weights: Weights, tables: RowTables) -> dict[str, int]:
    """The constants of the model, and of the rows of a pass."""
    config, layer = weights.config, weights.layers[0]
    chosen, experts = (1, 0) if layer.mixture is None else (layer.mixture.chosen, layer.mixture.experts)
    return {
        "LAYERS": config.num_layers,
        "HIDDEN": config.hidden_size,
        "INTERMEDIATE": chosen * layer.down.depth,
        "EXPERTS": experts,
        "CHOSEN": chosen,
        "HEADS": config.num_heads,
        "KV_HEADS": config.num_kv_heads,
        "DIM": config.head_dim,
        "HEADS_BIAS": int(layer.qkv.bias is not None),
        "HEAD_NORMS": int(layer.head_norms is not None),
        "ROWS": len(tables.positions),
        "HAS_TREES": int(tables.paths is not None),
        "PATH": MAX_PATH,
        "EPS_BITS": float_bits(config.rms_norm_eps),
        "ATTENTION_TILES": len(tables.tile_rows),
        "HEIGHT": tile_height(config.num_heads, config.num_kv_heads),
        "SCALE_BITS": float_bits(layer.scoring.scale(config.head_dim)),
    }


def _is_plain(weights: Weights, rows: int) -> bool:
    """Whether the kernel supports all layers of the model for this many rows."""
    config = weights.config

    def plain(layer: Layer) -> bool:
        matrices = (layer.qkv, layer.output, layer.gate_up, layer.down)
        has_experts = layer.mixture is not None
        return (
            all(own.tiling.packing == "none" and own.tiling.step == STEP for own in matrices)
            and (rows == 1 or not has_experts)
            and has_experts == (config.moe is not None)
            and (layer.mixture is None or (_is_plain_mixture(layer.mixture) and layer.shared is None))
            and layer.is_plain
            and layer.rotation is weights.layers[0].rotation is not None
            and layer.output.bias is None
            and layer.gate_up.tiling.splits == 1
            and layer.qkv.tiling.columns == config.head_dim in HEAD_SIZES
        )

    windows = any(config.window(index) is not None for index in range(config.num_layers))
    whole = weights.shard.size == 1  # ranks gather between its phases
    whole = whole and config.hidden_size % 128 == 0 and config.hidden_size <= MAX_HIDDEN
    whole = whole and config.num_heads * config.head_dim % 128 == 0
    dtype = weights.dtype == torch.bfloat16
    return whole and dtype and not windows and weights.residual is None and all(map(plain, weights.layers))


def _is_plain_mixture(mixture: Mixture) -> bool:
    """Whether the kernel supports a mixture: few experts per row, plain softmax routing."""
    moe, router, chosen = mixture.moe, mixture.router, mixture.chosen
    by_softmax = moe.scoring == "softmax" and moe.normalize_weights and moe.weight_scale == 1
    alone = mixture.shared == 0 and mixture.correction is None and moe.groups == 1
    plain = router.bias is None and mixture.gate_up.bias is None
    tiled = (
        router.tiling.step == STEP and router.tiling.columns == TILE and router.depth == mixture.gate_up.depth
    )
    known = chosen <= MAX_CHOSEN and chosen & (chosen - 1) == 0 and mixture.down.depth % STEP == 0
    return by_softmax and alone and plain and tiled and known and mixture.gate_up.weight.numel() < MAX_OFFSET


def _room(sizes: dict[str, int]) -> int:
    """Bytes of shared memory besides the weight pipeline, used by products and attention in turn."""
    whole = max(sizes["HIDDEN"], sizes["HEADS"] * sizes["DIM"])
    streamed = sizes["STREAMERS"] * ROW_SLOTS * PIECE
    products = sizes["ROWS"] * max(whole, streamed) * 2 + sizes["SPLIT_JOBS"] * 512
    lines = BLOCK + sizes["HAS_TREES"] * MAX_ROWS
    attention = (2 * lines + LANES) * sizes["DIM"] * 2 + LANES * (BLOCK + MAX_ROWS) * 4
    return max(products, attention) + OTHER_BYTES + sizes["LAYERS"] * LAYER_BYTES


def _shared_bytes(sizes: dict[str, int]) -> int:
    return sizes["SLOTS"] * sizes["SLOT"] + _room(sizes)
