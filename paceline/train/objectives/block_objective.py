"""BlockObjective: a parallel head (DFlash, DFlash2, JetSpec or DSpark) in training."""

from __future__ import annotations

import numpy as np
import torch

from paceline.core.arrays import Int32Array
from paceline.errors import ConfigError
from paceline.models.config import ModelConfig
from paceline.models.heads.checkpoint import HeadCheckpoint
from paceline.models.heads.config import (
    BlockAttention,
    BlockConfig,
    HeadConfig,
    TargetName,
    usual_block_layers,
)
from paceline.models.heads.torch_block import BlockHead, Convolution
from paceline.models.heads.torch_head import normed
from paceline.models.transformer.model import Transformer
from paceline.train.data.examples import Examples
from paceline.train.loop.acceptance import accepted_by_blocks
from paceline.train.loop.batches import Batch, pack
from paceline.train.loop.sequences import TargetStates, target_states
from paceline.train.objectives.block import block_losses, random_anchors
from paceline.train.objectives.losses import StepLosses
from paceline.train.objectives.new_head import (
    choose_draft_ids,
    copy_output,
    load_weights,
    rarest_id,
    shared_weights,
)
from paceline.train.objectives.objective import Objective, WriteHead, precision_of, write_later
from paceline.train.options import BlockOptions, DFlash2Options, DSparkOptions

TITLES = {
    "dflash": "A DFlash draft head",
    "dflash2": "A DFlash2 draft head",
    "dspark": "A DSpark draft head",
    "jetspec": "A JetSpec draft head",
}
SAMPLES, SAMPLE_WIDTH = 8, 256  # texts, and their tokens, by which the sizes of features are measured
MIN_SIZE = 0.02  # of a dimension, relative to its feature: those below carry little
SMALL = 0.1  # of the embeddings of a new Markov head or selector, which adds nothing at first


class BlockObjective(Objective):
    """Trains a parallel head on blocks behind random anchors; see block.py."""

    network: BlockHead

    def __init__(
        self,
        target: Transformer,
        examples: Examples,
        options: BlockOptions,
        name: TargetName | None = None,
        init_from: HeadCheckpoint | None = None,
    ) -> None:
        """A new head, or the one of `init_from`."""
        self.method, self.recipe, self.title = _kind(options), options.recipe, TITLES[options.recipe]
        if init_from is None:
            counts = examples.answer_counts()
            draft_ids = choose_draft_ids(counts, options.draft_vocab_size)
            config = block_config(target.config, options, rarest_id(counts), name)
            self.network = new_block_head(config, target, draft_ids, options.seed)
            if config.fc_norm:
                equalize_features(self.network, target, examples)
        else:
            self.network, draft_ids = _head_from(init_from, target, self.method)
        layers = self.network.config.layers_of(target.config.num_layers)
        super().__init__(target, examples, options, draft_ids, layers, init_from)
        self.name, self.num_steps = name, self.network.block.num_drafts
        self._anchors, self._seed = options.anchors, options.seed
        self._weigh = options.weighting == "d-pace"
        if target.embedding.is_cuda:
            self.network.compile_small_steps()

    def losses(self, batch: Batch) -> StepLosses:
        states = self._states(batch)
        anchors = random_anchors(batch, self._anchors, self._seed)
        with precision_of(self.target):
            return block_losses(self.network, self._ids, states, batch, anchors, self._loss, self._weigh)

    @torch.no_grad()
    def accepted(self, batch: Batch, states: TargetStates | None = None) -> torch.Tensor:
        states = self._states(batch) if states is None else states
        with precision_of(self.target):
            return accepted_by_blocks(self.network, states.features, self._ids, batch)

    def snapshot(self) -> WriteHead:
        return write_later(self.network, self.draft_ids, self.name)

    def size(self) -> str:
        config, block = self.network.config, self.network.block
        return f"{len(block.layers)} layers, hidden {config.hidden_size}, blocks of {block.size} slots"


def _kind(options: BlockOptions) -> str:
    """The kind of the head, which is also the method that drafts with it."""
    return "dspark" if isinstance(options, DSparkOptions) else "dflash"


def block_config(
    target: ModelConfig, options: BlockOptions, mask: int, name: TargetName | None
) -> HeadConfig:
    """The config of a new head, whose layers are as wide as those of its target."""
    rank = options.markov_rank if isinstance(options, DSparkOptions) else 0
    is_dspark, pairs = rank > 0, options if isinstance(options, DFlash2Options) else None
    if pairs and target.hidden_size % pairs.convolution_group:
        raise ConfigError(
            f"The target's hidden size is {target.hidden_size}: give a --convolution-group that divides it, "
            f"not {pairs.convolution_group}."
        )
    usual = usual_block_layers(max(4, target.num_layers), options.features)
    block = BlockConfig(
        size=options.block_size,
        mask_token_id=mask,
        layers=(BlockAttention(None, options.recipe == "jetspec"),) * options.layers,
        sample_from_anchor=is_dspark,
        markov_rank=rank,
        confidence=is_dspark,
        confidence_with_markov=is_dspark,
        convolution_group=pairs.convolution_group if pairs else 0,
        selector_rank=pairs.selector_rank if pairs else 0,
        selector_candidates=pairs.selector_candidates if pairs else 0,
    )
    return HeadConfig.beside(
        target,
        _kind(options),
        draft_vocab_size=min(options.draft_vocab_size, target.vocab_size),
        intermediate_size=options.intermediate_size or target.intermediate_size,
        # a target with few layers has fewer at these places
        feature_layers=tuple(sorted({min(layer, target.num_layers) for layer in usual})),
        fc_norm=options.fc_norm,
        qk_norm=True,
        block=block,
        target=name,
    )


def new_block_head(config: HeadConfig, target: Transformer, draft_ids: Int32Array, seed: int) -> BlockHead:
    """A head with random weights, and with the target's output norm and output weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = BlockHead(config, shared_weights(target))  # on the CPU: the same weights on every device
        if head.block.selector_rank:
            torch.nn.init.normal_(head.candidate_selector.successor_codebook, std=SMALL)
    copy_output(head, target, draft_ids)
    with torch.no_grad():
        if head.block.markov_rank:
            head.markov_head.markov_w1.weight.mul_(SMALL)
            head.markov_head.markov_w2.weight.zero_()
        for module in head.modules():
            if isinstance(module, Convolution):
                module.kernel_projection.weight.zero_()
    return head.to(target.embedding.device)


@torch.no_grad()
def equalize_features(head: BlockHead, target: Transformer, examples: Examples) -> None:
    """Start the norms of the features with weights after which every dimension is of about the same size.

    A few dimensions of a target are a hundred times as large as most: without this they are all that a new
    head learns from.
    """
    width = min(SAMPLE_WIDTH, len(examples.tokens))
    starts = np.linspace(0, len(examples.tokens) - width, SAMPLES).astype(int)
    texts = [examples.tokens[start : start + width] for start in starts]
    batch = pack(texts, [width - 1] * SAMPLES, target.embedding.device)
    layers = head.config.layers_of(target.config.num_layers)
    features = target_states(target, batch, layers).features[:, batch.positions > 0]
    for number, feature in enumerate(features.chunk(len(layers), dim=-1)):
        weight = head.get_parameter(f"fc_norm.{number}.weight")
        flat = feature[0].float()  # without the first token of a text, which is far larger than all others
        size = normed(flat, torch.ones_like(weight), head.config.rms_norm_eps).square().mean(0).sqrt()
        weight.copy_(1 / size.clamp(min=MIN_SIZE))


def _head_from(checkpoint: HeadCheckpoint, target: Transformer, kind: str) -> tuple[BlockHead, Int32Array]:
    """The head of a checkpoint, ready for training, and the token ids that it predicts."""
    if checkpoint.config.kind != kind or not checkpoint.config.own_lm_head:
        raise ConfigError(
            f"{checkpoint.source} is a head of kind {checkpoint.config.kind!r}; give one of kind {kind} that "
            "has its own lm_head, as paceline trains them."
        )
    head = BlockHead(checkpoint.config, shared_weights(target))
    return head, load_weights(head, checkpoint, target)
