"""Medusa heads in torch, for training and for the torch backends. See medusa.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.arrays import Float32Array
from paceline.models.heads.medusa import MedusaCheckpoint, MedusaConfig


class Block(nn.Module):
    """The residual blocks of one head."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(config.num_layers))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + F.silu(layer(hidden))
        return hidden


class TorchMedusa(nn.Module):
    """All heads. Parameters have the names of medusa.py."""

    least_chance = 0.0  # rows are cheap on a GPU

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_heads))
        self.lm_heads = nn.ModuleList(
            nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            for _ in range(config.num_heads)
        )

    @classmethod
    def load(cls, head: MedusaCheckpoint, device: torch.device, dtype: torch.dtype) -> TorchMedusa:
        """The heads of a checkpoint, ready to run."""
        medusa = cls(head.config).requires_grad_(False)
        medusa.load_state_dict({name: torch.from_numpy(t.float32()) for name, t in head.tensors.items()})
        return medusa.to(device=device, dtype=dtype)

    def forward(self, states: Tensor) -> Tensor:
        """The logits of all heads [heads, ..., draft vocabulary] for normed last states [..., hidden]."""
        return self.scores(states.expand(len(self.blocks), *states.shape))

    def scores(self, states: Tensor) -> Tensor:
        """The logits of each head [heads, ..., draft vocabulary] for its own states [heads, ..., hidden]."""
        heads = zip(self.blocks, self.lm_heads, states, strict=True)
        return torch.stack([lm_head(block(head_states)) for block, lm_head, head_states in heads])

    @torch.inference_mode()
    def run(self, states: Float32Array) -> Float32Array:
        """As `forward`, from numpy to numpy."""
        weight = next(self.parameters())
        logits = self(torch.from_numpy(states).to(device=weight.device, dtype=weight.dtype))
        values: Float32Array = logits.float().cpu().numpy()
        return values
