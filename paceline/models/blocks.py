"""The blocks of the transformer that hold weights: products, norms, feed-forward, vocabulary.

A matrix is one tensor, or as many as the model has pieces: see tensor_parallel.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

from paceline.models.config import UNGATED, ModelConfig, MoeConfig, PerLayerInput
from paceline.models.tensor_parallel import WHOLE, TensorParallel

# The named tensor of the checkpoint, in the model's dtype and on its device. A second argument, a slice, asks
# for these rows of it only; a model in one piece does not ask for rows.
Take = Callable[..., torch.Tensor]


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
        self.weights = take_pieces(take, f"{name}.weight", size, parallel)
        self.biases = take_pieces(take, f"{name}.bias", size, parallel) if bias else None

    @property
    def weight(self) -> torch.Tensor:
        """The whole matrix of a model in one piece."""
        (weight,) = self.weights
        return weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The whole bias of a model in one piece."""
        return None if self.biases is None else self.biases[0]

    def parts(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """The columns of each piece that this rank has: [rows, piece] each."""
        if self.biases is None:
            return [F.linear(hidden, weight) for weight in self.weights]
        return [F.linear(hidden, *part) for part in zip(self.weights, self.biases, strict=True)]

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
    """The same of the distance from the mean, without a bias."""

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
    """That of gpt-oss: both sides are kept within 7."""
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


class MixtureOfExperts:
    """Each row goes through its best experts, weighted by the router, and the shared one if there is any."""

    def __init__(
        self,
        take: Take,
        name: str,
        hidden: int,
        moe: MoeConfig,
        activation: str,
        parallel: TensorParallel = WHOLE,
    ) -> None:
        self.moe = moe
        # every rank has the router: all must choose the same experts, and it is small
        self.router = Linear(take, f"{name}.gate", moe.num_experts, moe.biases)
        self.correction = take(f"{name}.gate.e_score_correction_bias") if moe.correction_bias else None

        def mlp(part: str, intermediate: int, biases: bool) -> MLP:
            return MLP(take, f"{name}.{part}", hidden, intermediate, activation, biases, parallel)

        self.experts = [
            mlp(f"experts.{expert}", moe.intermediate_size, moe.biases) for expert in range(moe.num_experts)
        ]
        shared = moe.shared_intermediate_size
        self.shared = mlp("shared_experts", shared, False) if shared else None
        self.shared_gate = Linear(take, f"{name}.shared_expert_gate", 1) if moe.shared_gate else None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        output = self._mixed(hidden, *self._route(hidden))
        return output if self.shared is None else output + self._shared(self.shared, hidden)

    def _mixed(self, hidden: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The sum of what the chosen experts give, by their weights."""
        output = torch.zeros_like(hidden)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, rank = torch.where(chosen == expert)
            share = weights[rows, rank, None].to(hidden.dtype)
            if self.moe.scaled_inputs:
                output[rows] += self.experts[expert](share * hidden[rows])
            else:
                output[rows] += share * self.experts[expert](hidden[rows])
        return output

    def _shared(self, shared: MLP, hidden: torch.Tensor) -> torch.Tensor:
        """What every row gets, whatever its experts."""
        output = shared(hidden)
        return output if self.shared_gate is None else output * torch.sigmoid(self.shared_gate(hidden))

    def _route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights and numbers of the chosen experts: [rows, experts_per_token] each."""
        moe, logits = self.moe, self.router(hidden).float()  # [rows, experts]
        scores = logits.softmax(-1) if moe.scoring == "softmax" else logits.sigmoid()
        if self.correction is not None or moe.groups > 1:
            preferences = self._preferences(scores)
        else:  # large logits have the same sigmoid
            preferences = scores if moe.scoring == "softmax" else logits
        chosen = preferences.topk(moe.experts_per_token).indices
        weights = scores.gather(1, chosen)
        if moe.normalize_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * moe.weight_scale, chosen

    def _preferences(self, scores: torch.Tensor) -> torch.Tensor:
        """What experts are chosen by [rows, experts]: corrected scores, of the best groups only.

        A group is as good as its best experts together.
        """
        moe = self.moe
        corrected = scores if self.correction is None else scores + self.correction.float()
        grouped = corrected.view(len(scores), moe.groups, -1)
        best = (
            grouped.topk(moe.group_experts).values.sum(-1).topk(moe.chosen_groups).indices
        )  # [rows, chosen groups]
        is_chosen = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter(
            1, best, True
        )
        return grouped.masked_fill(~is_chosen[:, :, None], float("-inf")).view(scores.shape)


class NormedExperts(MixtureOfExperts):
    """Experts beside a shared MLP, all of which read the residual stream through norms of their own."""

    def __init__(
        self, take: Take, layer: str, config: ModelConfig, moe: MoeConfig, parallel: TensorParallel = WHOLE
    ) -> None:
        name, self.eps = f"{layer}.mlp", config.rms_norm_eps
        super().__init__(take, name, config.hidden_size, moe, config.activation, parallel)
        self.shared_norm = RMSNorm(take, f"{layer}.post_attention_layernorm", self.eps)
        self.shared_output_norm = RMSNorm(take, f"{name}.shared_output_norm", self.eps)
        self.experts_norm = RMSNorm(take, f"{name}.experts_norm", self.eps)
        self.experts_output_norm = RMSNorm(take, f"{name}.experts_output_norm", self.eps)
        self.router_scale = take(f"{name}.gate.scale") * config.hidden_size**-0.5
        self.expert_scales = take(f"{name}.gate.per_expert_scale")

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.shared is not None
        weights, chosen = self._route(unit_mean_square(hidden, self.eps) * self.router_scale)
        mixed = self._mixed(self.experts_norm(hidden), weights * self.expert_scales[chosen], chosen)
        shared = self.shared(self.shared_norm(hidden))
        return self.shared_output_norm(shared) + self.experts_output_norm(mixed)


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
