"""Kernels that stream weights, compiled for the host: they compute what a layer is. See emulated.h."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.backends.cuda.kernels.products.matrix import (
    Normed,
    Scratch,
    Tiling,
    tile_heads,
    tile_matrix,
    tile_pair,
)
from paceline.backends.cuda.kernels.products.packing import round_to_fp8, round_to_int4
from paceline.backends.cuda.native import fused_layer, logits, weight_pipeline
from tests.backends.cuda.emulating import Emulated, needs_compiler, tensor_map

KV_HEADS, DIM, EPS = 1, 128, 1e-5
# {(packing, rows): hidden size, intermediate size, heads, splits of output and of down}. Warpgroups share a
# product with four or eight splits.
SIZES = {
    ("none", 5): (256, 384, 2, 2, 2),
    ("e4m3", 18): (256, 512, 2, 2, 4),
    ("int4", 5): (512, 2048, 4, 2, 8),
    ("int4", 18): (512, 1024, 4, 2, 4),
}
SLOTS, POSITIONS = 40, 64
SHARED_SOURCES = weight_pipeline.SHARED_SOURCES
WAIT = 352  # threads that wait for the kernels ahead: all but the warp that asks for weights


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(shape)).to(torch.bfloat16)


def empty_fp8(lines: int, width: int, packing: str) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Rows in e4m3 that were not written, and their scales, if the packing has such."""
    if packing != "e4m3":
        return None, None
    rows = torch.full((lines, width), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return rows, torch.full((lines // 16, width // 64, 16), torch.nan)


def normed(lines: int, width: int, packing: str) -> Normed:
    rows, squares = torch.full((lines, width), torch.nan), torch.full((lines, width // 64), torch.nan)
    return Normed(rows.to(torch.bfloat16), squares, width, EPS, *empty_fp8(lines, width, packing))


def fp8_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [rows, width] in e4m3, and the power-of-two scales [rows, groups] of every 64 of them."""
    groups = rows.float().view(len(rows), -1, 64)
    scales = torch.exp2(torch.floor(torch.log2(groups.abs().amax(-1))) - 7)
    return (groups / scales[..., None]).to(torch.float8_e4m3fn).flatten(1), scales


def as_read(rows: torch.Tensor, packing: str) -> torch.Tensor:
    """Rows as the tensor cores see them, in float32."""
    if packing != "e4m3":
        return rows.to(torch.bfloat16).float()
    codes, scales = fp8_rows(rows)
    return codes.float() * scales.repeat_interleave(64, 1)


def as_packed(weight: torch.Tensor, packing: str) -> torch.Tensor:
    """The values of a packed matrix, in float32."""
    if packing == "none":
        return weight.float()
    codes, scales = (round_to_fp8 if packing == "e4m3" else round_to_int4)(weight.float())
    codes = codes.view(torch.float8_e4m3fn) if packing == "e4m3" else codes
    return (codes.float().view(len(weight), -1, 32) * scales.float().view(len(weight), -1, 1)).flatten(1)


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, Any, int], None]:
    def use(module: Any, kernel: Emulated, programs: int) -> None:
        monkeypatch.setattr(weight_pipeline, "tensor_map", tensor_map)
        monkeypatch.setattr(module, "supports_pipeline", lambda device: True)
        monkeypatch.setattr(module, "num_multiprocessors", lambda device: programs)
        monkeypatch.setattr(module, "pipeline_kernel", lambda *arguments: kernel)
        if module is fused_layer:
            monkeypatch.setattr(fused_layer, "_all_fit_at_once", lambda *arguments: True)

    return use


def rotated(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Heads [rows, heads, dim] turned by angles [rows, dim / 2]."""
    one, two = heads.chunk(2, dim=-1)
    cosines, sines = cosines[:, None], sines[:, None]
    return torch.cat((one * cosines - two * sines, two * cosines + one * sines), dim=-1)


@needs_compiler
@pytest.mark.parametrize(("packing", "rows"), SIZES)
def test_the_fused_layer(on_host: Any, packing: str, rows: int) -> None:
    """Five rows of 16 or 18 of 32, rings that are used anew many times, a cluster without a tile."""
    torch.manual_seed(2)
    # a split has whole steps of the layout; results are transposed in the slots of rows
    hidden_size, intermediate, heads_count, output_splits, down_splits = SIZES[packing, rows]
    variant = next(own for own in fused_layer.VARIANTS[packing] if rows in own.rows)
    padded, ring = variant.padded, ((6, 5) if packing == "e4m3" else (6, 2))
    numbers = weight_pipeline.pipeline_numbers(padded, ring, packing, variant.loaded)
    files = *SHARED_SOURCES, "fused_layer"
    kernel, step = Emulated(files, "fused_layer", "Arguments", numbers, WAIT), weight_pipeline.STEPS[packing]
    on_host(fused_layer, kernel, max(hidden_size // 32, 2 * (heads_count + 2)) + 2)
    output, down = (
        random(hidden_size, heads_count * DIM, scale=0.06),
        random(hidden_size, intermediate, scale=0.05),
    )
    gate, up = (random(intermediate, hidden_size, scale=0.06) for _ in range(2))
    qkv, bias = random((heads_count + 2) * DIM, hidden_size, scale=0.06), random((heads_count + 2) * DIM)
    feed_norm, norm = (1 + random(hidden_size, scale=0.2) for _ in range(2))
    layer = SimpleNamespace(
        mixture=None,
        output=tile_matrix(output, hidden_size, Tiling(step=step, splits=output_splits, packing=packing)),
        gate_up=tile_pair(gate, up, Tiling(128 if packing == "e4m3" else 64, step, packing=packing)),
        down=tile_matrix(down, hidden_size, Tiling(step=step, splits=down_splits, packing=packing)),
        feed_forward_norm=feed_norm,
    )
    positions = (torch.arange(rows, dtype=torch.int32) * 23 + 3) % POSITIONS
    slot_mapping = torch.randperm(SLOTS)[:rows].to(torch.int32)
    angles = torch.rand(POSITIONS, DIM // 2) * 6
    keys, values = (torch.zeros(SLOTS, KV_HEADS, DIM, dtype=torch.bfloat16) for _ in range(2))
    query, scratch = (
        torch.zeros(padded, heads_count, DIM, dtype=torch.bfloat16),
        torch.zeros(512, dtype=torch.int32),
    )
    following = tile_heads(qkv, DIM, Tiling(DIM, step, 2, packing=packing), bias)
    output, gate, up, down, qkv = (as_packed(own, packing) for own in (output, gate, up, down, qkv))
    heads = fused_layer.NextQkv(
        following, positions, slot_mapping, (angles.cos(), angles.sin()), query, keys, values
    )
    for _ in range(1 if packing == "int4" else 2):  # copies arrive late, then at once
        hidden = torch.zeros(padded, hidden_size)
        mixed = torch.zeros(padded, heads_count * DIM, dtype=torch.bfloat16)
        hidden[:rows], mixed[:rows] = torch.randn(rows, hidden_size), random(rows, heads_count * DIM)
        features = torch.full((rows, hidden_size), torch.nan)
        activated, activated_scales = empty_fp8(padded, intermediate, packing)
        if activated is None:
            activated = torch.full((padded, intermediate), torch.nan, dtype=torch.bfloat16)
        residual, read, mixed_scales = hidden[:rows].clone(), as_read(mixed[:rows], packing), None
        if packing == "e4m3":
            mixed, by_row = fp8_rows(mixed)
            blocks = torch.nan_to_num(by_row).view(padded // 16, 16, -1)
            mixed_scales = blocks.transpose(1, 2).contiguous()
        feed_forward, following_input = (normed(padded, hidden_size, packing) for _ in range(2))
        buffers = fused_layer.LayerBuffers(
            hidden,
            mixed,
            feed_forward,
            activated,
            following_input,
            features,
            mixed_scales,
            activated_scales,
        )
        partial = Scratch(torch.zeros(1), scratch)
        assert fused_layer.run_fused_layer(layer, buffers, norm, rows, partial, heads)  # type: ignore[arg-type]

        def product(own: torch.Tensor, weight: torch.Tensor, of_norm: torch.Tensor) -> torch.Tensor:
            factor = torch.rsqrt(own.square().mean(1, keepdim=True) + EPS)
            return as_read(own * of_norm.float(), packing) @ weight.T * factor

        residual = residual + read @ output.T
        lets = torch.nn.functional.silu(product(residual, gate, feed_norm)) * product(residual, up, feed_norm)
        residual = residual + as_read(lets, packing) @ down.T
        wanted = (product(residual, qkv, norm) + bias.float()).view(rows, -1, DIM)
        transposed = rotated(wanted, angles.cos()[positions], angles.sin()[positions])
        found = (buffers.hidden[:rows], features, query[:rows], keys[slot_mapping], values[slot_mapping])
        expected = (
            residual,
            residual,
            transposed[:, :heads_count],
            transposed[:, heads_count : heads_count + 1],
            wanted[:, heads_count + 1 :],
        )
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(own.float(), other, rtol=0.02, atol=0.02)
        untouched = torch.ones(SLOTS, dtype=torch.bool)
        untouched[slot_mapping] = False
        assert not keys[untouched].any()
        assert not values[untouched].any()
        assert not scratch.any(), "counters are zero again"


@needs_compiler
def test_logits_of_many_rows(on_host: Any) -> None:
    """Programs have tiles again and again, and one has fewer than the others."""
    torch.manual_seed(3)
    numbers = weight_pipeline.pipeline_numbers(logits.PADDED, (6, 2), "none")
    kernel = Emulated((*SHARED_SOURCES, "logits"), "all_logits", "Logits", numbers, WAIT)
    on_host(logits, kernel, 2)
    rows, width, depth = 66, 3 * 256 - 20, 256
    weight = torch.zeros(3 * 256, depth, dtype=torch.bfloat16)
    weight[:width] = random(width, depth, scale=0.06)
    hidden, norm = torch.zeros(96, depth), 1 + random(depth, scale=0.2)
    hidden[:rows] = torch.randn(rows, depth)
    squares = hidden.square().view(96, -1, 64).sum(2)
    read = Normed((hidden * norm.float()).to(torch.bfloat16), squares, depth, EPS)
    output = torch.full((96, width), torch.nan)
    for _ in range(2):
        assert logits.run_logits(read, tile_matrix(weight, width, Tiling()), output, rows)
        factor = torch.rsqrt(hidden[:rows].square().mean(1, keepdim=True) + EPS)
        expected = read.rows[:rows].float() @ weight[:width].float().T * factor
        torch.testing.assert_close(output[:rows], expected, rtol=1e-3, atol=1e-3)
        assert output[rows:].isnan().all()
