"""NativeKernel: CUDA C++ kernels, compiled by torch's NVRTC and launched through the CUDA driver.

torch compiles kernels, but cannot launch them with programmatic dependent launch or in clusters, and does
not create TMA descriptors. The driver does all three, through ctypes.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from paceline.backends.cuda.passes.compiling import compiled, on_device
from paceline.backends.fallbacks import record_fallback

BFLOAT16 = 9  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
SWIZZLE_128B = 3  # CU_TENSOR_MAP_SWIZZLE_128B
CLUSTER, OVERLAP = 4, 6  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, ..._PROGRAMMATIC_STREAM_SERIALIZATION
CARVEOUT, ALL_SHARED = 9, 100  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, percent
MAP_BYTES, MAP_ALIGNMENT = 128, 64
# Optional kernels, which benchmarks can disable: those in CUDA C++ (Triton kernels run instead), and the
# shared-prefix kernel (every request reads its own prefix instead).
KERNELS = (
    "decode_attention",
    "fused_layer",
    "late_merge",
    "logits",
    "many_rows",
    "persistent",
    "prefill_attention",
    "shared_prefix",
)
ALIASES = {"attend": "decode_attention", "between": "fused_layer", "common": "shared_prefix"}  # older names

_left_out: set[str] = set()


@contextmanager
def leaving_out(names: Sequence[str]) -> Iterator[None]:
    """Disable these kernels in graphs captured within the context, to compare with what they replace."""
    named = [ALIASES.get(name, name) for name in names]
    _left_out.update(named)
    try:
        yield
    finally:
        _left_out.difference_update(named)


def is_left_out(name: str) -> bool:
    """Whether this kernel is disabled."""
    return name in _left_out


@lru_cache
def compiler() -> Callable[..., Any] | None:
    """torch's private function that compiles a CUDA C++ kernel; None if torch has none (logged once).

    Public functions need a CUDA toolkit on the machine; this one uses the NVRTC that torch ships.
    """
    found: Callable[..., Any] | None = getattr(torch.cuda, "_compile_kernel", None)
    if found is None:
        why = "this torch has no torch.cuda._compile_kernel. Install torch 2.11, which has it."
        record_fallback("all in CUDA C++", "Triton's kernels run", why)
    return found


@lru_cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def float_bits(number: float) -> int:
    """The bits of a float32 as an integer, for constants in sources."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


def _check(result: int, doing: str) -> None:
    if result:
        raise RuntimeError(f"{doing} failed: error {result} of the CUDA driver")


@cache
def tensor_map(address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> bytes:
    """The TMA descriptor of a bfloat16 tensor, for copies of boxes with lines of 128 bytes, swizzled.

    Sizes, strides and the box have the innermost dimension first; strides are in elements, without the
    innermost.
    """
    rank = len(sizes)
    room = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
    aligned = -(-ctypes.addressof(room) // MAP_ALIGNMENT) * MAP_ALIGNMENT
    result = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        BFLOAT16,
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*(2 * stride for stride in strides)),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,  # not interleaved
        SWIZZLE_128B,
        0,  # no L2 promotion
        0,  # zeros beyond the sizes
    )
    _check(result, "describing a tensor")
    return ctypes.string_at(aligned, MAP_BYTES)


class _Attribute(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint32 * 16)]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint32),
    ]


def _three(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return *sizes, *(1,) * (3 - len(sizes))


class NativeKernel:
    """A kernel with one structure as argument, launched with programmatic dependent launch."""

    def __init__(self, source: str, name: str, shared_bytes: int, device: torch.device) -> None:
        make = compiler()
        assert make is not None, "asked before"

        def compile_source() -> Any:
            with on_device(device):
                kernel = make(source, name, compute_capability="90a")
                kernel.set_shared_memory_config(shared_bytes)
                # otherwise programs of the next kernel would find no shared memory
                result = _driver().cuFuncSetAttribute(kernel.func, CARVEOUT, ALL_SHARED)
                _check(result, "reserving shared memory")
            return kernel

        self._kernel = compiled((source, name, shared_bytes, device), compile_source)
        self._shared = shared_bytes

    def most_clusters(self, grid: tuple[int, int], cluster: tuple[int, int], threads: int) -> int | None:
        """The number of clusters that can be resident at once; None if the driver cannot tell."""
        if self._kernel is None:
            return None
        attributes, count = (_Attribute * 1)(), ctypes.c_int(0)
        attributes[0].kind = CLUSTER
        attributes[0].value[:3] = (*cluster, 1)
        whole, block = (ctypes.c_uint32 * 3)(*grid, 1), (ctypes.c_uint32 * 3)(threads, 1, 1)
        launch = _Launch(whole, block, self._shared, None, attributes, 1)
        ask = _driver().cuOccupancyMaxActiveClusters
        return None if ask(ctypes.byref(count), self._kernel.func, ctypes.byref(launch)) else count.value

    def launch(self, argument: bytes, grid: tuple[int, ...], cluster: tuple[int, ...], threads: int) -> None:
        """Launch it on the current stream with this argument."""
        if self._kernel is None:  # passes only compile
            return
        attributes = (_Attribute * 2)()
        attributes[0].kind, attributes[0].value[0] = OVERLAP, 1
        attributes[1].kind = CLUSTER
        attributes[1].value[:3] = _three(cluster)
        stream = torch.cuda.current_stream().cuda_stream
        whole, block = (ctypes.c_uint32 * 3)(*_three(grid)), (ctypes.c_uint32 * 3)(threads, 1, 1)
        launch = _Launch(whole, block, self._shared, stream, attributes, 2 if max(cluster) > 1 else 1)
        held = ctypes.create_string_buffer(argument, len(argument))
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(held))
        result = _driver().cuLaunchKernelEx(ctypes.byref(launch), self._kernel.func, arguments, None)
        _check(result, "launching a kernel")


def native_kernel(
    name: str,
    files: Sequence[str],
    numbers: Mapping[str, int],
    instructions: str,
    shared_bytes: int,
    device: torch.device,
) -> NativeKernel | None:
    """The kernel of this name; None, and a log entry, if it does not compile: Triton runs instead.

    Its source: the constants `numbers`, `instructions`, then these files of source/, in this order.
    """
    if compiler() is None:
        return None
    defined = "".join(f"#define {what} {number}\n" for what, number in numbers.items())
    folder = Path(__file__).with_name("source")
    source = "".join((folder / f"{file}.cu").read_text() for file in files)
    try:
        return NativeKernel(defined + instructions + source, name, shared_bytes, device)
    except Exception as error:  # a private function of torch may raise anything
        record_fallback(name, "Triton's kernels run", error)
        return None
