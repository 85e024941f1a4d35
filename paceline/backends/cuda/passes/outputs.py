"""The outputs of a host pass: a feature buffer, and asynchronous copies to the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from paceline.core.forward import ForwardOutput


class FeatureBuffer:
    """The hidden features of all rows of a pass: float32 [rows, width], the same memory in every pass."""

    def __init__(self, rows: int, hidden_size: int, device: torch.device) -> None:
        self._rows, self._hidden_size, self._device = rows, hidden_size, device
        self.values = torch.empty(0)
        self._parts: dict[tuple[tuple[int, ...], ...], torch.Tensor] = {}

    def hold(self, layers: int) -> bool:
        """Make room for this number of layers; True if the memory is new, so captured graphs are stale."""
        shape = (self._rows, layers * self._hidden_size)
        if self.values.shape == shape:
            return False
        self.values = torch.zeros(shape, device=self._device)
        return True

    def parts(self, layers: tuple[int, ...], wanted: tuple[int, ...]) -> torch.Tensor:
        """The indices of the wanted layers among `layers`: int32 [wanted], made once."""
        name = (layers, wanted)
        if name not in self._parts:
            parts = np.array([layers.index(layer) for layer in wanted], dtype=np.int32)
            self._parts[name] = torch.from_numpy(parts).to(self._device)
        return self._parts[name]


def copied_to_host(
    logits: torch.Tensor, features: torch.Tensor | None, chosen: torch.Tensor | None
) -> Callable[[], ForwardOutput]:
    """Start asynchronous copies to the host; the returned function waits for them."""
    if logits.device.type != "cuda":
        return lambda: ForwardOutput(*map(_numbers, (logits, features, chosen)))
    copies = [
        None
        if values is None
        else torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
        for values in (logits, features, chosen)
    ]
    there = torch.cuda.Event()  # type: ignore[no-untyped-call]
    there.record()

    def wait() -> ForwardOutput:
        there.synchronize()
        return ForwardOutput(*map(_numbers, copies))

    return wait


def _numbers(values: torch.Tensor | None) -> Any:
    return None if values is None else values.numpy()
