"""The blocks of the transformer that hold weights: products, norms, feed-forward, vocabulary.

A matrix is one tensor, or as many as the model has pieces: see tensor_parallel.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from paceline.models.config import UNGATED, ModelConfig, PerLayerInput
from paceline.models.transformer.tensor_parallel import WHOLE, TensorParallel

# The named tensor of the checkpoint, in the model's dtype and on its device. A second argument, a slice, asks
# for these rows of it only; a model in one piece does not ask for rows.
Take = Callable[..., torch.Tensor]


class Weight(Protocol):
    """A matrix: a tensor, or one that is decoded when it is used (quantized/rounded.py)."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def to_dense(self) -> torch.Tensor:
        """Its values: of a tensor, the tensor itself."""
        ...


class FeedForward(Protocol):
    """What follows attention in a layer: one MLP or a mixture of them."""

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor: ...


class Linear:
    """A matrix [size, in], with or without a bias [size]; this rank has some pieces of its rows."""

    def __init__(
        self,
        take: Take,
        name: str,
        size: int,
        bias: bool = False,
        parallel: TensorParallel = WHOLE,
    ) -> None:
        self.size, self.parallel = size, parallel
        self.weights: Sequence[Weight] = take_pieces(take, f"{name}.weight", size, parallel)
        self.biases = take_pieces(take, f"{name}.bias", size, parallel) if bias else None

    @property
    def weight(self) -> torch.Tensor:
        """The whole matrix of a model in one piece."""
        (weight,) = self.weights
        return weight.to_dense()

    @property
    def bias(self) -> torch.Tensor | None:
        """The whole bias of a model in one piece."""
        return None if self.biases is None else self.biases[0]

    def parts(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """The columns of each piece that this rank has: [rows, piece] each."""
        if self.biases is None:
            return [F.linear(hidden, weight.to_dense()) for weight in self.weights]
        parts = zip(self.weights, self.biases, strict=True)
        return [F.linear(hidden, weight.to_dense(), bias) for weight, bias in parts]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.parallel.join(self.parts(hidden), self.size)


class RMSNorm:
    """Scale the last axis to a root mean square of one, then by a learned weight."""

    def __init__(self, take: Take, name: str, eps: float) -> None:
        self.weight = take(f"{name}.weight")
        self.eps = eps

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * unit_mean_square(hidden, self.eps)


class LayerNorm(RMSNorm):
    """RMSNorm of the distance from the mean: a LayerNorm without a bias."""

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        return super().__call__((wide - wide.mean(-1, keepdim=True)).to(hidden.dtype))


def unit_mean_square(hidden: torch.Tensor, eps: float) -> torch.Tensor:
    """Values scaled to a root mean square of one over the last axis."""
    wide = hidden.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(hidden.dtype)


def no_norm(hidden: torch.Tensor) -> torch.Tensor:
    """In place of a norm that a family does not have."""
    return hidden


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def geglu_tanh(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """With GELU by its tanh approximation."""
    return F.gelu(gate, approximate="tanh") * up


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gpt-oss's SwiGLU: both sides are clamped to 7."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(gate * 1.702) * (up + 1)


def squared_relu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """For MLPs without a gate."""
    return F.relu(up).square()


NORMS = {"rms": RMSNorm, "layer": LayerNorm}
ACTIVATIONS = {"silu": swiglu, "gelu_tanh": geglu_tanh, "clamped_silu": clamped_swiglu}
ACTIVATIONS |= {"relu2": squared_relu}


class MLP:
    """The feed-forward block: down(activation(gate(x), up(x))); without a gate, `up` takes its place."""

    def __init__(
        self,
        take: Take,
        name: str,
        hidden: int,
        intermediate: int,
        activation: str = "silu",
        biases: bool = False,
        parallel: TensorParallel = WHOLE,
    ) -> None:
        self.activation = ACTIVATIONS[activation]
        self.up = Linear(take, f"{name}.up_proj", intermediate, biases, parallel)
        self.gate = self.up
        if activation not in UNGATED:
            self.gate = Linear(take, f"{name}.gate_proj", intermediate, biases, parallel)
        self.down = Linear(take, f"{name}.down_proj", hidden, biases, parallel)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        ups = self.up.parts(hidden)
        gates = ups if self.gate is self.up else self.gate.parts(hidden)
        activated = [self.activation(gate, up) for gate, up in zip(gates, ups, strict=True)]
        return self.down(self.gate.parallel.join(activated, self.gate.size))


class PerLayerInputs:
    """The second embedding of Gemma's E sizes, and what each layer is given of it."""

    def __init__(self, take: Take, config: ModelConfig, inputs: PerLayerInput) -> None:
        self.size, self.scale = inputs.size, config.hidden_size**-0.5
        self.table = take("model.embed_tokens_per_layer.weight")  # [vocab, layers * size]
        self.projection = Linear(take, "model.per_layer_model_projection", self.table.shape[1])
        self.norm = RMSNorm(take, "model.per_layer_projection_norm", config.rms_norm_eps)

    def __call__(self, tokens: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """The inputs [layers, rows, size] of every layer, from tokens and their embeddings [rows, hidden]."""
        shape = (len(tokens), -1, self.size)
        # the factor is rounded first, as models were trained with it
        own = self.table[tokens] * torch.tensor(self.size**0.5, dtype=embedded.dtype)
        projected = self.norm((self.projection(embedded) * self.scale).view(shape))
        return ((projected + own.view(shape)) * 2**-0.5).transpose(0, 1)


class PerLayerGate:
    """What a layer adds to the residual stream, from its input of PerLayerInputs."""

    def __init__(self, take: Take, name: str, config: ModelConfig, inputs: PerLayerInput) -> None:
        self.gate = Linear(take, f"{name}.per_layer_input_gate", inputs.size)
        self.projection = Linear(take, f"{name}.per_layer_projection", config.hidden_size)
        self.norm = RMSNorm(take, f"{name}.post_per_layer_input_norm", config.rms_norm_eps)
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, hidden: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return self.norm(self.projection(self.activation(self.gate(hidden), given)))


class Vocabulary:
    """The embedding or the output matrix [vocab, hidden]; this rank has some pieces of its rows."""

    def __init__(self, take: Take, name: str, size: int, parallel: TensorParallel = WHOLE) -> None:
        self.size, self.parallel = size, parallel
        self.tables = take_pieces(take, name, size, parallel)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows [tokens, hidden] of these tokens."""
        if self.parallel.pieces == 1:
            return self.tables[0][tokens]
        hidden = self.tables[0].new_zeros(len(tokens), self.tables[0].shape[1])
        for table, rows in zip(self.tables, self.parallel.rows(self.size), strict=True):
            inside = torch.where((tokens >= rows.start) & (tokens < rows.stop))[0]
            hidden[inside] = table[tokens[inside] - rows.start]
        if self.parallel.ranks.size == 1:
            return hidden
        # selected, not added: -0.0 + 0.0 would be another bit pattern
        ends = torch.tensor(self.parallel.rank_bounds(self.size)[1:], device=tokens.device)
        owner = torch.bucketize(tokens, ends, right=True)
        return torch.stack(self.parallel.ranks.gather(hidden))[owner, torch.arange(len(tokens))]

    def parts(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """The logits of each piece of the vocabulary that this rank has: [rows, piece] each."""
        return [F.linear(hidden, table) for table in self.tables]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores over the vocabulary [rows, vocab]."""
        return self.parallel.join(self.parts(hidden), self.size)


def take_pieces(take: Take, name: str, size: int, parallel: TensorParallel) -> list[torch.Tensor]:
    """The pieces of a tensor of `size` rows that this rank has, each a tensor of its own."""
    if parallel.pieces == 1:
        return [take(name)]
    return [take(name, rows) for rows in parallel.rows(size)]
