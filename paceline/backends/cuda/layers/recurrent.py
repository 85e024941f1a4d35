"""Recurrent layers on the device: their parameters and states, and the walks of a pass along its rows.

The matrices around a recurrence are those of a layer (weights.py); kernels/recurrent/scan.py has the rest.
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
    StateTensors,
    Walks,
    recurrent_shape,
)
from paceline.backends.cuda.passes.tables import to_device
from paceline.core.arrays import Int32Array
from paceline.core.forward import ForwardBatch
from paceline.models.config import ModelConfig
from paceline.models.files.layout import RECURRENT_MATRICES

LINES = 8  # of a WalkPlan


@dataclass(frozen=True)
class CudaStates:
    """States of recurrent layers on the device."""

    num_states: int
    tensors: StateTensors


@dataclass(frozen=True)
class RecurrentRows:
    """The rows of a pass, as recurrent layers read them."""

    states: StateTensors
    parents: torch.Tensor  # int32 [rows] rows; -1: what is before it is in the state of its request
    slots: torch.Tensor  # int32 [rows] of that state; -1: it is empty
    walks: Walks


@dataclass(frozen=True)
class WalkPlan:
    """The walks of a pass as arrays."""

    lines: Int32Array  # [LINES, rows] parents and slots of rows, then the fields of Walks
    nodes: int  # states that rows other than the next continue
    firsts: dict[int, tuple[int, bool]]  # slot -> the first row of its request, whether it has a state


def load_parameters(config: ModelConfig, take: Callable[[str], torch.Tensor]) -> RecurrentParameters | None:
    """The parameters of all recurrent layers, if the model has some."""
    recurrent = config.recurrent
    if recurrent is None:
        return None
    place, _, _ = RECURRENT_MATRICES[recurrent.kind]
    has_memory = recurrent.kind != "short_conv"
    convolution = "conv" if recurrent.kind == "short_conv" else "conv1d"

    def stacked(name: str, is_there: bool = True) -> torch.Tensor | None:
        if not is_there:
            return None
        return torch.stack(
            [take(f"model.layers.{layer}.{place}.{name}").float() for layer in config.recurrent_layers]
        )

    weight, rates = stacked(f"{convolution}.weight"), stacked("A_log", has_memory)
    norm = stacked("norm.weight", has_memory and recurrent.norm_groups > 0)
    if norm is not None and recurrent.kind == "gated_delta":  # one for all heads
        norm = norm.repeat(1, recurrent.value_heads)
    assert weight is not None
    return RecurrentParameters(
        weight.squeeze(2).transpose(1, 2).contiguous(),
        stacked(f"{convolution}.bias", recurrent.conv_bias),
        None if rates is None else rates.exp(),
        stacked("dt_bias", has_memory),
        stacked("D", recurrent.kind == "mamba2"),
        norm,
        config.rms_norm_eps,
    )


def plan_walks(batch: ForwardBatch) -> WalkPlan:
    """The walks along the rows of every request: a row continues from its parent."""
    lines = np.zeros((LINES, batch.num_rows), dtype=np.int32)
    parents, slots, rows, before, after, begins, counts, walk_slots = lines
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
        begins[request], counts[request], walk_slots[request] = first, end - first, max(slot, 0)
        order = order_walk(local, has_state)
        before[first:end], after[first:end] = order.numbered(nodes)
        nodes += order.nodes
    return WalkPlan(lines, nodes, firsts)


@dataclass(frozen=True)
class WalkOrder:
    """The walk along the rows of a request: where the state before each is, and after which it is stored."""

    before: Int32Array  # [rows] as of Walks; stored states are numbered from 0
    after: Int32Array  # [rows]
    nodes: int  # stored states

    def numbered(self, first: int) -> tuple[Int32Array, Int32Array]:
        """`before` and `after`, with stored states numbered from `first`."""
        before, after = (np.where(part >= 0, part + first, part) for part in (self.before, self.after))
        return before, after


def order_walk(parents: Int32Array, has_state: bool) -> WalkOrder:
    """The walk along rows with these parents: a state is stored where another row than the next goes on."""
    before = np.where(parents < 0, FIRST if has_state else NOTHING, CONTINUES).astype(np.int32)
    after, nodes = np.full(len(parents), -1, dtype=np.int32), 0
    for row in np.flatnonzero((parents >= 0) & (parents != np.arange(len(parents)) - 1)):
        parent = int(parents[row])
        if after[parent] < 0:
            after[parent], nodes = nodes, nodes + 1
        before[row] = after[parent]
    return WalkOrder(before, after, nodes)


class Recurrences:
    """The recurrent layers of a model: walks of passes, at fixed addresses, and what follows a pass."""

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
        self._firsts: dict[int, tuple[int, bool]] = {}  # of the last pass: see WalkPlan

    def make_states(self, count: int) -> CudaStates:
        """Zeroed storage for `count` states."""
        own, device = self._shape.config, self._lines.device
        seen = (self._layers, count, own.conv_kernel - 1, self._shape.channels)
        memory = (self._layers, count, own.value_heads, own.key_dim, own.value_dim)
        tensors = StateTensors(torch.zeros(seen, device=device), torch.zeros(memory, device=device))
        return CudaStates(count, tensors)

    def rows(self, plan: WalkPlan, batch: ForwardBatch, count: int) -> RecurrentRows:
        """The first `count` rows on the device; rows and walks after those of the plan are padding."""
        self._firsts = plan.firsts
        lines = self._empty.copy()
        lines[:, : plan.lines.shape[1]] = plan.lines
        self._lines.copy_(to_device(lines, self._lines.device))
        pool = self._no_states if batch.states is None else cast(CudaStates, batch.states.pool)
        parents, slots, *walks = self._lines[:, :count]
        return RecurrentRows(pool.tensors, parents, slots, Walks(*walks))

    def advance(
        self,
        buffers: RecurrentBuffers,
        states: StateTensors,
        slot: int,
        rows: Sequence[int],
        checkpoints: Mapping[int, int],
    ) -> None:
        """Replace the state of a slot by that after these rows of its request: see Backend.advance_state.

        The states of all layers advance at once.
        """
        (begin, has_state), count = self._firsts[slot], len(rows)
        stored = {number: to for number, to in checkpoints.items() if number < count} | {count: slot}
        before, after = np.full(count, CONTINUES), np.full(count, -1)
        before[0] = FIRST if has_state else NOTHING
        for number, to in stored.items():
            after[number - 1] = to
        path = begin + np.asarray(rows)
        walk = [0, count, slot, slot if has_state else -1]
        numbers = np.concatenate((path, before, after, walk, [*stored], [*stored.values()]))
        there = to_device(numbers.astype(np.int32), states.seen.device)
        path_rows, befores, afters = there[: 3 * count].view(3, count)
        begins, counts, slots, read_slots = there[3 * count : 3 * count + 4].view(4, 1)
        kept_counts, to_slots = there[3 * count + 4 :].view(2, 1, -1)
        shape, walks = self._shape, Walks(path_rows, befores, afters, begins, counts, slots)
        if shape.rate >= 0:
            whole = slice(None)
            scan_states(shape, self._parameters, whole, buffers, states, states.memory, walks, writes=False)
        store_conv_states(shape, buffers, states, path_rows, begins, read_slots, kept_counts, to_slots)
        if count in checkpoints:
            copy_state(states, slot, checkpoints[count])


def copy_state(states: StateTensors, source: int, destination: int) -> None:
    """Give a slot the state of another one."""
    for tensor in (states.seen, states.memory):
        tensor[:, destination] = tensor[:, source]
