"""HeadConfig: the sizes and flags of a learned head, and the tensors that follow from them.

    slot i      reads the feature h_i of token x_i and the token x_{i+1}; guesses x_{i+2}
    feature     hidden states of the target, concatenated; a slot after a guess reads the head's own state

Tensors have these names, whatever file they came from (H, Ht: hidden sizes of head and target):

    fc.weight                                   [H, features * Ht]      eagle, mtp: [H, H + Ht]; maybe fc.bias
    fc_norm.{i}.weight                          [Ht]                    with fc_norm
    input_norm.weight                           [features * Ht]         with norm_before_fc
    {embedding,state}_norm.weight               [H]                     mtp
    midlayer.self_attn.{q,k,v}_proj.weight      [heads * head_dim, 2H]  eagle, mtp: [heads * head_dim, H]
    midlayer.self_attn.{q,k,v}_proj.bias        [heads * head_dim]      with qkv_bias
    midlayer.self_attn.o_proj.weight            [H, heads * head_dim]
    midlayer.mlp.{gate,up}_proj.weight          [intermediate, H]
    midlayer.mlp.down_proj.weight               [H, intermediate]
    midlayer.{input_layernorm,hidden_norm}.weight [H]                   eagle: neither; mtp: the first
    midlayer.post_attention_layernorm.weight    [H]
    norm.weight                                 [H]                     eagle: none
    lm_head.weight                              [draft vocabulary, H]   absent: the target's
    embed_tokens.weight                         [vocabulary, H]         absent: the target's
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.models.config import RopeConfig


@dataclass(frozen=True)
class TargetName:
    """The model that a head was trained for."""

    fingerprint: str  # of its weights, see fingerprint.py
    name: str = ""  # for messages


@dataclass(frozen=True)
class HeadConfig:
    """Everything that a runner or the training must know about a head."""

    kind: str  # eagle3 | eagle | mtp
    vocab_size: int  # the target's: ids that it reads
    draft_vocab_size: int  # ids that it guesses
    hidden_size: int
    target_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    feature_layers: tuple[int, ...] | None = None  # as in Hugging Face; None: usual_feature_layers
    fc_bias: bool = False
    fc_norm: bool = False  # a norm for each feature; not with norm_before_fc
    norm_before_fc: bool = False  # one norm for the concatenated features
    norm_output: bool = False  # the state that is fed back is the normed one
    norm_before_residual: bool = False  # the residual stream starts from the normed state
    norm_features: bool = False  # of an mtp head: it reads the target's last state after the final norm
    qkv_bias: bool = False
    own_embedding: bool = False  # False: the target's
    own_lm_head: bool = True  # False: the target's
    target: TargetName | None = None  # None: its file does not say

    @property
    def num_features(self) -> int:
        """The number of the target's hidden states that a slot reads."""
        if self.kind == "eagle":
            return 1
        return 3 if self.feature_layers is None else len(self.feature_layers)

    @property
    def feature_width(self) -> int:
        return self.num_features * self.target_hidden_size

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """The hidden states that it reads of a target with `num_layers` layers: 0 is the embedding."""
        if self.kind == "eagle":
            return (num_layers,)
        return self.feature_layers or usual_feature_layers(num_layers)


def usual_feature_layers(num_layers: int) -> tuple[int, ...]:
    """The three hidden states that an EAGLE-3 head reads by default: early, middle and late."""
    return (2, num_layers // 2, num_layers - 3)


def expected_tensors(config: HeadConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name and shape of every tensor of a head of this config, without those of the target."""
    hidden, target_hidden = config.hidden_size, config.target_hidden_size
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    eagle3 = config.kind == "eagle3"
    yield "fc.weight", (hidden, config.feature_width if eagle3 else hidden + target_hidden)
    if config.fc_bias:
        yield "fc.bias", (hidden,)
    if config.fc_norm:
        for feature in range(config.num_features):
            yield f"fc_norm.{feature}.weight", (target_hidden,)
    if config.norm_before_fc:
        yield "input_norm.weight", (config.feature_width,)
    if config.kind == "mtp":
        yield "embedding_norm.weight", (hidden,)
        yield "state_norm.weight", (hidden,)
    for projection, size in (("q", query_size), ("k", kv_size), ("v", kv_size)):
        yield f"midlayer.self_attn.{projection}_proj.weight", (size, 2 * hidden if eagle3 else hidden)
        if config.qkv_bias:
            yield f"midlayer.self_attn.{projection}_proj.bias", (size,)
    yield "midlayer.self_attn.o_proj.weight", (hidden, query_size)
    yield "midlayer.mlp.gate_proj.weight", (config.intermediate_size, hidden)
    yield "midlayer.mlp.up_proj.weight", (config.intermediate_size, hidden)
    yield "midlayer.mlp.down_proj.weight", (hidden, config.intermediate_size)
    if config.kind != "eagle":
        yield "midlayer.input_layernorm.weight", (hidden,)
    if eagle3:
        yield "midlayer.hidden_norm.weight", (hidden,)
    yield "midlayer.post_attention_layernorm.weight", (hidden,)
    if config.kind != "eagle":
        yield "norm.weight", (hidden,)
    if config.own_lm_head:
        yield "lm_head.weight", (config.draft_vocab_size, hidden)
    if config.own_embedding:
        yield "embed_tokens.weight", (config.vocab_size, hidden)
