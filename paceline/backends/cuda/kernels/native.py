"""Kernels of CUDA C++: how they are compiled, told where tensors lie, and started.

torch compiles them with the compiler that it brings along; the rest is the driver's own functions.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

logger = logging.getLogger(__name__)

BFLOAT16, SWIZZLE_128_BYTES, FETCH_128_BYTES = 9, 3, 2  # as the driver numbers them
OVERLAP_ATTRIBUTE = 6
MAP_BYTES, MAP_ALIGNMENT = 128, 64


class _Attribute(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


@lru_cache
def compiler() -> Callable[..., Any] | None:
    """What makes a kernel of CUDA C++, or None, which the log tells once.

    It is private to torch, and named nowhere else: nothing public compiles without a toolkit on the machine.
    This one uses the compiler that comes with torch (NVRTC).
    """
    found: Callable[..., Any] | None = getattr(torch.cuda, "_compile_kernel", None)
    if found is None:
        logger.info("kernels of CUDA C++ do not run: this torch has no torch.cuda._compile_kernel")
    return found


@lru_cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(what: str, result: int) -> None:
    if result != 0:
        raise RuntimeError(f"{what}: the CUDA driver answered with error {result}")


def tensor_map(
    tensor: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> ctypes.Array[ctypes.c_char]:
    """What the copy engine must know to fetch boxes of a bfloat16 tensor, swizzled.

    Sizes and boxes begin with the side whose numbers lie next to each other; strides are those of the others,
    in numbers.
    """
    room = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
    offset = -ctypes.addressof(room) % MAP_ALIGNMENT
    made = (ctypes.c_char * MAP_BYTES).from_buffer(room, offset)
    rank, steps = len(sizes), (ctypes.c_uint32 * len(sizes))(*[1] * len(sizes))
    result = _driver().cuTensorMapEncodeTiled(
        made,
        BFLOAT16,
        ctypes.c_uint32(rank),
        ctypes.c_void_p(tensor.data_ptr()),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*(2 * stride for stride in strides)),
        (ctypes.c_uint32 * rank)(*box),
        steps,
        0,
        SWIZZLE_128_BYTES,
        FETCH_128_BYTES,
        0,
    )
    _check("a tensor map", result)
    return made


class NativeKernel:
    """A kernel of CUDA C++ for Hopper, with so many bytes of shared memory asked for when it starts."""

    def __init__(self, source: str, name: str, shared_bytes: int, device: torch.device) -> None:
        compile_kernel = compiler()
        assert compile_kernel is not None, "asked before"
        with torch.cuda.device(device):
            self._kernel = compile_kernel(source, name, compute_capability="90a")
            self._kernel.set_shared_memory_config(shared_bytes)
        self._shared_bytes = shared_bytes
        self._launch = _driver().cuLaunchKernelEx  # older drivers have none

    def start(self, grid: tuple[int, int, int], threads: int, arguments: Sequence[Any]) -> None:
        """Start it on the current stream, ahead of the end of the kernel before; it has to wait for that."""
        overlap = _Attribute(OVERLAP_ATTRIBUTE)
        overlap.value[0] = 1
        launch = _Launch()
        launch.grid[:], launch.block[:] = grid, (threads, 1, 1)
        launch.shared_bytes = self._shared_bytes
        launch.stream = torch.cuda.current_stream().cuda_stream
        launch.attributes, launch.attribute_count = ctypes.pointer(overlap), 1
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(own) for own in arguments))
        _check("a launch", self._launch(ctypes.byref(launch), self._kernel.func, pointers, None))
