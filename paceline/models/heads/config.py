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
    layers.{i}.*                                as those of a llama     eagle3 of several layers, from 1 on
    mask_hidden                                 [1, 1, features * Ht]   P-EAGLE
    norm.weight                                 [H]                     eagle: none
    lm_head.weight                              [draft vocabulary, H]   absent: the target's
    embed_tokens.weight                         [vocabulary, H]         absent: the target's

A parallel head (dflash, dspark) guesses a whole block in one pass; see torch_block.py:

    fc.weight, hidden_norm.weight, norm.weight  [H, features * Ht], [H], [H]
    fc_norm.{i}.weight                          [Ht]                    with fc_norm
    layers.{i}.*                                as midlayer.* of an mtp head
    layers.{i}.self_attn.{q,k}_norm.weight      [head_dim]              with qk_norm
    mask_embedding                              [H]                     absent: that of the mask token
    markov_head.markov_{w1,w2}.weight           [vocabulary, rank], [draft vocabulary, rank]
    confidence_head.proj.{weight,bias}          [1, H or H + rank], [1]
    layers.{i}.{attention,mlp}_conv.base_kernel [2, 2, H]               with convolutions (DFlash2)
    layers.{i}.{attention,mlp}_conv.kernel_projection.weight            [4H / group, H]
    candidate_selector.{predecessor,successor}_codebook [vocabulary, rank]  with a pair selector (DFlash2)
    candidate_selector.hidden_projection.weight [rank, H]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.files.layout import layer_tensors


@dataclass(frozen=True)
class TargetName:
    """The model that a head was trained for."""

    fingerprint: str  # of its weights, see fingerprint.py
    name: str = ""  # for messages


@dataclass(frozen=True)
class BlockAttention:
    """What a slot of a block sees in one layer, besides the context and itself."""

    window: int | None = None  # number of last positions, its own included; None: all
    causal: bool = False  # only the slots before it; False: the whole block


@dataclass(frozen=True)
class BlockConfig:
    """What a parallel head has beside the fields of every head.

    The block [anchor, MASK, ...] starts at the last known token, the anchor.
    """

    size: int  # slots of a block, the anchor included
    mask_token_id: int
    layers: tuple[BlockAttention, ...]  # one per layer
    sample_from_anchor: bool = False  # slot k guesses the token after position k; False: that at position k
    mask_embedding: bool = False  # the head has an embedding of its own for MASK
    markov_rank: int = 0  # logits depend on the token before, by a product of this rank; 0: they do not
    confidence: bool = False  # it estimates the chance that a guess is accepted
    confidence_with_markov: bool = False  # from the token before, too
    convolution_group: int = 0  # channels that share a correction of two-tap convolutions; 0: there are none
    selector_rank: int = 0  # of the product that scores a guess by the token before it; 0: no selector
    selector_candidates: int = 0  # best guesses of a slot that the pair selector chooses among

    @property
    def first_guess(self) -> int:
        """The slot that guesses the first token."""
        return 0 if self.sample_from_anchor else 1

    @property
    def num_drafts(self) -> int:
        """The tokens that a block guesses."""
        return self.size if self.sample_from_anchor else self.size - 1


@dataclass(frozen=True)
class HeadConfig:
    """Everything that a runner or the training must know about a head."""

    kind: str  # eagle3 | eagle | mtp | dflash | dspark
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
    qk_norm: bool = False  # RMSNorm over head_dim on queries and keys, before rope
    own_embedding: bool = False  # False: the target's
    own_lm_head: bool = True  # False: the target's
    block: BlockConfig | None = None  # of a parallel head
    num_layers: int = 1  # of an eagle3 head
    # of a P-EAGLE head: slots after the first read this token and mask_hidden, so one pass guesses all of
    # them. None: they read the guess before
    mask_token_id: int | None = None
    layer: ModelConfig | None = None  # of an mtp head: its layer is one of this model's, not llama's
    target: TargetName | None = None  # None: its file does not say

    @staticmethod
    def beside(model: ModelConfig, kind: str, **others: Any) -> HeadConfig:
        """A head whose layers have the sizes of its target `model`, except for `others`."""
        same = "vocab_size hidden_size num_heads num_kv_heads head_dim intermediate_size rms_norm_eps"
        sizes = {name: getattr(model, name) for name in (*same.split(), "rope", "max_position")}
        sizes |= {"draft_vocab_size": model.vocab_size, "target_hidden_size": model.hidden_size}
        return HeadConfig(kind=kind, **{**sizes, **others})

    @property
    def num_features(self) -> int:
        """The number of the target's hidden states that a slot reads."""
        if self.kind == "eagle":
            return 1
        return 3 if self.feature_layers is None else len(self.feature_layers)

    @property
    def feature_width(self) -> int:
        return self.num_features * self.target_hidden_size

    @property
    def is_parallel(self) -> bool:
        """Whether it guesses all tokens of a draft in one pass."""
        return self.block is not None or self.mask_token_id is not None

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """The hidden states that it reads of a target with `num_layers` layers: 0 is the embedding."""
        if self.kind == "eagle":
            return (num_layers,)
        return self.feature_layers or usual_feature_layers(num_layers)


def usual_feature_layers(num_layers: int) -> tuple[int, ...]:
    """The three hidden states that an EAGLE-3 head reads by default: early, middle and late."""
    return (2, num_layers // 2, num_layers - 3)


def usual_block_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """The `count` hidden states that a parallel head reads by default, spread over the target's layers."""
    if count == 1:
        return (num_layers // 2 + 1,)
    # rounded as by the authors: after adding the first layer's number, halves to even
    return tuple(1 + round(1 + index * (num_layers - 4) / (count - 1)) for index in range(count))


def expected_tensors(config: HeadConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name and shape of every tensor of a head of this config, without those of the target."""
    yield from _block_tensors(config, config.block) if config.block else _slot_tensors(config)
    if config.own_lm_head:
        yield "lm_head.weight", (config.draft_vocab_size, config.hidden_size)
    if config.own_embedding:
        yield "embed_tokens.weight", (config.vocab_size, config.hidden_size)


def _slot_tensors(config: HeadConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Those of a head that guesses one token in each pass."""
    hidden, target_hidden = config.hidden_size, config.target_hidden_size
    eagle3 = config.kind == "eagle3"
    yield "fc.weight", (hidden, config.feature_width if eagle3 else hidden + target_hidden)
    if config.fc_bias:
        yield "fc.bias", (hidden,)
    yield from _feature_norms(config)
    if config.norm_before_fc:
        yield "input_norm.weight", (config.feature_width,)
    if config.kind == "mtp":
        yield "embedding_norm.weight", (hidden,)
        yield "state_norm.weight", (hidden,)
    if config.layer is not None:
        yield from ((f"midlayer.{name}", shape) for name, shape in layer_tensors(config.layer, 0))
        yield "norm.weight", (hidden,)
        return
    yield from _layer_tensors(config, "midlayer.", 2 * hidden if eagle3 else hidden)
    if config.kind != "eagle":
        yield "midlayer.input_layernorm.weight", (hidden,)
    if eagle3:
        yield "midlayer.hidden_norm.weight", (hidden,)
    yield "midlayer.post_attention_layernorm.weight", (hidden,)
    for layer in range(1, config.num_layers):
        yield from _llama_layer(config, f"layers.{layer}.")
    if config.mask_token_id is not None:
        yield "mask_hidden", (1, 1, config.feature_width)
    if config.kind != "eagle":
        yield "norm.weight", (hidden,)


def _block_tensors(config: HeadConfig, block: BlockConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Those of a parallel head."""
    hidden, rank = config.hidden_size, block.markov_rank
    yield "fc.weight", (hidden, config.feature_width)
    yield from _feature_norms(config)
    yield "hidden_norm.weight", (hidden,)
    yield "norm.weight", (hidden,)
    for layer in range(len(block.layers)):
        yield from _llama_layer(config, f"layers.{layer}.")
    if block.mask_embedding:
        yield "mask_embedding", (hidden,)
    if rank:
        yield "markov_head.markov_w1.weight", (config.vocab_size, rank)
        yield "markov_head.markov_w2.weight", (config.draft_vocab_size, rank)
    if block.confidence:
        yield "confidence_head.proj.weight", (1, hidden + (rank if block.confidence_with_markov else 0))
        yield "confidence_head.proj.bias", (1,)
    yield from _dflash2_tensors(config, block)


def _dflash2_tensors(config: HeadConfig, block: BlockConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Those that DFlash2 adds."""
    hidden, rank = config.hidden_size, block.selector_rank
    for layer in range(len(block.layers) if block.convolution_group else 0):
        for part in ("attention_conv", "mlp_conv"):
            yield f"layers.{layer}.{part}.base_kernel", (2, 2, hidden)
            corrections = 4 * hidden // block.convolution_group
            yield f"layers.{layer}.{part}.kernel_projection.weight", (corrections, hidden)
    if rank:
        yield "candidate_selector.predecessor_codebook", (config.vocab_size, rank)
        yield "candidate_selector.successor_codebook", (config.draft_vocab_size, rank)
        yield "candidate_selector.hidden_projection.weight", (rank, hidden)


def _feature_norms(config: HeadConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The norms of the features, one for each."""
    for feature in range(config.num_features if config.fc_norm else 0):
        yield f"fc_norm.{feature}.weight", (config.target_hidden_size,)


def _llama_layer(config: HeadConfig, layer: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Those of a whole decoder layer."""
    yield from _layer_tensors(config, layer, config.hidden_size)
    yield f"{layer}input_layernorm.weight", (config.hidden_size,)
    yield f"{layer}post_attention_layernorm.weight", (config.hidden_size,)


def _layer_tensors(config: HeadConfig, layer: str, inputs: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Those of one decoder layer whose attention reads `inputs` numbers, without its norms."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for projection, size in (("q", query_size), ("k", kv_size), ("v", kv_size)):
        yield f"{layer}self_attn.{projection}_proj.weight", (size, inputs)
        if config.qkv_bias:
            yield f"{layer}self_attn.{projection}_proj.bias", (size,)
        if config.qk_norm and projection != "v":
            yield f"{layer}self_attn.{projection}_norm.weight", (config.head_dim,)
    yield f"{layer}self_attn.o_proj.weight", (hidden, query_size)
    yield f"{layer}mlp.gate_proj.weight", (intermediate, hidden)
    yield f"{layer}mlp.up_proj.weight", (intermediate, hidden)
    yield f"{layer}mlp.down_proj.weight", (hidden, intermediate)
