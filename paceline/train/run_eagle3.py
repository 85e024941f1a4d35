"""From a file of answers to a trained head in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paceline.draft.heads.checkpoint import HeadCheckpoint
from paceline.draft.heads.config import TargetName
from paceline.draft.heads.torch_head import Head
from paceline.errors import ConfigError
from paceline.models.checkpoint import Checkpoint
from paceline.models.safetensors_writer import encode
from paceline.train.batches import Indices
from paceline.train.examples import Examples, read_examples
from paceline.train.new_head import (
    Int32Array,
    choose_draft_ids,
    coverage,
    head_config,
    head_from,
    new_head,
)
from paceline.train.options import TrainOptions
from paceline.train.processes import Processes
from paceline.train.sequences import load_target
from paceline.train.trainer import OnProgress, Record, Trainer


@dataclass(frozen=True)
class Trained:
    """What a run gave."""

    head: HeadCheckpoint
    untrained: HeadCheckpoint  # what it was before
    examples: Examples
    held_out_examples: Indices  # [held out]
    coverage: float  # share of answered tokens that the head can guess
    history: list[Record]
    held_out: Record | None  # guesses on the held-out examples, with true tokens before them
    seconds: float


def train_eagle3(
    checkpoint: Checkpoint,
    target_name: TargetName | None,
    answers: Sequence[Path],
    folder: Path,
    options: TrainOptions,
    device: torch.device,
    init_from: HeadCheckpoint | None = None,
    on_progress: OnProgress = lambda progress: None,
    processes: Processes | None = None,
) -> Trained:
    """Train a head for the checkpoint on files of answers; goes on with the run that `folder` holds."""
    examples = read_examples(answers, options.max_length)
    if examples.vocab_size != checkpoint.config.vocab_size:
        raise ConfigError(
            f"The answers are of a target with {examples.vocab_size} tokens, but {checkpoint.source.name} "
            f"has {checkpoint.config.vocab_size}: let this target answer the prompts."
        )
    target = load_target(checkpoint, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    counts = examples.answer_counts()
    if init_from is None:
        draft_ids = choose_draft_ids(counts, options.draft_vocab_size)
        head = new_head(head_config(checkpoint.config, options, target_name), target, draft_ids, options.seed)
    else:
        head, draft_ids = head_from(init_from, target)
    untrained = _checkpoint_of(head, target_name, draft_ids, folder)
    trainer = Trainer(target, head, torch.from_numpy(draft_ids).long(), examples, options, folder, processes)
    progress = trainer.train(on_progress)
    return Trained(
        _checkpoint_of(head, target_name, draft_ids, folder),
        untrained,
        examples,
        trainer.held_out,
        coverage(counts, draft_ids),
        progress.history,
        trainer.evaluate(),
        progress.seconds,
    )


def _checkpoint_of(
    head: Head, name: TargetName | None, draft_ids: Int32Array, folder: Path
) -> HeadCheckpoint:
    """A copy of the head's weights in float16."""
    tensors = {
        name: encode(parameter.detach().float().cpu().numpy(), "F16")
        for name, parameter in head.named_parameters()
    }
    return HeadCheckpoint(replace(head.config, target=name), tensors, draft_ids, folder)
