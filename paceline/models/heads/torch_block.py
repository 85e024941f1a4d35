"""The network of parallel heads (DFlash, DSpark, JetSpec) in torch: the reference, and what is trained.

    features of the context --context--> c --keys_values--> keys and values of every layer, computed once
    [anchor, MASK, ..., MASK] --forward--> outputs --logits(previous tokens)--> one guess per slot

No layer runs over the context: each layer takes its keys and values from the same c. The slots of the block
attend to the context and to each other, in both directions or (JetSpec) only backwards.

    DFlash    slot k guesses the token at its own position; the anchor's slot guesses nothing
    DSpark    slot k guesses the token after its position; the logits also depend on the token at it:
              logits + W2 W1[token]; sigmoid(w [output, W1[token]]) estimates the chance of acceptance
    DFlash2   DFlash with convolutions of each slot with the one before it, around attention and MLP, and a
              selector: logit(b) + <A[a] * W output, B[b]> for a slot's best guesses b after the token a

As in torch_head.py, what a slot attends to is up to the caller, and the leading axes are free.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from paceline.models.heads.config import BlockConfig, HeadConfig
from paceline.models.heads.torch_head import (
    Attend,
    BesideTarget,
    FeatureNorms,
    Layer,
    Norm,
    TargetWeights,
    own_embedding,
    own_lm_head,
)

# As Attend, with the number of the layer first
AttendInLayer = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class MarkovHead(nn.Module):
    """What the token before adds to the logits: a product of low rank."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)

    def forward(self, previous: Tensor) -> Tensor:
        output: Tensor = self.markov_w2(self.markov_w1(previous))
        return output


class ConfidenceHead(nn.Module):
    """The chance that a slot's guess is accepted, before the sigmoid."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.proj(inputs)[..., 0]
        return output


class Convolution(nn.Module):
    """Kernels that mix a slot with the one before it: learned ones, corrected by the slot's own state."""

    def __init__(self, hidden: int, group: int) -> None:
        super().__init__()
        self.group = group
        identity = torch.zeros(2, 2, hidden)  # [before or after the sublayer, this slot or the one before, H]
        identity[:, 0] = 1.0
        self.base_kernel = nn.Parameter(identity)
        self.kernel_projection = nn.Linear(hidden, 4 * hidden // group, bias=False)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The kernels [..., 2, H] for the sublayer's inputs [..., H], and those for its outputs."""
        corrections = self.kernel_projection(inputs)
        corrections = corrections.view(*corrections.shape[:-1], 2, 2, -1)
        kernels = self.base_kernel + corrections.repeat_interleave(self.group, dim=-1)
        return kernels[..., 0, :, :], kernels[..., 1, :, :]


def convolved(states: Tensor, kernels: Tensor, block_size: int) -> Tensor:
    """States [..., slots, H] mixed with those of the slots before them; blocks begin with nothing before."""
    blocks = states.view(*states.shape[:-2], -1, block_size, states.shape[-1])
    before = nn.functional.pad(blocks[..., :-1, :], (0, 0, 1, 0)).flatten(-3, -2)
    return kernels[..., 0, :] * states + kernels[..., 1, :] * before


class ConvolvedLayer(Layer):
    """A layer of DFlash2: convolutions before and after attention and MLP, within the block."""

    def __init__(self, config: HeadConfig, block: BlockConfig) -> None:
        super().__init__(config)
        self.block_size = block.size
        self.attention_conv = Convolution(config.hidden_size, block.convolution_group)
        self.mlp_conv = Convolution(config.hidden_size, block.convolution_group)

    def forward(self, residual: Tensor, inputs: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        before, after = self.attention_conv(inputs)
        mixed = self.self_attn(convolved(inputs, before, self.block_size), positions, attend)
        hidden = residual + convolved(mixed, after, self.block_size)
        inputs = self.post_attention_layernorm(hidden)
        before, after = self.mlp_conv(inputs)
        output = self.mlp(convolved(inputs, before, self.block_size))
        return hidden + convolved(output, after, self.block_size)


class PairSelector(nn.Module):
    """Scores a slot's best guesses by the token before them."""

    def __init__(self, config: HeadConfig, block: BlockConfig) -> None:
        super().__init__()
        rank = block.selector_rank
        self.candidates = block.selector_candidates
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.draft_vocab_size, rank))
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    def forward(self, logits: Tensor, outputs: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """The ids of the best guesses, and their logits with the scores added: [..., candidates]."""
        best, ids = logits.topk(min(self.candidates, logits.shape[-1]), dim=-1)
        state = self.predecessor_codebook[previous] * self.hidden_projection(outputs)
        scores = (self.successor_codebook[ids] @ state[..., None])[..., 0]
        return ids, best + scores


class BlockHead(BesideTarget):
    """A head that guesses a block of tokens in one pass."""

    def __init__(self, config: HeadConfig, shared: TargetWeights) -> None:
        super().__init__(config, shared)
        assert config.block is not None, "the config is that of a parallel head"
        self.block = block = config.block
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(config.feature_width, hidden, bias=False)
        if config.fc_norm:
            self.fc_norm = FeatureNorms(config)
        self.hidden_norm = Norm(hidden, eps)
        self.layers = nn.ModuleList(
            ConvolvedLayer(config, block) if block.convolution_group else Layer(config) for _ in block.layers
        )
        self.norm = Norm(hidden, eps)
        self.lm_head, self.embed_tokens = own_lm_head(config), own_embedding(config)
        if block.mask_embedding:
            self.mask_embedding = nn.Parameter(torch.zeros(hidden))
        if block.markov_rank:
            self.markov_head = MarkovHead(config.vocab_size, config.draft_vocab_size, block.markov_rank)
        if block.confidence:
            extra = block.markov_rank if block.confidence_with_markov else 0
            self.confidence_head = ConfidenceHead(hidden + extra)
        if block.selector_rank:
            self.candidate_selector = PairSelector(config, block)

    def context(self, features: Tensor) -> Tensor:
        """What all layers read of the context: [..., H] of the target's features [..., features * Ht]."""
        state: Tensor = self.hidden_norm(self.fc(self.fc_norm(features) if self.config.fc_norm else features))
        return state

    def keys_values(self, layer: int, context: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of one layer [..., kv_heads, head_dim] at context positions [...]."""
        attention = self._layer(layer).self_attn
        return attention.keys_values(context, positions)

    def forward(self, tokens: Tensor, positions: Tensor, attend: AttendInLayer) -> Tensor:
        """The outputs [..., H] of the slots of blocks, given their tokens [...] and positions [...]."""
        hidden = self._embed_slots(tokens)
        for number in range(len(self.layers)):
            layer = self._layer(number)
            hidden = layer(hidden, layer.input_layernorm(hidden), positions, partial(attend, number))
        output: Tensor = self.norm(hidden)
        return output

    def guesses(self, outputs: Tensor, previous: Tensor) -> Tensor:
        """Logits over the draft vocabulary; `previous` [...] are the tokens before the guessed ones.

        With a selector, -inf for all but a slot's best guesses.
        """
        logits = self.unselected(outputs, previous)
        if (selected := self.selected(logits, outputs, previous)) is not None:
            logits = torch.full_like(logits, -torch.inf).scatter(-1, *selected)
        return logits

    def unselected(self, outputs: Tensor, previous: Tensor) -> Tensor:
        """The logits before a selector has chosen."""
        logits = self.logits(outputs)
        return logits + self.markov_head(previous) if self.block.markov_rank else logits

    def selected(self, logits: Tensor, outputs: Tensor, previous: Tensor) -> tuple[Tensor, Tensor] | None:
        """The selector's candidates and their logits: see PairSelector; None if the head has no selector."""
        if not self.block.selector_rank:
            return None
        found: tuple[Tensor, Tensor] = self.candidate_selector(logits, outputs, previous)
        return found

    def confidence(self, outputs: Tensor, previous: Tensor) -> Tensor | None:
        """Logits [...] of the chance that each guess is accepted; None if the head does not estimate it."""
        if not self.block.confidence:
            return None
        if self.block.confidence_with_markov:
            outputs = torch.cat((outputs, self.markov_head.markov_w1(previous)), dim=-1)
        estimate: Tensor = self.confidence_head(outputs)
        return estimate

    def _layer(self, number: int) -> Layer:
        layer = self.layers[number]
        assert isinstance(layer, Layer)
        return layer

    def _embed_slots(self, tokens: Tensor) -> Tensor:
        if not self.block.mask_embedding:
            return self.embed(tokens)
        is_mask = tokens == self.block.mask_token_id
        embedded = self.embed(torch.where(is_mask, 0, tokens))  # its id may be outside of the vocabulary
        return torch.where(is_mask[..., None], self.mask_embedding.to(embedded.dtype), embedded)


def block_mask(head: BlockHead, layer: int, distance: Tensor, in_block: Tensor) -> Tensor:
    """Which keys the slots of a block see in a layer.

    `distance` is the slot's position minus the key's, `in_block` whether the key is of the slot's block, not
    of the context; both have a key for each entry of their last axis.
    """
    attention = head.block.layers[layer]
    seen = torch.ones_like(in_block)
    if attention.causal:
        seen &= ~in_block | (distance >= 0)
    if attention.window is not None:
        seen &= distance < attention.window
    return seen
