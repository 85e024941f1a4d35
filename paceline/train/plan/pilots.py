"""Pilots: short training runs of heads of several sizes on parts of the data."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch

from paceline.core.arrays import Int32Array
from paceline.models.heads.config import TargetName
from paceline.models.transformer.model import Transformer
from paceline.train.data.examples import Examples
from paceline.train.loop.acceptance import lengths_by_pass
from paceline.train.loop.trainer import Trainer
from paceline.train.objectives.new_head import choose_draft_ids
from paceline.train.objectives.objective import Objective, WriteHead
from paceline.train.options import TrainOptions
from paceline.train.plan.law import Pilot
from paceline.train.plan.vocabulary import accepted_within

SCORED_BATCHES = 8  # held-out batches that a pilot is measured on
WARMUP_SHARE = 0.1  # of a pilot's steps: a warm-up of 100 steps would be most of it
UNTIMED_SHARE = 0.25  # of a pilot's steps, in which kernels are compiled


@dataclass(frozen=True)
class PilotPlan:
    """Which pilots are trained."""

    options: Mapping[int, TrainOptions]  # by layers of the head
    steps: Sequence[int]  # optimizer steps of the pilots of each size
    sizes: Sequence[int]  # of the draft vocabularies to choose from, ascending; pilots have the largest
    # a head in training, for a target, examples, options and the target's name
    objective: Callable[[Transformer, Examples, TrainOptions, TargetName], Objective]

    def vocabularies(self, examples: Examples) -> list[Int32Array]:
        """The token ids of each vocabulary."""
        counts = examples.answer_counts()
        return [
            choose_draft_ids(counts, size) for size in sorted({min(size, len(counts)) for size in self.sizes})
        ]


def run_pilots(
    target: Transformer,
    examples: Examples,
    name: TargetName,
    plan: PilotPlan,
    on_pilot: Callable[[Pilot], None] = lambda pilot: None,
) -> tuple[list[Pilot], dict[int, WriteHead]]:
    """The pilots, and by number of layers what writes the head of the longest one."""
    pilots: list[Pilot] = []
    heads: dict[int, WriteHead] = {}
    for layers, options in plan.options.items():
        for steps in plan.steps:
            warmup = max(1, round(WARMUP_SHARE * steps))
            chosen = replace(options, max_steps=steps, warmup_steps=warmup, checks=0)
            objective = plan.objective(target, examples, chosen, name)
            trainer = Trainer(objective, examples, chosen, None)
            pilots += _run(trainer, layers, steps, plan.vocabularies(examples))
            heads[layers] = objective.snapshot()
            on_pilot(pilots[-1])
    return pilots, heads


def _run(trainer: Trainer, layers: int, steps: int, vocabularies: Sequence[Int32Array]) -> list[Pilot]:
    """Train one pilot, and measure what it accepts with each vocabulary."""
    times: list[float] = []

    def note_time() -> bool:
        times.append(time.monotonic())
        return True

    trainer.train(begin_step=note_time)
    skipped = int(UNTIMED_SHARE * (len(times) - 1))
    per_step = (times[-1] - times[skipped]) / max(1, len(times) - 1 - skipped)
    assert trainer.progress.pace is not None
    share = trainer.examples.answer_counts().sum() / len(trainer.examples.tokens)
    answered = trainer.progress.pace.batch_tokens * float(share)  # of a step at most
    facts = round(steps * answered), per_step / answered
    return [
        Pilot(layers, len(ids), facts[0], rates, facts[1])
        for ids, rates in zip(vocabularies, survival(trainer, vocabularies), strict=True)
    ]


@torch.no_grad()
def survival(trainer: Trainer, vocabularies: Sequence[Int32Array]) -> list[tuple[float, ...]]:
    """The share of passes over held-out answers whose first 1, 2, ... drafts are right, by vocabulary."""
    objective = trainer.objective
    lengths: list[list[int]] = [[] for _ in vocabularies]
    for batch in islice(trainer.held_out_batches(), SCORED_BATCHES):
        accepted = objective.accepted(batch)
        for found, ids in zip(lengths, vocabularies, strict=True):
            found += lengths_by_pass(accepted_within(accepted, batch, ids), batch)
    steps = torch.arange(objective.num_steps)
    return [tuple((torch.tensor(each)[:, None] > steps).float().mean(0).tolist()) for each in lengths]
