"""Pilots: short training runs of heads of several sizes on parts of the data."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch

from paceline.models.heads.config import TargetName
from paceline.models.transformer import Transformer
from paceline.train.acceptance import lengths_by_pass
from paceline.train.examples import Examples
from paceline.train.objective import Objective, WriteHead
from paceline.train.options import TrainOptions
from paceline.train.plan.law import Pilot
from paceline.train.trainer import Trainer

SCORED_BATCHES = 8  # held-out batches that a pilot is measured on
WARMUP_SHARE = 0.1  # of a pilot's steps: a warm-up of 100 steps would be most of it
UNTIMED_SHARE = 0.25  # of a pilot's steps, in which kernels are compiled


@dataclass(frozen=True)
class PilotPlan:
    """Which pilots are trained."""

    options: Mapping[int, TrainOptions]  # by layers of the head
    steps: Sequence[int]  # optimizer steps of the pilots of each size
    # a head in training, for a target, examples, options and the target's name
    objective: Callable[[Transformer, Examples, TrainOptions, TargetName], Objective]


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
            pilots.append(_run(Trainer(objective, examples, chosen, None), layers, steps))
            heads[layers] = objective.snapshot()
            on_pilot(pilots[-1])
    return pilots, heads


def _run(trainer: Trainer, layers: int, steps: int) -> Pilot:
    """Train one pilot, and measure what it accepts."""
    times: list[float] = []

    def note_time() -> bool:
        times.append(time.monotonic())
        return True

    trainer.train(may_step=note_time)
    skipped = int(UNTIMED_SHARE * (len(times) - 1))
    per_step = (times[-1] - times[skipped]) / max(1, len(times) - 1 - skipped)
    assert trainer.progress.pace is not None
    share = trainer.examples.answer_counts().sum() / len(trainer.examples.tokens)
    answered = trainer.progress.pace.batch_tokens * float(share)  # of a step; padding is left out of account
    return Pilot(layers, round(steps * answered), survival(trainer), per_step / answered)


@torch.no_grad()
def survival(trainer: Trainer) -> tuple[float, ...]:
    """The share of passes over held-out answers whose first 1, 2, ... drafted tokens are right."""
    objective, batches = trainer.objective, islice(trainer.held_out_batches(), SCORED_BATCHES)
    lengths = torch.tensor([length for one in batches for length in lengths_by_pass(objective.accepted, one)])
    return tuple((lengths[:, None] > torch.arange(objective.num_steps)).float().mean(0).tolist())
