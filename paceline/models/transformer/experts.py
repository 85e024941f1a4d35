"""Mixtures of experts: rows go through those MLPs that a router chooses."""

from __future__ import annotations

import torch

from paceline.models.config import ModelConfig, MoeConfig
from paceline.models.transformer.blocks import MLP, Linear, RMSNorm, Take, unit_mean_square
from paceline.models.transformer.tensor_parallel import WHOLE, TensorParallel


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

        def mlp(part: str, size: int, intermediate: int, biases: bool) -> MLP:
            return MLP(take, f"{name}.{part}", size, intermediate, activation, biases, parallel)

        latent = moe.latent_size
        self.to_latent = Linear(take, f"{name}.fc1_latent_proj", latent) if latent else None
        self.from_latent = Linear(take, f"{name}.fc2_latent_proj", hidden) if latent else None
        self.experts = [
            mlp(f"experts.{expert}", latent or hidden, moe.intermediate_size, moe.biases)
            for expert in range(moe.num_experts)
        ]
        shared = moe.shared_intermediate_size
        self.shared = mlp("shared_experts", hidden, shared, False) if shared else None
        self.shared_gate = Linear(take, f"{name}.shared_expert_gate", 1) if moe.shared_gate else None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        read = hidden if self.to_latent is None else self.to_latent(hidden)
        output = self._mixed(read, *self._route(hidden))
        if self.from_latent is not None:
            output = self.from_latent(output)
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
    """Experts beside a shared MLP; each of the two reads the residual stream through its own norm."""

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
