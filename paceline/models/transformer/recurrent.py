"""Recurrent layers: a state is carried from token to token, instead of keys and values that are read again.

A recurrence has three parts. `project` and `output` are matrix products over all rows at once. `step` is
everything in between, for one row: it takes the state before the row and gives the state after it. So a row
is always computed by the same operations on the same shapes, whether it came in a prompt, in a draft tree or
alone, and its state has the same bits. (A chunked evaluation would be faster and would add in another order.)

    committed state ─ step ─ step ─┬─ step            a chain, then a tree: a row continues from its parent
                                   └─ step ─ step

A pass changes no stored state. It leaves what `project` gave for its rows, and `advance` steps again along
the rows that were accepted.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.nn.functional as F

from paceline.models.config import ModelConfig, RecurrentConfig
from paceline.models.transformer.blocks import Linear, Take

State = tuple[torch.Tensor, ...]  # of one layer, float32
Shapes = tuple[tuple[int, ...], ...]


class Recurrence(Protocol):
    """The mixer of a recurrent layer."""

    shapes: Shapes  # of the tensors of a state
    output: Linear  # from what the steps give to what the layer adds to the residual stream

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the steps read of the rows: [rows, width]."""
        ...

    def step(self, state: State, row: torch.Tensor) -> tuple[State, torch.Tensor]:
        """The state after a row [width] and what it gives to `output`, from the state before it."""
        ...


@dataclass(frozen=True)
class StateView:
    """The rows of one request in a pass, and the state that they begin with."""

    rows: slice
    parents: Sequence[int]  # [rows] local; -1: the state that they begin with
    slot: int | None  # of that state; None: no token is before them
    first_row: int = 0  # the local number of the first of these rows
    # layer -> local row -> state, kept for views of later rows; None: this view has all rows
    nodes: Mapping[int, dict[int, State]] | None = None

    def single_rows(self) -> Iterator[StateView]:
        """A view of each row, as the only row of its pass."""
        nodes: Mapping[int, dict[int, State]] = defaultdict(dict)
        for row, parent in enumerate(self.parents):
            yield StateView(slice(0, 1), [parent], self.slot, row, nodes)


@dataclass
class States:
    """States of all recurrent layers, addressed by slot, and what the last pass left for `advance`."""

    stored: list[State]  # [recurrent layers] tensors [slots, ...]
    # layer -> [rows, width], in as many parts as the pass had
    projected: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    views: dict[int, StateView] = field(default_factory=dict)  # by slot; rows are those of all parts
    num_rows: int = 0  # of the last pass

    def begin_pass(self) -> None:
        """Forget the last pass."""
        self.projected, self.views, self.num_rows = defaultdict(list), {}, 0

    def add_views(self, views: Mapping[int, StateView], num_rows: int) -> None:
        """The pass has these rows too: of all its requests, or of those that have one LoRA adapter."""
        for slot, view in views.items():
            rows = slice(self.num_rows + view.rows.start, self.num_rows + view.rows.stop)
            self.views[slot] = replace(view, rows=rows)
        self.num_rows += num_rows

    def copy(self, source: int, destination: int) -> None:
        """Give a slot the state of another one."""
        for layer in self.stored:
            for tensor in layer:
                tensor[destination] = tensor[source]


@dataclass(frozen=True)
class StateRows:
    """All rows of a pass, as recurrent layers read them."""

    views: Sequence[StateView]  # one per request
    states: States | None  # None: every request begins with its first token, and nothing is left

    def single_rows(self) -> Iterator[StateRows]:
        """Each row separately, in order."""
        for view in self.views:
            for single in view.single_rows():
                yield StateRows([single], self.states)


class RecurrentMixer:
    """A recurrence in a layer of the transformer."""

    def __init__(self, take: Take, name: str, config: ModelConfig, layer: int) -> None:
        assert config.recurrent is not None
        self.index = config.recurrent_layers.index(layer)  # of its states
        self.recurrence = RECURRENCES[config.recurrent.kind](take, name, config, config.recurrent)

    @property
    def bytes_per_state(self) -> int:
        return sum(4 * math.prod(shape) for shape in self.recurrence.shapes)

    def make_states(self, count: int, device: torch.device) -> State:
        """Zeroed storage for `count` states of this layer: tensors [count, ...]."""
        return tuple(torch.zeros((count, *shape), device=device) for shape in self.recurrence.shapes)

    def mix_rows(self, normed: torch.Tensor, rows: StateRows) -> torch.Tensor:
        """What the layer adds to the residual stream [rows, hidden]."""
        projected = self.recurrence.project(normed)
        if rows.states is not None:
            rows.states.projected[self.index].append(projected)
        mixed: list[torch.Tensor] = []
        for view in rows.views:
            states = {} if view.nodes is None else view.nodes[self.index]
            states.setdefault(-1, self._first(view, rows.states, projected))
            mixed += scan(self.recurrence, states, projected[view.rows], view)
        return self.recurrence.output(torch.stack(mixed).to(normed.dtype))

    def advance(self, states: States, slot: int, rows: Sequence[int], checkpoints: Mapping[int, int]) -> None:
        """Replace a slot's state by the state after these rows of its last pass, a path that starts at it.

        `checkpoints`: the number of rows after which the state is stored too, and the slot for it.
        """
        view, parts = states.views[slot], states.projected[self.index]
        projected = parts[0] if len(parts) == 1 else torch.cat(parts)  # one part is not copied
        state = self._first(view, states, projected)
        for count, row in enumerate(rows, start=1):
            state, _ = self.recurrence.step(state, projected[view.rows.start + row])
            if count in checkpoints:
                self._store(states, checkpoints[count], state)
        self._store(states, slot, state)

    def _first(self, view: StateView, states: States | None, like: torch.Tensor) -> State:
        """The state before the rows of a request; an empty one is where `like` is."""
        if states is None or view.slot is None:
            return tuple(torch.zeros(shape, device=like.device) for shape in self.recurrence.shapes)
        return tuple(tensor[view.slot] for tensor in states.stored[self.index])

    def _store(self, states: States, slot: int, state: State) -> None:
        for stored, tensor in zip(states.stored[self.index], state, strict=True):
            stored[slot] = tensor


def scan(
    recurrence: Recurrence, states: dict[int, State], rows: torch.Tensor, view: StateView
) -> list[torch.Tensor]:
    """What each row of a tree gives to `output`; `states` has the one that it begins with, at -1.

    Parents come before their children. A state is dropped after its last child, if no view of later rows
    needs it: a long chain holds one at a time.
    """
    children, mixed = Counter(view.parents), []
    for number, (row, parent) in enumerate(zip(rows, view.parents, strict=True), start=view.first_row):
        state, given = recurrence.step(states[parent], row)
        mixed.append(given)
        children[parent] -= 1
        if view.nodes is None and not children[parent]:
            del states[parent]
        if view.nodes is not None or children[number]:
            states[number] = state
    return mixed


class CausalConvolution:
    """Each channel's weighted sum of its last values. The state has the values before the row's own."""

    def __init__(self, take: Take, name: str, bias: bool = False) -> None:
        # [kernel, channels]: the oldest value first
        self.weight = take(f"{name}.weight").float().squeeze(1).T.contiguous()
        self.bias = take(f"{name}.bias").float() if bias else None
        self.shape = (len(self.weight) - 1, self.weight.shape[1])

    def step(self, before: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The last values after a row [channels], and its sums [channels]."""
        seen = torch.cat((before, row[None]))
        mixed = (seen * self.weight).sum(0)
        return seen[1:], mixed if self.bias is None else mixed + self.bias


class ShortConvolution:
    """LFM2's short convolution, gated before and after. Implements Recurrence."""

    def __init__(self, take: Take, name: str, config: ModelConfig, recurrent: RecurrentConfig) -> None:
        size, bias = config.hidden_size, recurrent.conv_bias
        self.input = Linear(take, f"{name}.conv.in_proj", 3 * size, bias)
        self.convolution = CausalConvolution(take, f"{name}.conv.conv", bias)
        self.output = Linear(take, f"{name}.conv.o_proj", size, bias)
        self.shapes: Shapes = (self.convolution.shape,)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.input(hidden)

    def step(self, state: State, row: torch.Tensor) -> tuple[State, torch.Tensor]:
        gate, output_gate, values = row.float().chunk(3)
        seen, mixed = self.convolution.step(state[0], gate * values)
        return (seen,), output_gate * mixed


class GatedDeltaNet:
    """A matrix per head that is read by keys, decays, and is corrected at each token: the gated delta rule.

    Yang et al., arXiv 2412.06464. Implements Recurrence.
    """

    def __init__(self, take: Take, name: str, config: ModelConfig, recurrent: RecurrentConfig) -> None:
        self.recurrent, self.eps = recurrent, config.rms_norm_eps
        name = f"{name}.linear_attn"
        heads, value_size = recurrent.value_heads, recurrent.value_heads * recurrent.value_dim
        self.widths = {"qkv": recurrent.conv_size, "z": value_size, "a": heads, "b": heads}
        self.input_qkv, self.input_z, self.input_a, self.input_b = (
            Linear(take, f"{name}.in_proj_{part}", size) for part, size in self.widths.items()
        )
        self.convolution = CausalConvolution(take, f"{name}.conv1d")
        self.rates = take(f"{name}.A_log").float().exp()  # [value heads]
        self.rate_bias = take(f"{name}.dt_bias").float()  # [value heads]
        self.norm = take(f"{name}.norm.weight").float()  # [value dim]
        self.output = Linear(take, f"{name}.out_proj", config.hidden_size)
        self.shapes: Shapes = (self.convolution.shape, (heads, recurrent.key_dim, recurrent.value_dim))

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        inputs = self.input_qkv, self.input_z, self.input_a, self.input_b
        return torch.cat([linear(hidden) for linear in inputs], dim=-1)

    def step(self, state: State, row: torch.Tensor) -> tuple[State, torch.Tensor]:
        values, gate, rate, strength = torch.split(row.float(), [*self.widths.values()])
        seen, mixed = self.convolution.step(state[0], values)
        query, key, value = self._heads(F.silu(mixed))
        decay = torch.exp(-self.rates * F.softplus(rate + self.rate_bias))
        memory = state[1] * decay[:, None, None]  # [value heads, key dim, value dim]
        error = (value - (memory * key[:, :, None]).sum(1)) * torch.sigmoid(strength)[:, None]
        memory = memory + key[:, :, None] * error[:, None, :]
        read = (memory * query[:, :, None]).sum(1)  # [value heads, value dim]
        normed = self.norm * (read * torch.rsqrt(read.square().mean(-1, keepdim=True) + self.eps))
        return (seen, memory), normed.flatten() * F.silu(gate)

    def _heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys of length 1 [value heads, key dim], and values [value heads, value dim]."""
        sizes, key_size = self.recurrent, self.recurrent.key_heads * self.recurrent.key_dim
        query, key, value = torch.split(mixed, [key_size, key_size, len(mixed) - 2 * key_size])
        shared_by = sizes.value_heads // sizes.key_heads
        query, key = (unit_length(part.view(sizes.key_heads, -1)) for part in (query, key))
        if sizes.tiled_values:
            query, key = query.repeat(shared_by, 1), key.repeat(shared_by, 1)
        else:
            query, key = (part.repeat_interleave(shared_by, dim=0) for part in (query, key))
        return query / sizes.key_dim**0.5, key, value.view(sizes.value_heads, -1)


class Mamba2:
    """A matrix per head that decays and takes up the token's input: a selective state space.

    Dao and Gu, arXiv 2405.21060. Implements Recurrence.
    """

    def __init__(self, take: Take, name: str, config: ModelConfig, recurrent: RecurrentConfig) -> None:
        self.recurrent, self.eps = recurrent, config.rms_norm_eps
        name, heads = f"{name}.mamba", recurrent.value_heads
        self.widths = [heads * recurrent.value_dim, recurrent.conv_size, heads]  # gate, convolution, steps
        self.input = Linear(take, f"{name}.in_proj", sum(self.widths))
        self.convolution = CausalConvolution(take, f"{name}.conv1d", recurrent.conv_bias)
        self.rates = take(f"{name}.A_log").float().exp()  # [value heads]
        self.step_bias = take(f"{name}.dt_bias").float()  # [value heads]
        self.passed = take(f"{name}.D").float()[:, None]  # the share of its input that a head passes on
        # [value heads * value dim]
        self.norm = take(f"{name}.norm.weight").float() if recurrent.norm_groups else None
        self.output = Linear(take, f"{name}.out_proj", config.hidden_size)
        self.shapes: Shapes = (self.convolution.shape, (heads, recurrent.value_dim, recurrent.key_dim))

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.input(hidden)

    def step(self, state: State, row: torch.Tensor) -> tuple[State, torch.Tensor]:
        gate, values, steps = torch.split(row.float(), self.widths)
        seen, mixed = self.convolution.step(state[0], values)
        value, key, query = self._heads(F.silu(mixed))
        steps = F.softplus(steps + self.step_bias)  # [value heads]
        decay = torch.exp(-self.rates * steps)
        added = (value * steps[:, None])[:, :, None] * key[:, None, :]
        memory = state[1] * decay[:, None, None] + added  # [value heads, value dim, key dim]
        read = (memory * query[:, None, :]).sum(-1) + self.passed * value
        if self.recurrent.gated_norm:
            return (seen, memory), self._normed(read.flatten() * F.silu(gate))
        return (seen, memory), self._normed(read.flatten()) * F.silu(gate)

    def _normed(self, values: torch.Tensor) -> torch.Tensor:
        if self.norm is None:
            return values
        grouped = values.view(self.recurrent.norm_groups, -1)
        normed = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps)
        return self.norm * normed.flatten()

    def _heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Values [value heads, value dim], keys and queries [value heads, key dim]; Mamba's x, B and C."""
        sizes, key_size = self.recurrent, self.recurrent.key_heads * self.recurrent.key_dim
        value, key, query = torch.split(mixed, [len(mixed) - 2 * key_size, key_size, key_size])
        shared_by = sizes.value_heads // sizes.key_heads
        key, query = (
            part.view(sizes.key_heads, -1).repeat_interleave(shared_by, dim=0) for part in (key, query)
        )
        return value.view(sizes.value_heads, -1), key, query


def unit_length(vectors: torch.Tensor) -> torch.Tensor:
    """Vectors [..., size] divided by their lengths."""
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + 1e-6)


RECURRENCES: dict[str, Callable[[Take, str, ModelConfig, RecurrentConfig], Recurrence]] = {
    "short_conv": ShortConvolution,
    "gated_delta": GatedDeltaNet,
    "mamba2": Mamba2,
}
