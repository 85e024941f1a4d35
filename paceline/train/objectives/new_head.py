"""The EAGLE-3 or P-EAGLE head that training starts from: new, sized for its target, or an existing one."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.core.arrays import Int32Array
from paceline.errors import ConfigError
from paceline.models.config import ModelConfig
from paceline.models.heads.checkpoint import HeadCheckpoint
from paceline.models.heads.config import HeadConfig, TargetName, usual_feature_layers
from paceline.models.heads.torch_head import BesideTarget, Head, Shared, make_head
from paceline.models.transformer.model import Transformer
from paceline.train.options import Eagle3Options, PEagleOptions

WIDENED = ("draft_vocab_size", "intermediate_size")  # sizes that an existing head may be widened to


def shared_weights(target: Transformer) -> Shared:
    """The target's weights that a head uses."""
    return Shared(target.embedding, target.head, target.norm.weight, target.norm.eps)


def choose_draft_ids(answer_counts: npt.NDArray[np.int64], size: int) -> Int32Array:
    """The `size` most frequently answered tokens, ascending; ties go to lower ids."""
    frequent = np.argsort(-answer_counts, kind="stable")[:size]
    return np.sort(frequent).astype(np.int32)


def rarest_id(answer_counts: npt.NDArray[np.int64]) -> int:
    """A token for MASK that no answer has, or the rarest one, so that it is told from what is known."""
    return int(np.flatnonzero(answer_counts == answer_counts.min())[-1])


def coverage(answer_counts: npt.NDArray[np.int64], draft_ids: Int32Array) -> float:
    """Fraction of the answered tokens that a head can predict."""
    return float(answer_counts[draft_ids].sum() / answer_counts.sum())


def head_config(
    target: ModelConfig, options: Eagle3Options, name: TargetName | None, mask: int = 0
) -> HeadConfig:
    """The config of a new head: layers like those of its target. `mask` is the MASK token of P-EAGLE."""
    masked: dict[str, Any] = {}
    if isinstance(options, PEagleOptions):
        masked = {"num_layers": options.layers, "mask_token_id": mask}
    count, layers = target.num_layers, usual_feature_layers(target.num_layers)
    usable = all(1 <= layer <= count for layer in layers) and len(set(layers)) == 3
    return HeadConfig.beside(
        target,
        "eagle3",
        draft_vocab_size=min(options.draft_vocab_size, target.vocab_size),
        intermediate_size=options.intermediate_size or target.intermediate_size,
        # a target with few layers may not have three distinct ones at the usual places. Other engines read
        # each layer once, from the first to the last
        feature_layers=None if usable else tuple(sorted({1, (count + 1) // 2, count})),
        fc_norm=options.fc_norm,
        norm_output=options.norm_output,
        target=name,
        **masked,
    )


def new_head(config: HeadConfig, target: Transformer, draft_ids: Int32Array, seed: int) -> Head:
    """A head with random weights, and with the target's output weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = make_head(config, shared_weights(target))  # on the CPU: the same weights on every device
        if config.mask_token_id is not None:
            torch.nn.init.normal_(head.get_parameter("mask_hidden"))
    copy_output(head, target, draft_ids)
    return head.to(target.embedding.device)


def copy_output(head: BesideTarget, target: Transformer, draft_ids: Int32Array) -> None:
    """Start from the target's output weights, with its output norm in them.

    The outputs of a new head are random. With the target's norm at full size they would become large logits:
    first losses of about 100, and hundreds of steps to unlearn them. So its root mean square starts at 1.
    """
    scale = target.norm.weight.float()
    scale = scale / scale.square().mean().sqrt()
    with torch.no_grad():
        rows = target.head[torch.from_numpy(draft_ids).long()].float()
        head.get_parameter("lm_head.weight").copy_(rows * scale)


def head_from(
    checkpoint: HeadCheckpoint,
    target: Transformer,
    options: Eagle3Options,
    answer_counts: npt.NDArray[np.int64],
) -> tuple[Head, Int32Array]:
    """The head of a checkpoint, ready for training, and the token ids that it predicts.

    It is widened to the sizes of the options, if they ask for larger ones than its own.
    """
    config = checkpoint.config
    if config.kind != "eagle3":
        raise ConfigError(f"{checkpoint.source} is a head of kind {config.kind!r}; give one of kind eagle3.")
    head = make_head(config, shared_weights(target))
    draft_ids = load_weights(head, checkpoint, target)
    sizes = wider_sizes(config, options)
    if not sizes:
        return head, draft_ids
    return widened(head, draft_ids, replace(config, **sizes), target, answer_counts, options.seed)


def wider_sizes(config: HeadConfig, options: Eagle3Options) -> dict[str, Any]:
    """The sizes that options ask for beyond those of an existing head; their defaults ask for nothing."""
    asked = {
        field.name: getattr(options, field.name)
        for field in fields(options)
        if field.name in WIDENED and getattr(options, field.name) != field.default
    }
    asked["draft_vocab_size"] = min(asked.get("draft_vocab_size", 0), config.vocab_size)
    return {name: size for name, size in asked.items() if size > getattr(config, name)}


def widened(
    narrow: Head,
    narrow_ids: Int32Array,
    config: HeadConfig,
    target: Transformer,
    answer_counts: npt.NDArray[np.int64],
    seed: int,
) -> tuple[Head, Int32Array]:
    """A head of these larger sizes that scores the tokens of `narrow` as it does, and its draft ids.

    New units of the MLP are random and not yet read. New tokens are the most frequent ones that the narrow
    head cannot predict; their scores start from the target's output weights.
    """
    others = np.where(np.isin(np.arange(len(answer_counts)), narrow_ids), -1, answer_counts)
    added = choose_draft_ids(others, config.draft_vocab_size - len(narrow_ids))
    draft_ids = np.sort(np.concatenate([narrow_ids, added])).astype(np.int32)
    head = new_head(config, target, draft_ids, seed)
    places = torch.from_numpy(np.searchsorted(draft_ids, narrow_ids))
    known = dict(narrow.named_parameters())
    with torch.no_grad():
        for name, wide in head.named_parameters():
            if name == "lm_head.weight":
                wide[places] = known[name]
            elif name.endswith("mlp.down_proj.weight"):
                wide.zero_()
                wide[:, : known[name].shape[1]] = known[name]
            else:
                wide[: len(known[name])] = known[name]
    return head, draft_ids


def load_weights(head: BesideTarget, checkpoint: HeadCheckpoint, target: Transformer) -> Int32Array:
    """Load a checkpoint into its network, on the target's device. Returns the token ids that it predicts."""
    config = checkpoint.config
    if (config.vocab_size, config.target_hidden_size) != (
        target.config.vocab_size,
        target.config.hidden_size,
    ):
        raise ConfigError(
            f"{checkpoint.source} is for a target with {config.vocab_size} tokens and hidden size "
            f"{config.target_hidden_size}, but this one has {target.config.vocab_size} and "
            f"{target.config.hidden_size}. Give a head that was trained for it."
        )
    tensors = {name: torch.from_numpy(tensor.float32()) for name, tensor in checkpoint.tensors.items()}
    head.load_state_dict(tensors, strict=True)
    head.to(target.embedding.device)
    if checkpoint.draft_ids is None:
        return np.arange(config.draft_vocab_size, dtype=np.int32)
    return checkpoint.draft_ids
