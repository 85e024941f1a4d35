"""The networks of the heads in torch: the reference of the runners, and what is trained.

A network computes slots; what a slot attends to is up to the caller: `attend` gets the rotated query, the
rotated key and the value of every slot, and returns the mixed values. So the same code runs over pages, over
whole sequences, and with the masks of training. The leading axes of states, tokens and positions are free, as
long as they are equal: [rows] or [batch, length].

    features --fuse--> state --+-- forward(state, token, position) --> output --feed_back--> state
                                                                          +----logits

Parameters have the names of config.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.heads.config import HeadConfig
from paceline.models.transformer.attention import rotate
from paceline.models.transformer.rope import rope_frequencies

# From query [..., heads, head_dim], key and value [..., kv_heads, head_dim] to mixed values, shaped as query.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class TargetWeights(Protocol):
    """What a head uses of its target. The ranks of a target may share the work."""

    @property
    def norm(self) -> Tensor:
        """The weight [hidden] of the final norm."""
        ...

    @property
    def norm_eps(self) -> float: ...

    def embed(self, tokens: Tensor) -> Tensor:
        """The embeddings [..., hidden] of tokens [...]."""
        ...

    def scores(self, normed: Tensor) -> Tensor:
        """The target's logits [..., vocabulary] of normed states [..., hidden]."""
        ...


@dataclass(frozen=True)
class Shared:
    """Weights of the target that a head uses, all in one place; they are not trained with it."""

    embedding: Tensor  # [vocabulary, hidden]
    lm_head: Tensor  # [vocabulary, hidden]
    norm: Tensor  # [hidden] the final norm
    norm_eps: float

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding)

    def scores(self, normed: Tensor) -> Tensor:
        return F.linear(normed, self.lm_head)


class Norm(nn.Module):
    """Scale the last axis to a root mean square of one, then by a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return normed(hidden, self.weight, self.eps)


def normed(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis; the mean is float32, the result has the input's dtype."""
    wide = hidden.float()
    scaled = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(hidden.dtype)
    return (weight * scaled).to(hidden.dtype)


class FeatureNorms(nn.ModuleList):
    """A norm for each of the concatenated hidden states of a feature."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(
            Norm(config.target_hidden_size, config.rms_norm_eps) for _ in range(config.num_features)
        )

    def forward(self, features: Tensor) -> Tensor:
        parts = features.chunk(len(self), dim=-1)
        return torch.cat([norm(part) for norm, part in zip(self, parts, strict=True)], dim=-1)


class Rotary(nn.Module):
    """Rotate queries or keys [..., heads, head_dim] by their positions [...]."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.factor = config.rope.attention_factor
        frequencies = torch.from_numpy(rope_frequencies(config.rope, config.head_dim))
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.frequencies: Tensor  # float32 [head_dim // 2]

    def forward(self, values: Tensor, positions: Tensor) -> Tensor:
        # Angles stay float32 in every dtype: bfloat16 cannot count positions above 256.
        angles = (positions.float()[..., None] * self.frequencies.float())[..., None, :]
        rotation = (
            (angles.cos() * self.factor).to(values.dtype),
            (angles.sin() * self.factor).to(values.dtype),
        )
        return rotate(values, rotation)


class Attention(nn.Module):
    def __init__(self, config: HeadConfig, input_size: int) -> None:
        super().__init__()
        self.head_dim, self.rotary = config.head_dim, Rotary(config)
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, query_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(input_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(input_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = Norm(config.head_dim, config.rms_norm_eps)
            self.k_norm = Norm(config.head_dim, config.rms_norm_eps)

    def forward(self, inputs: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        query = self._split(self.q_proj(inputs))
        query = self.rotary(self.q_norm(query) if self.qk_norm else query, positions)
        mixed = attend(query, *self.keys_values(inputs, positions))
        output: Tensor = self.o_proj(mixed.flatten(-2))
        return output

    def keys_values(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The rotated keys, and the values, of inputs [..., input size] at positions [...]."""
        key = self._split(self.k_proj(inputs))
        key = self.rotary(self.k_norm(key) if self.qk_norm else key, positions)
        return key, self._split(self.v_proj(inputs))

    def _split(self, projected: Tensor) -> Tensor:
        """[..., heads * head_dim] as [..., heads, head_dim]."""
        return projected.view(*projected.shape[:-1], -1, self.head_dim)


class MLP(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class Layer(nn.Module):
    """A decoder layer of a head. Norms of its input are applied by the head."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        eagle3 = config.kind == "eagle3"
        if config.kind != "eagle":
            self.input_layernorm = Norm(hidden, eps)
        if eagle3:
            self.hidden_norm = Norm(hidden, eps)
        self.self_attn = Attention(config, 2 * hidden if eagle3 else hidden)
        self.post_attention_layernorm = Norm(hidden, eps)
        self.mlp = MLP(config)

    def forward(self, residual: Tensor, inputs: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        hidden = residual + self.self_attn(inputs, positions, attend)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


def own_lm_head(config: HeadConfig) -> nn.Linear | None:
    """An LM head for the draft vocabulary; None: the head uses the target's."""
    return nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) if config.own_lm_head else None


def own_embedding(config: HeadConfig) -> nn.Embedding | None:
    """An embedding; None: the head uses the target's."""
    return nn.Embedding(config.vocab_size, config.hidden_size) if config.own_embedding else None


class BesideTarget(nn.Module):
    """A network with an embedding and an LM head, its own or the target's.

    Subclasses make the two after their layers, so that a seed gives the same weights with and without them.
    """

    lm_head: nn.Linear | None
    embed_tokens: nn.Embedding | None

    def __init__(self, config: HeadConfig, shared: TargetWeights) -> None:
        super().__init__()
        self.config = config
        self.shared = shared  # not parameters of this module: neither trained nor saved

    def compile_small_steps(self) -> None:
        """Compile norms, rotations and MLPs: many small kernels on a GPU. The caller has the attention."""
        for module in self.modules():
            if isinstance(module, (Norm, Rotary, MLP)):
                module.compile(dynamic=True)

    def logits(self, outputs: Tensor) -> Tensor:
        """Scores over the draft vocabulary [..., draft vocabulary]."""
        if self.lm_head is None:
            return self.shared.scores(outputs)
        return F.linear(outputs, self.lm_head.weight)

    def embed(self, tokens: Tensor) -> Tensor:
        if self.embed_tokens is None:
            return self.shared.embed(tokens)
        return F.embedding(tokens, self.embed_tokens.weight)


class Head(BesideTarget, ABC):
    """The base of all heads that guess one token in each pass. `make_head` makes the right one."""

    def __init__(self, config: HeadConfig, shared: TargetWeights) -> None:
        super().__init__(config, shared)
        self.midlayer = Layer(config)
        self.lm_head, self.embed_tokens = own_lm_head(config), own_embedding(config)

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """The state [..., H] of slots that read the target's features [..., features * Ht]."""

    @abstractmethod
    def forward(self, states: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The output [..., H] of slots with these states [..., H], tokens [...] and positions [...]."""

    def feed_back(self, outputs: Tensor) -> Tensor:
        """The state that the slot after a guess reads."""
        return outputs


class NormedHead(Head):
    """A head with a norm of its outputs before the lm_head."""

    def __init__(self, config: HeadConfig, shared: TargetWeights) -> None:
        super().__init__(config, shared)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)

    def feed_back(self, outputs: Tensor) -> Tensor:
        state: Tensor = self.norm(outputs) if self.config.norm_output else outputs
        return state

    def logits(self, outputs: Tensor) -> Tensor:
        return super().logits(self.norm(outputs))


class Eagle3Head(NormedHead):
    """EAGLE-3: features of several layers, norms on both inputs, an output norm and a draft vocabulary."""

    def __init__(self, config: HeadConfig, shared: TargetWeights) -> None:
        super().__init__(config, shared)
        eps = config.rms_norm_eps
        self.fc = nn.Linear(config.feature_width, config.hidden_size, bias=config.fc_bias)
        if config.fc_norm:
            self.fc_norm = FeatureNorms(config)
        if config.norm_before_fc:
            self.input_norm = Norm(config.feature_width, eps)
        llama = replace(config, kind="mtp")  # layers without the second input of the first
        self.layers = nn.ModuleDict({str(layer): Layer(llama) for layer in range(1, config.num_layers)})
        if config.mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, config.feature_width))

    def fuse(self, features: Tensor) -> Tensor:
        if self.config.fc_norm:
            features = self.fc_norm(features)
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        state: Tensor = self.fc(features)
        return state

    def forward(
        self, states: Tensor, tokens: Tensor, positions: Tensor, attend: Attend, *further: Attend
    ) -> Tensor:
        """As of any head. `further` are the attentions of the layers after the first."""
        normed_states = self.midlayer.hidden_norm(states)
        inputs = torch.cat((self.midlayer.input_layernorm(self.embed(tokens)), normed_states), dim=-1)
        residual = normed_states if self.config.norm_before_residual else states
        output: Tensor = self.midlayer(residual, inputs, positions, attend)
        for layer, attend_there in zip(self.layers.values(), further, strict=True):
            assert isinstance(layer, Layer)
            output = layer(output, layer.input_layernorm(output), positions, attend_there)
        return output


class EagleHead(Head):
    """EAGLE-1 and 2: predicts the target's last hidden state, so the target's lm_head gives the logits."""

    def __init__(self, config: HeadConfig, shared: TargetWeights) -> None:
        super().__init__(config, shared)
        inputs = config.hidden_size + config.target_hidden_size
        self.fc = nn.Linear(inputs, config.hidden_size, bias=config.fc_bias)

    def fuse(self, features: Tensor) -> Tensor:
        return normed(features, self.shared.norm, self.shared.norm_eps)

    def forward(self, states: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        inputs = self.fc(torch.cat((self.embed(tokens), states), dim=-1))
        output: Tensor = self.midlayer(inputs, inputs, positions, attend)
        return output


class MtpHead(NormedHead):
    """The MTP block of some targets: norms on both inputs, then a whole layer."""

    def __init__(self, config: HeadConfig, shared: TargetWeights) -> None:
        super().__init__(config, shared)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.embedding_norm = Norm(hidden, eps)
        self.state_norm = Norm(hidden, eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=config.fc_bias)

    def fuse(self, features: Tensor) -> Tensor:
        shared = self.shared
        return normed(features, shared.norm, shared.norm_eps) if self.config.norm_features else features

    def forward(self, states: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        both = self.embedding_norm(self.embed(tokens)), self.state_norm(states)
        residual = self.fc(torch.cat(both, dim=-1))
        output: Tensor = self.midlayer(residual, self.midlayer.input_layernorm(residual), positions, attend)
        return output


_KINDS: dict[str, type[Head]] = {"eagle3": Eagle3Head, "eagle": EagleHead, "mtp": MtpHead}


def make_head(config: HeadConfig, shared: TargetWeights) -> Head:
    """The network of a head with newly initialized parameters; `shared` are weights of its target."""
    return _KINDS[config.kind](config, shared)
