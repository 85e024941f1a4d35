"""ModelConfig: the architecture of a model, as every backend reads it.

Families differ only by the fields below; there is one transformer, not one per family. The defaults are
llama's. `beyond_llama` names the blocks that not every backend has; needs.py says which has which.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

MIXER, FEED_FORWARD = "mixer", "feed_forward"  # the parts of a layer
RECURRENT_WORDS = {"short_conv": "short convolutions", "gated_delta": "gated delta nets", "mamba2": "Mamba2"}
LATENT_NORM_EPS = 1e-6  # of the norms of latents, whatever that of the other norms is
UNGATED = ("relu2",)  # activations of MLPs without a gate


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the base and its frequency scaling, if any."""

    theta: float = 10000.0
    scaling: str = "none"  # none | linear | llama3 | yarn | proportional | longrope | dynamic
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    # GGUF files carry llama3 scaling as ready divisors, one per frequency; empty when absent
    frequency_divisors: tuple[float, ...] = ()
    dim: int = 0  # the first values of a head that are rotated; 0: all of them
    beta_fast: float = 32.0  # yarn: rotations in the original context above which a frequency is kept
    beta_slow: float = 1.0  # yarn: and below which it is divided by `factor`
    truncate: bool = True  # yarn: the bounds between them are whole indices
    attention_factor: float = 1.0  # yarn, longrope: factor of cosines and sines
    angles: int = 0  # proportional: the frequencies that are not 0
    # longrope, dynamic: the tokens of a context. Whether they are more than `original_max_position` decides
    # about all frequencies, so it is known from the start: keys in a cache are rotated once
    context: int = 0
    short_divisors: tuple[float, ...] = ()  # longrope, one per frequency: in contexts of the original size
    long_divisors: tuple[float, ...] = ()  # and in longer ones


@dataclass(frozen=True)
class AttentionShape:
    """The heads of a layer that attends."""

    head_dim: int
    num_kv_heads: int
    values_are_keys: bool = False  # one matrix projects both; they differ by what follows it
    # the earlier layer whose keys and values it reads, having none of its own; in a model of which no layer
    # has any (an assistant): the layer of its target's KV pool
    shared_with: int | None = None


@dataclass(frozen=True)
class Reach:
    """Which of the positions before it, and its own, a token attends to."""

    window: int | None = None  # the number of last ones; None: all
    chunk: int | None = None  # those since the last multiple of `chunk`; None: all


@dataclass(frozen=True)
class Temperature:
    """Queries grow with their positions: by 1 + strength * ln(1 + floor((position + offset) / period))."""

    strength: float
    period: int  # positions
    offset: int
    with_rope: bool  # whether it is for the layers with RoPE or for those without


@dataclass(frozen=True)
class PerLayerInput:
    """A second embedding: each layer adds what it makes of its own part of it (Gemma's E sizes)."""

    size: int  # of a layer's part
    vocab_size: int


@dataclass(frozen=True)
class MoeConfig:
    """Mixture of experts: every layer listed in `layers` has experts instead of one MLP."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize_weights: bool  # divide the chosen experts' probabilities by their sum
    layers: frozenset[int]
    scoring: str = "softmax"  # of the router's outputs: softmax | sigmoid
    correction_bias: bool = False  # a bias of scores that decides which experts are chosen, not their weights
    groups: int = 1  # experts are in groups, and only those of the best `chosen_groups` are chosen
    chosen_groups: int = 1
    group_experts: int = 2  # the best of a group, by whose sum groups are compared
    weight_scale: float = 1.0  # factor of the chosen experts' weights
    shared_intermediate_size: int = 0  # of an MLP that every row goes through beside its experts; 0: none
    biases: bool = False  # of the router and of the experts' projections
    shared_gate: bool = False  # the shared MLP's output is scaled by the sigmoid of a learned score
    scaled_inputs: bool = False  # an expert's weight scales what it reads, not what it gives
    # experts and shared MLP have norms of their own before and after them; the router norms and scales the
    # residual stream, and learned factors scale the weights that it gives
    own_norms: bool = False
    # experts read and give a projection of the residual stream of this size; the router and the shared MLP
    # read the stream itself. 0: experts do, too
    latent_size: int = 0

    def beyond_llama(self) -> list[str]:
        """What of it the mixtures of llama's shape do not have, in words."""
        blocks = {
            f"a {self.scoring} router": self.scoring != "softmax" or self.correction_bias or self.groups > 1,
            "scaled experts": self.weight_scale != 1,
            "shared experts": self.shared_intermediate_size > 0,
            "gated shared experts": self.shared_gate,
            "experts with biases": self.biases,
            "experts with scaled inputs": self.scaled_inputs,
            "experts with norms of their own": self.own_norms,
            "experts in a latent space": self.latent_size > 0,
        }
        return [name for name, is_used in blocks.items() if is_used]


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention: see latent.py. Sizes are of a head unless they are of a latent."""

    rank: int  # of the latent of keys and values
    query_rank: int  # of the latent of queries; 0: they are projected at once
    rope_dim: int  # the rotated part of a query, and of the key that all heads share
    nope_dim: int  # the other part of a query
    value_dim: int
    biases: bool = False  # of the projections to latents
    interleaved: bool = True  # the two parts of a rotated pair are neighbours in files


@dataclass(frozen=True)
class RecurrentConfig:
    """Layers that carry a state from token to token instead of attending to keys and values."""

    kind: str  # a key of recurrent.RECURRENCES: short_conv | gated_delta | mamba2
    layers: frozenset[int]
    conv_kernel: int  # tokens that the causal convolution sees, the row's own included
    conv_bias: bool = False  # of the convolution; of short_conv, also of the projections around it
    # each key head is shared by value_heads // key_heads neighbouring value heads; Mamba calls key heads
    # groups, and key_dim the size of the state
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0  # of a head
    value_dim: int = 0  # of a head
    norm_groups: int = 1  # mamba2: each of this many parts is normed separately; 0: nothing is normed
    gated_norm: bool = True  # mamba2: what is normed is gated already
    tiled_values: bool = False  # gated_delta: those that share a key head are key_heads apart, in GGUF files
    beside_attention: bool = False  # these layers attend too: what both give is added

    @property
    def conv_size(self) -> int:
        """The channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def state_values(self, hidden_size: int) -> int:
        """The numbers of a request's state in one layer; short_conv has a channel for each hidden value."""
        seen = (self.conv_kernel - 1) * (self.conv_size or hidden_size)
        return seen + self.value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True)
class WeightScale:
    """Factors of the rows of a matrix in every layer, by which it is stored too small or too large."""

    name: str  # the end of the matrix's name
    factors: tuple[float, ...]
    rows: tuple[int, ...] = ()  # that have each factor; (): one factor for all


@dataclass(frozen=True)
class ModelConfig:
    """Everything a backend must know to run a model."""

    family: str  # a key of families.FAMILIES
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    tie_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim on q and k, before rope
    sliding_windows: tuple[int | None, ...] = ()  # one per layer; () means full attention everywhere
    moe: MoeConfig | None = None
    activation: str = "silu"  # of the MLP's gate: silu | gelu_tanh | clamped_silu; without one: relu2
    attention_sinks: bool = False  # a score per head that takes a share of attention and has no value
    norm: str = "rms"  # rms | layer: LayerNorm without a bias
    # where norms are: before attention and MLP (pre), after them (post), both (sandwich), or one norm
    # whose output both read (parallel)
    norm_placement: str = "pre"
    joint_qk_norm: bool = False  # RMSNorm over all heads of q, and of k, at once
    layer_ropes: tuple[RopeConfig | None, ...] = ()  # one per layer; None: no rope; (): `rope` everywhere
    attention_scale: float = 0.0  # factor of scores; 0: 1 / sqrt(head_dim)
    attention_softcap: float = 0.0  # scores are cap * tanh(score / cap); 0: no cap
    logits_softcap: float = 0.0  # likewise
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add to the residual stream
    logits_scale: float = 1.0
    latent: LatentConfig | None = None  # then there is one KV head, of the latent and the shared key

    attention_gate: bool = False  # mixed values are scaled by the sigmoid of a further projection
    recurrent: RecurrentConfig | None = None
    layer_shapes: tuple[AttentionShape, ...] = ()  # one per layer; (): `head_dim`, `num_kv_heads` everywhere
    intermediate_sizes: tuple[int, ...] = ()  # of MLPs, one per layer; (): `intermediate_size` everywhere
    attention_chunks: tuple[int | None, ...] = ()  # one per layer, see Reach; (): none
    temperature: Temperature | None = None
    value_norm: bool = False  # values are scaled to a root mean square of 1
    unit_qk: bool = False  # so are q and k after rope, in layers that have it
    layer_scales: bool = False  # a learned factor of each layer's output
    per_layer_input: PerLayerInput | None = None
    # one per layer: it has a mixer (MIXER) or a feed-forward block (FEED_FORWARD), and a norm before it;
    # (): every layer has both
    layer_parts: tuple[str, ...] = ()
    weight_scales: tuple[WeightScale, ...] = ()  # that files leave to their reader
    hidden_factors: bool = False  # these factors are in the file's weights, and nothing says what they are

    def has_part(self, layer: int, part: str) -> bool:
        """Whether `layer` has a MIXER, or a FEED_FORWARD block."""
        return not self.layer_parts or self.layer_parts[layer] == part

    @property
    def is_gated(self) -> bool:
        """Whether MLPs have a gate beside their input projection."""
        return self.activation not in UNGATED

    def shape_of(self, layer: int) -> AttentionShape:
        """The heads of `layer`, which attends."""
        return (
            self.layer_shapes[layer]
            if self.layer_shapes
            else AttentionShape(self.head_dim, self.num_kv_heads)
        )

    def kv_values(self, layer: int) -> int:
        """The numbers of a token that the KV cache of `layer` holds; a latent is key and value at once."""
        shape = self.shape_of(layer)
        return shape.num_kv_heads * (shape.head_dim + self.stored_value_dim(layer))

    def stored_value_dim(self, layer: int) -> int:
        """The size of a value in the KV cache of `layer`; 0: it is a part of its key."""
        return 0 if self.latent else self.shape_of(layer).head_dim

    @property
    def shared_heads(self) -> int:
        """The largest number by which the KV heads of every layer can be divided."""
        return math.gcd(self.num_kv_heads, *(shape.num_kv_heads for shape in self.layer_shapes))

    def is_recurrent(self, layer: int) -> bool:
        """Whether `layer` has a state, instead of keys and values or beside them."""
        return self.recurrent is not None and layer in self.recurrent.layers

    @cached_property
    def attending_layers(self) -> list[int]:
        """The layers that attend, in order."""
        beside = self.recurrent is not None and self.recurrent.beside_attention
        mixing = [layer for layer in range(self.num_layers) if self.has_part(layer, MIXER)]
        return [layer for layer in mixing if beside or not self.is_recurrent(layer)]

    @cached_property
    def kv_layers(self) -> list[int]:
        """The layers that have keys and values of their own, in order: KV pools have no others."""
        return [layer for layer in self.attending_layers if self.shape_of(layer).shared_with is None]

    def kv_layer(self, layer: int) -> int:
        """Where in a KV pool the keys and values are that `layer` reads."""
        source = self.shape_of(layer).shared_with
        if source is not None and not self.kv_layers:
            return source
        return self.kv_layers.index(layer if source is None else source)

    @property
    def recurrent_layers(self) -> list[int]:
        """The layers that have states, in order."""
        return [layer for layer in range(self.num_layers) if self.is_recurrent(layer)]

    def window(self, layer: int) -> int | None:
        """The number of last positions, its own included, that a token of `layer` attends to; None: all."""
        return self.sliding_windows[layer] if self.sliding_windows else None

    @property
    def widest_window(self) -> int | None:
        """The number of last positions that a token attends to in any layer; None: all of them in some."""
        windows = [self.window(layer) for layer in self.attending_layers]
        known = [window for window in windows if window is not None]
        return max(known) if known and len(known) == len(windows) else None

    @cached_property
    def window_layers(self) -> dict[int, int]:
        """Where in a KV pool the layers are whose keys only later positions within a window read, and these
        windows; a chunk is a window too. Empty unless other layers read all positions."""
        spans: dict[int, list[int | None]] = {}
        for layer in self.attending_layers if self.kv_layers else ():
            reach = self.reach(layer)
            spans.setdefault(self.kv_layer(layer), []).append(reach.window or reach.chunk)
        known = {
            layer: max(span for span in own if span is not None)
            for layer, own in spans.items()
            if None not in own
        }
        return known if len(known) < len(spans) else {}

    @property
    def window_group(self) -> int | None:
        """The largest window of `window_layers`; None: there are none."""
        return max(self.window_layers.values(), default=None)

    def reach(self, layer: int) -> Reach:
        """What a token of `layer` attends to."""
        return Reach(self.window(layer), self.attention_chunks[layer] if self.attention_chunks else None)

    def intermediate_of(self, layer: int) -> int:
        """The size of the MLP of `layer`."""
        return self.intermediate_sizes[layer] if self.intermediate_sizes else self.intermediate_size

    def rope_of(self, layer: int) -> RopeConfig | None:
        """The rope of `layer`; None: its attention does not see positions."""
        return self.layer_ropes[layer] if self.layer_ropes else self.rope

    def for_context(self, length: int | None) -> ModelConfig:
        """The model that serves contexts of `length` tokens; None: its own.

        Some ropes depend on it. `dynamic` also allows more than the model's own.
        """
        if length is None or self.rope.scaling not in ("longrope", "dynamic"):
            return self
        rope, most = replace(self.rope, context=length), self.max_position
        if rope.scaling == "dynamic":
            most = max(most, min(length, int(rope.original_max_position * rope.factor)))
        ropes = tuple(rope if own == self.rope else own for own in self.layer_ropes)
        return replace(self, rope=rope, layer_ropes=ropes, max_position=most)

    @property
    def expert_hidden(self) -> int:
        """The numbers of a row that experts read and give."""
        return (self.moe.latent_size if self.moe else 0) or self.hidden_size

    def beyond_llama(self) -> list[str]:
        """The blocks of this model that llama does not have, in words. The torch backend has all of them."""
        blocks = {
            f"{self.activation} activations": self.activation != "silu",
            "LayerNorm": self.norm != "rms",
            f"{self.norm_placement} norms": self.norm_placement != "pre",
            "a joint QK norm": self.joint_qk_norm,
            "layers with different RoPE": bool(self.layer_ropes),
            "partial RoPE": self.rope.dim not in (0, self.head_dim),
            "a scaled attention": self.attention_scale != 0,
            "soft-capped scores": bool(self.attention_softcap or self.logits_softcap),
            "attention sinks": self.attention_sinks,
            "latent attention": self.latent is not None,
            "gated attention": self.attention_gate,
            RECURRENT_WORDS[self.recurrent.kind] if self.recurrent else "": self.recurrent is not None,
            "tiled value heads": self.recurrent is not None and self.recurrent.tiled_values,
            "attention beside a recurrence": self.recurrent is not None and self.recurrent.beside_attention,
            "layers of one block": bool(self.layer_parts),
            "layers with different heads": len({*self.layer_shapes}) > 1,
            "layers with different MLPs": len({*self.intermediate_sizes}) > 1,
            "layers that share keys and values": any(
                shape.shared_with is not None for shape in self.layer_shapes
            ),
            "chunked attention": any(self.attention_chunks),
            "scaled queries": self.temperature is not None,
            "norms without weights": self.value_norm or self.unit_qk,
            "scaled layers": self.layer_scales,
            "per-layer embeddings": self.per_layer_input is not None,
            "scaled residuals": (self.embedding_scale, self.residual_scale, self.logits_scale) != (1, 1, 1),
        }
        own = [name for name, is_used in blocks.items() if is_used]
        return own + (self.moe.beyond_llama() if self.moe else [])
