"""MTP blocks whose layer is one of their target's family: latent or gated attention, experts."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.models.heads.config import HeadConfig
from paceline.models.heads.torch_head import TargetWeights, normed
from paceline.models.transformer.attention import Rotation
from paceline.models.transformer.blocks import Linear, RMSNorm, Take
from paceline.models.transformer.layer import Layer, rotation_of
from paceline.models.transformer.rope import rope_frequencies
from paceline.models.transformer.rows import KeyValues, Rows

OWN_LAYER, HEAD_LAYER = "model.layers.0.", "midlayer."  # names of the layer's tensors: a model's, a head's


class LayerHead:
    """The block over the pages of a target; the methods of torch_head.Head, with rows instead of `attend`."""

    def __init__(self, config: HeadConfig, take: Take, shared: TargetWeights) -> None:
        assert config.layer is not None
        self.config, self.layer_config, self.shared = config, config.layer, shared
        eps = config.rms_norm_eps
        self.embedding_norm, self.state_norm = (
            RMSNorm(take, f"{name}_norm", eps) for name in ("embedding", "state")
        )
        self.fc = Linear(take, "fc", config.hidden_size)
        self.layer = Layer(lambda name: take(name.replace(OWN_LAYER, HEAD_LAYER)), config.layer, 0)
        self.norm = RMSNorm(take, "norm", eps)
        self.dtype, self.device = self.norm.weight.dtype, self.norm.weight.device
        rope = config.layer.rope
        self.frequencies = torch.from_numpy(rope_frequencies(rope, config.layer.head_dim)).to(self.device)

    def fuse(self, features: Tensor) -> Tensor:
        """The state [rows, hidden] of slots that read the target's features [rows, hidden]."""
        shared = self.shared
        return normed(features, shared.norm, shared.norm_eps) if self.config.norm_features else features

    def outputs(self, states: Tensor, rows: Rows, cache: KeyValues) -> Tensor:
        """The output [rows, hidden] of slots with these states, whose keys and values are stored."""
        embedded = self.shared.embed(rows.tokens)
        hidden = self.fc(torch.cat((self.embedding_norm(embedded), self.state_norm(states)), dim=-1))
        return self.layer(hidden, rows, self._rotation(rows.positions), cache)

    def feed_back(self, outputs: Tensor) -> Tensor:
        """The state that the slot after a guess reads."""
        return self.norm(outputs) if self.config.norm_output else outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """Scores over the vocabulary [rows, vocab]."""
        return self.shared.scores(self.norm(outputs))

    def _rotation(self, positions: Tensor) -> Rotation:
        return rotation_of(self.layer_config.rope, self.frequencies, positions, self.dtype)
