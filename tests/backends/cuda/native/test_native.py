"""CUDA C++ kernels are compiled from constants, instructions and files, and can be left out for Triton's."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.backends import fallbacks
from paceline.backends.cuda.kernels.attention import paged_attention as attention
from paceline.backends.cuda.kernels.attention.row_tables import RowTables
from paceline.backends.cuda.kernels.products.matrix import Tiling
from paceline.backends.cuda.native import decode_attention, fused_layer, logits, persistent
from paceline.backends.cuda.native import nvrtc as native
from paceline.backends.cuda.native.nvrtc import KERNELS, leaving_out


def attends() -> bool:
    """Whether the kernel is asked; Triton's is not run here."""
    nothing: Any = None
    decode_attention.attend(nothing, nothing, nothing, tables_of(None), None, 16, nothing, nothing)
    return True


def tables_of(shared_prefix: Any) -> Any:
    return RowTables(*[torch.zeros(1)] * 8, shared_prefix=shared_prefix)


def runs_fused_layer() -> bool:
    nothing: Any = None
    layer: Any = SimpleNamespace(output=SimpleNamespace(weight=torch.zeros(1), tiling=Tiling()))
    return fused_layer.run_fused_layer(layer, nothing, nothing, 96, nothing, None)


def gives_logits() -> bool:
    nothing: Any = None
    matrix: Any = SimpleNamespace(weight=torch.zeros(1))
    return logits.run_logits(nothing, matrix, nothing, 96)


def stays() -> bool:
    nothing: Any = None
    tables: Any = SimpleNamespace(paths=None, shared_prefix=None, adapters=None, positions=torch.zeros(1))
    return persistent.PersistentLayers(nothing, nothing, nothing, 16).run(torch.zeros(1), tables)


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("decode_attention", attends),
        ("fused_layer", runs_fused_layer),
        ("logits", gives_logits),
        ("persistent", stays),
    ],
)
def test_a_kernel_can_be_disabled(name: str, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> bool:
        raise RuntimeError("asked")

    monkeypatch.setattr(decode_attention, "_run", refuse)
    monkeypatch.setattr(attention, "attend", lambda *arguments, **options: None)
    monkeypatch.setattr(persistent.PersistentLayers, "_prepare", refuse)
    for module in (fused_layer, logits):
        monkeypatch.setattr(module, "supports_pipeline", refuse)
    assert name in KERNELS
    with pytest.raises(RuntimeError, match="asked"):
        run()
    with leaving_out([name]):
        run()
    with leaving_out([own for own in KERNELS if own != name]), pytest.raises(RuntimeError, match="asked"):
        run()


@pytest.mark.parametrize("window", [None, 7])
def test_shared_prefixes_are_read_once_unless_left_out_or_with_sliding_windows(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    nothing, shared_prefix = None, object()
    monkeypatch.setattr(
        attention,
        "attend",
        lambda query, keys, values, tables, *_, **options: asked.append(tables.shared_prefix),
    )
    for names in ([], ["shared_prefix"]):
        with leaving_out(["decode_attention", *names]):
            decode_attention.attend(
                nothing, nothing, nothing, tables_of(shared_prefix), window, 16, nothing, nothing
            )  # type: ignore[arg-type]
    assert asked == [shared_prefix if window is None else None, None]


def test_a_source_is_numbers_instructions_and_files(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, str, int]] = []
    monkeypatch.setattr(native, "compiler", lambda: print)
    monkeypatch.setattr(
        native, "NativeKernel", lambda source, name, shared, _: made.append((source, name, shared))
    )
    decode_attention._kernel.__wrapped__((32, 8, 128, 16), 2, True, 1.0, torch.device("cuda"))
    source, name, shared = made[0]
    assert name == "decode_attention"
    assert source.startswith("#define HEADS 32\n#define KV_HEADS 8\n#define DIM 128\n#define PAGE 16\n")
    assert f"#define SHARED_BYTES {shared}\n" in source
    words = (
        "void multiply(float (&d)[16]",
        "void multiply_transposed(",
        "typedef unsigned int u32",
        "Decode attention for uniform",
    )
    places = [source.index(own) for own in words]
    assert places == sorted(places)


@pytest.mark.parametrize("compiler", [None, print])
def test_what_cannot_be_compiled_is_left_to_triton(
    compiler: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError("no such driver")

    monkeypatch.setattr(native, "compiler", lambda: compiler)
    monkeypatch.setattr(native, "NativeKernel", fail)
    monkeypatch.setattr(fallbacks, "_replaced", {})
    with caplog.at_level(logging.WARNING):
        assert (
            native.native_kernel("decode_attention", ["decode_attention"], {}, "", 0, torch.device("cuda"))
            is None
        )
    assert ("no such driver" in caplog.text) == (compiler is not None)
    assert [*fallbacks.fallbacks()] == ["decode_attention"] * (compiler is not None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs the CUDA driver")
def test_a_kernel_is_compiled_in_a_new_thread_too() -> None:
    """Where nothing has used the GPU yet, and so no CUDA context is current."""
    device, source = torch.device("cuda"), 'extern "C" __global__ void nothing() {}'
    with ThreadPoolExecutor(1) as threads:
        threads.submit(native.NativeKernel, source, "nothing", 1024, device).result()
