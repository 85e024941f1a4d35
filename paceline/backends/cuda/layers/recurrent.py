"""Recurrent layers on the device: parameters, states, and the plan of a pass's scans.

Layer holds the projections around a recurrence; kernels/recurrent/scan.py computes convolution and scan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from paceline.backends.cuda.kernels.recurrent.scan import scan_states, store_conv_states
from paceline.backends.cuda.kernels.recurrent.types import (
    CONTINUES,
    FIRST,
    NOTHING,
    RecurrentBuffers,
    RecurrentParameters,
    Scans,
    StateTensors,
    recurrent_shape,
)
from paceline.backends.cuda.passes.tables import to_device
from paceline.core.arrays import Int32Array
from paceline.core.forward import ForwardBatch
from paceline.models.config import ModelConfig
from paceline.models.files.layout import RECURRENT_MATRICES

LINES = 8  # of a ScanPlan


@dataclass(frozen=True)
class CudaStates:
    """States of recurrent layers on the device."""

    num_states: int
    tensors: StateTensors


@dataclass(frozen=True)
class RecurrentRows:
    """The rows of a pass, as recurrent layers read them."""

    states: StateTensors
    parents: torch.Tensor  # int32 [rows] the row before each; -1: its request's state is before it
    slots: torch.Tensor  # int32 [rows] slot of that state; -1: zeros
    scans: Scans
    advances: torch.Tensor | None = None  # int32 [rows] one row per request, which replaces the request's
    # state in this pass unless this is negative; None: states stay


@dataclass(frozen=True)
class ScanPlan:
    """The scans of a pass as arrays."""

    lines: Int32Array  # [LINES, rows] parents and slots of rows, then the fields of Scans
    nodes: int  # stored states: of tree nodes from which a row other than the next continues
    firsts: dict[int, tuple[int, bool]]  # slot -> the first row of its request, whether it has a state


def load_parameters(config: ModelConfig, take: Callable[[str], torch.Tensor]) -> RecurrentParameters | None:
    """The parameters of all recurrent layers, if the model has some."""
    recurrent = config.recurrent
    if recurrent is None:
        return None
    place, _, _ = RECURRENT_MATRICES[recurrent.kind]
    has_ssm = recurrent.kind != "short_conv"
    convolution = "conv" if recurrent.kind == "short_conv" else "conv1d"

    def stacked(name: str, is_there: bool = True) -> torch.Tensor | None:
        if not is_there:
            return None
        return torch.stack(
            [take(f"model.layers.{layer}.{place}.{name}").float() for layer in config.recurrent_layers]
        )

    weight, rates = stacked(f"{convolution}.weight"), stacked("A_log", has_ssm)
    norm = stacked("norm.weight", has_ssm and recurrent.norm_groups > 0)
    if norm is not None and recurrent.kind == "gated_delta":  # one for all heads
        norm = norm.repeat(1, recurrent.value_heads)
    assert weight is not None
    return RecurrentParameters(
        weight.squeeze(2).transpose(1, 2).contiguous(),
        stacked(f"{convolution}.bias", recurrent.conv_bias),
        None if rates is None else rates.exp(),
        stacked("dt_bias", has_ssm),
        stacked("D", recurrent.kind == "mamba2"),
        norm,
        config.rms_norm_eps,
    )


def plan_scans(batch: ForwardBatch) -> ScanPlan:
    """The scans along the rows of every request: a row continues from its parent."""
    lines = np.zeros((LINES, batch.num_rows), dtype=np.int32)
    parents, slots, rows, before, after, begins, counts, scan_slots = lines
    rows[:] = np.arange(batch.num_rows)
    nodes, firsts = 0, dict[int, tuple[int, bool]]()
    for request in range(batch.num_requests):
        first, end = int(batch.row_offsets[request]), int(batch.row_offsets[request + 1])
        slot = -1 if batch.states is None else int(batch.states.slots[request])
        has_state = slot >= 0 and bool(batch.context_lengths[request] > 0)
        firsts[slot] = first, has_state
        local = batch.parents[first:end]
        parents[first:end] = np.where(local >= 0, first + local, -1)
        slots[first:end] = slot if has_state else -1
        begins[request], counts[request], scan_slots[request] = first, end - first, max(slot, 0)
        order = order_scan(local, has_state)
        before[first:end], after[first:end] = order.numbered(nodes)
        nodes += order.nodes
    return ScanPlan(lines, nodes, firsts)


@dataclass(frozen=True)
class ScanOrder:
    """The scan of one request's rows: where the state before each is, and which states are stored."""

    before: Int32Array  # [rows] as in Scans; stored states are numbered from 0
    after: Int32Array  # [rows]
    nodes: int  # stored states

    def numbered(self, first: int) -> tuple[Int32Array, Int32Array]:
        """`before` and `after`, with stored states numbered from `first`."""
        before, after = (np.where(part >= 0, part + first, part) for part in (self.before, self.after))
        return before, after


def order_scan(parents: Int32Array, has_state: bool) -> ScanOrder:
    """The scan of rows with these parents. A state is stored if a row other than the next continues it."""
    before = np.where(parents < 0, FIRST if has_state else NOTHING, CONTINUES).astype(np.int32)
    after, nodes = np.full(len(parents), -1, dtype=np.int32), 0
    for row in np.flatnonzero((parents >= 0) & (parents != np.arange(len(parents)) - 1)):
        parent = int(parents[row])
        if after[parent] < 0:
            after[parent], nodes = nodes, nodes + 1
        before[row] = after[parent]
    return ScanOrder(before, after, nodes)


class Recurrences:
    """The recurrent layers of a model: the scans of passes, at fixed addresses, and the advance of states."""

    def __init__(
        self, config: ModelConfig, parameters: RecurrentParameters, max_rows: int, device: torch.device
    ) -> None:
        assert config.recurrent is not None
        self._layers, self._parameters = len(config.recurrent_layers), parameters
        self._shape = recurrent_shape(config.recurrent, config.hidden_size)
        self._lines = torch.zeros((LINES, max_rows), dtype=torch.int32, device=device)
        self._empty = np.zeros((LINES, max_rows), dtype=np.int32)
        self._empty[:2] = -1
        self._no_states = self.make_states(1)
        self._firsts: dict[int, tuple[int, bool]] = {}  # of the last pass: see ScanPlan

    def make_states(self, count: int) -> CudaStates:
        """Zeroed storage for `count` states."""
        own, device = self._shape.config, self._lines.device
        conv = (self._layers, count, own.conv_kernel - 1, self._shape.channels)
        ssm = (self._layers, count, own.value_heads, own.key_dim, own.value_dim)
        tensors = StateTensors(torch.zeros(conv, device=device), torch.zeros(ssm, device=device))
        return CudaStates(count, tensors)

    def rows(self, plan: ScanPlan, batch: ForwardBatch, count: int) -> RecurrentRows:
        """The first `count` rows on the device; rows and scans beyond the plan's are padding."""
        self._firsts = plan.firsts
        lines = self._empty.copy()
        lines[:, : plan.lines.shape[1]] = plan.lines
        self._lines.copy_(to_device(lines, self._lines.device))
        pool = self._no_states if batch.states is None else cast(CudaStates, batch.states.pool)
        parents, slots, *scans = self._lines[:, :count]
        return RecurrentRows(pool.tensors, parents, slots, Scans(*scans))

    def advance(
        self,
        buffers: RecurrentBuffers,
        states: StateTensors,
        slot: int,
        rows: Sequence[int],
        checkpoints: Mapping[int, int],
    ) -> None:
        """Advance a slot's state along rows of its request, in all layers: see Backend.advance_state."""
        (begin, has_state), count = self._firsts[slot], len(rows)
        stored = {number: to for number, to in checkpoints.items() if number < count} | {count: slot}
        before, after = np.full(count, CONTINUES), np.full(count, -1)
        before[0] = FIRST if has_state else NOTHING
        for number, to in stored.items():
            after[number - 1] = to
        path = begin + np.asarray(rows)
        scan = [0, count, slot, slot if has_state else -1]
        numbers = np.concatenate((path, before, after, scan, [*stored], [*stored.values()]))
        there = to_device(numbers.astype(np.int32), states.conv.device)
        path_rows, befores, afters = there[: 3 * count].view(3, count)
        begins, counts, slots, read_slots = there[3 * count : 3 * count + 4].view(4, 1)
        kept_counts, to_slots = there[3 * count + 4 :].view(2, 1, -1)
        shape, scans = self._shape, Scans(path_rows, befores, afters, begins, counts, slots)
        if shape.rate >= 0:
            whole = slice(None)
            scan_states(shape, self._parameters, whole, buffers, states, states.ssm, scans, writes=False)
        store_conv_states(shape, buffers, states, path_rows, begins, read_slots, kept_counts, to_slots)
        if count in checkpoints:
            copy_state(states, slot, checkpoints[count])


def copy_state(states: StateTensors, source: int, destination: int) -> None:
    """Copy the state of one slot to another."""
    for tensor in (states.conv, states.ssm):
        tensor[:, destination] = tensor[:, source]
