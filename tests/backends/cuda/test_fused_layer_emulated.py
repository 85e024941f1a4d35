"""Kernels that stream weights, compiled for the host: they compute what a layer is. See emulated.h."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.backends.cuda import fused_layer, logits, weight_pipeline
from paceline.backends.cuda.kernels.matrix import Normed, Scratch, Tiling, tile_heads, tile_matrix, tile_pair
from tests.backends.cuda.emulating import compiled, needs_compiler

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, DIM, EPS = 256, 384, 2, 1, 128, 1e-5
SLOTS, POSITIONS = 40, 64
WAIT = 352  # threads that wait for the kernels ahead: all but the warp that asks for weights


class Emulated:
    """A kernel of CUDA C++ as the backend knows it, that runs on the host."""

    def __init__(self, file: str, name: str, rows: int, ring: tuple[int, int]) -> None:
        numbers = {"ROWS": rows, "CELLS": ring[0], "ROW_SLOTS": ring[1]}
        own = {
            "THREADS_OF_PROGRAM": weight_pipeline.THREADS,
            "WAITING_THREADS": WAIT,
            "SHARED_BYTES": 228 << 10,
        }
        own |= {"KERNEL": name, "ARGUMENT": {"fused_layer": "Arguments", "logits": "Logits"}[file]}
        files, options = (*weight_pipeline.SHARED_SOURCES[1:], file), ("-shared", "-fPIC")
        library = compiled(files, "emulated_pipeline.h", numbers | own, *options)
        self._library, self.runs = ctypes.CDLL(str(library)), 0

    def launch(self, argument: bytes, grid: Sequence[int], cluster: Sequence[int], threads: int) -> None:
        room = ctypes.create_string_buffer(len(argument) + 64)
        aligned = -(-ctypes.addressof(room) // 64) * 64
        ctypes.memmove(aligned, argument, len(argument))
        ended = self._library.run(ctypes.c_void_p(aligned), grid[0], self.runs)
        self.runs += 1  # others rest then, and every other time copies arrive at once
        assert ended, "programs wait for ever"


def tensor_map(address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> bytes:
    """What emulated.h calls a Map."""
    five, four = (lambda own: [*own, *[0] * (5 - len(own))]), [*strides, *[0] * (4 - len(strides))]
    return struct.pack("<Q11i4x4q", address, len(sizes), *five(sizes), *five(box), *four).ljust(128, b"\0")


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(shape)).to(torch.bfloat16)


def normed(width: int) -> Normed:
    rows = torch.full((16, width), torch.nan, dtype=torch.bfloat16)
    return Normed(rows, torch.full((16, width // 64), torch.nan), width, EPS)


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
def test_the_fused_layer(on_host: Any) -> None:
    """Five rows of sixteen, rings that are used anew many times, a cluster that has no tile."""
    torch.manual_seed(2)
    kernel = Emulated("fused_layer", "fused_layer", fused_layer.FEW, (6, 2))
    on_host(fused_layer, kernel, 10)
    output, down = random(HIDDEN, HEADS * DIM, scale=0.06), random(HIDDEN, INTERMEDIATE, scale=0.05)
    gate, up = (random(INTERMEDIATE, HIDDEN, scale=0.06) for _ in range(2))
    qkv, bias = random((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, scale=0.06), random(4 * DIM)
    feed_norm, norm = (1 + random(HIDDEN, scale=0.2) for _ in range(2))
    layer = SimpleNamespace(
        mixture=None,
        output=tile_matrix(output, HIDDEN, Tiling(splits=2)),
        gate_up=tile_pair(gate, up, Tiling()),
        down=tile_matrix(down, HIDDEN, Tiling(splits=2)),
        feed_forward_norm=feed_norm,
    )
    rows, positions = 5, torch.tensor([3, 4, 5, 60, 0], dtype=torch.int32)
    slot_mapping = torch.tensor([7, 0, 39, 12, 13], dtype=torch.int32)
    angles = torch.rand(POSITIONS, DIM // 2) * 6
    keys, values = (torch.zeros(SLOTS, KV_HEADS, DIM, dtype=torch.bfloat16) for _ in range(2))
    query, scratch = torch.zeros(16, HEADS, DIM, dtype=torch.bfloat16), torch.zeros(512, dtype=torch.int32)
    following = tile_heads(qkv, DIM, Tiling(columns=DIM, splits=2), bias)
    heads = fused_layer.NextQkv(
        following, positions, slot_mapping, (angles.cos(), angles.sin()), query, keys, values
    )
    for _ in range(2):  # copies arrive late, then at once
        hidden, mixed = torch.zeros(16, HIDDEN), torch.zeros(16, HEADS * DIM, dtype=torch.bfloat16)
        hidden[:rows], mixed[:rows] = torch.randn(rows, HIDDEN), random(rows, HEADS * DIM)
        features = torch.full((rows, HIDDEN), torch.nan)
        activated = torch.full((16, INTERMEDIATE), torch.nan, dtype=torch.bfloat16)
        buffers = fused_layer.LayerBuffers(hidden, mixed, normed(HIDDEN), activated, normed(HIDDEN), features)
        residual, read = hidden[:rows].clone(), mixed[:rows].float()
        partial = Scratch(torch.zeros(1), scratch)
        assert fused_layer.run_fused_layer(layer, buffers, norm, rows, partial, heads)  # type: ignore[arg-type]

        def product(own: torch.Tensor, weight: torch.Tensor, of_norm: torch.Tensor) -> torch.Tensor:
            factor = torch.rsqrt(own.square().mean(1, keepdim=True) + EPS)
            return (own * of_norm.float()).to(torch.bfloat16).float() @ weight.float().T * factor

        residual = residual + read @ output.float().T
        lets = torch.nn.functional.silu(product(residual, gate, feed_norm)) * product(residual, up, feed_norm)
        residual = residual + lets.to(torch.bfloat16).float() @ down.float().T
        wanted = (product(residual, qkv, norm) + bias.float()).view(rows, -1, DIM)
        transposed = rotated(wanted, angles.cos()[positions], angles.sin()[positions])
        found = (buffers.hidden[:rows], features, query[:rows], keys[slot_mapping], values[slot_mapping])
        expected = (
            residual,
            residual,
            transposed[:, :HEADS],
            transposed[:, HEADS : HEADS + 1],
            wanted[:, HEADS + 1 :],
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
    kernel = Emulated("logits", "all_logits", logits.PADDED, (6, 2))
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
