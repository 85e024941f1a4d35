"""train_head: from files of answers to a trained head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.errors import ConfigError
from paceline.models.checkpoint import Checkpoint
from paceline.models.heads.config import TargetName
from paceline.models.heads.fingerprint import target_fingerprint
from paceline.models.transformer.model import Transformer
from paceline.train.data.examples import Examples, answer_settings, read_examples
from paceline.train.loop.batches import Indices
from paceline.train.loop.processes import Processes
from paceline.train.loop.progress import Progress, Record, Stopped
from paceline.train.loop.sequences import load_target
from paceline.train.loop.trainer import OnProgress, Trainer
from paceline.train.objectives.new_head import coverage
from paceline.train.objectives.objective import Objective, WriteHead
from paceline.train.options import TrainOptions

Start = Callable[[Transformer, Examples, TargetName], Objective]  # creates the head to train for a target


@dataclass(frozen=True)
class Trained:
    """The result of a training run."""

    objective: Objective
    write_untrained: WriteHead  # writes the head as it was before training
    examples: Examples
    settings: list[dict[str, Any]]  # per file of answers: temperatures and so on
    held_out_examples: Indices  # [held out]
    coverage: float  # fraction of answered tokens that the head can predict
    progress: Progress
    held_out: Record | None  # loss and matches on the held-out examples (teacher forcing)
    device: str  # name of the device


def train_head(
    checkpoint: Checkpoint,
    answers: Sequence[Path],
    folder: Path,
    options: TrainOptions,
    device: torch.device,
    start: Start,
    on_progress: OnProgress = lambda progress: True,
    processes: Processes | None = None,
    *,
    spent: float = 0.0,
    data: Mapping[str, Any] | None = None,
) -> Trained:
    """Train a head for the checkpoint on files of answers; continues the run in `folder`, if there is one.

    Stopped if `on_progress` returns False. `spent` and `data`: see Trainer.
    """
    examples = read_examples(answers, options.max_length)
    if examples.vocab_size != checkpoint.config.vocab_size:
        raise ConfigError(
            f"The answers are of a target with {examples.vocab_size} tokens, but {checkpoint.source.name} "
            f"has {checkpoint.config.vocab_size}: let this target answer the prompts."
        )
    target = load_target(checkpoint, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    name = TargetName(target_fingerprint(checkpoint), checkpoint.source.name)
    objective = start(target, examples, name)
    write_untrained = objective.snapshot()
    trainer = Trainer(objective, examples, options, folder, processes, spent=spent, data=data)
    progress = trainer.train(on_progress)
    if not trainer.finished:
        raise Stopped(progress)
    if len(trainer.held_out):
        objective.calibrate(trainer.held_out_batches())
    return Trained(
        objective,
        write_untrained,
        examples,
        [answer_settings(path) for path in answers],
        trainer.held_out,
        coverage(examples.answer_counts(), objective.draft_ids),
        progress,
        trainer.evaluate(),
        torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU",
    )
