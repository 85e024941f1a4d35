"""What is written are the weights that accept most on held-out answers, and a run ends when it gets worse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from paceline.models.transformer.model import Transformer
from paceline.train.data.examples import Examples
from paceline.train.loop import checks as checks_module
from paceline.train.loop import trainer as trainer_module
from paceline.train.loop.acceptance import tokens_per_pass
from paceline.train.loop.checks import CHECKED_BATCHES
from paceline.train.loop.progress import Check, Pace, Progress
from tests.train.loop.test_trainer import OPTIONS, Killed, trainer, weights

EVERY_STEP = replace(OPTIONS, max_steps=8, checks=4, checkpoint_every=1)


@pytest.fixture(autouse=True)
def _short_runs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_module, "LEAST_STEPS", 1)


@pytest.fixture
def _records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is recorded, so that a check can follow it."""
    monkeypatch.setattr(trainer_module, "choose_pace", lambda *_: Pace(96, 1))


def scripted(monkeypatch: pytest.MonkeyPatch, found: Sequence[float]) -> None:
    """Checks find these tokens per pass, one after the other."""
    values = iter(found)
    monkeypatch.setattr(checks_module, "tokens_per_pass", lambda *_: next(values))


@pytest.mark.usefixtures("_records")
def test_the_weights_that_accept_most_are_written_after_a_kill_too(
    target: Transformer, examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [1.0, 1.2, 2.0, 1.99, 1.98])  # before the first step and after 2, 4, 6 and 8
    killed = trainer(target, examples, tmp_path, EVERY_STEP)
    averages: dict[int, torch.Tensor] = {}

    def remember(progress: Progress) -> bool:
        averages[progress.step] = torch.cat([each.flatten() for each in killed.average.tensors.values()])
        if progress.step == 7:
            raise Killed
        return True

    with pytest.raises(Killed):
        killed.train(remember)
    resumed = trainer(target, examples, tmp_path, EVERY_STEP)
    resumed.train()
    assert [check.step for check in resumed.progress.checks] == [0, 2, 4, 6, 8]
    assert resumed.finished
    assert torch.equal(weights(resumed), averages[4])


@pytest.mark.usefixtures("_records")
def test_a_run_ends_when_three_checks_of_its_second_half_accept_less(
    target: Transformer, examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [1.5, 1.2, 1.2, 1.2, 1.6, 1.595, 1.5, 1.5, 1.5, 1.5])  # a high rate, then a gain
    run = trainer(target, examples, tmp_path, replace(EVERY_STEP, max_steps=20, checks=10))
    run.train()
    assert run.progress.best is not None
    assert (run.progress.best.step, run.progress.step) == (8, 16)
    assert run.finished
    assert trainer(target, examples, tmp_path, replace(EVERY_STEP, max_steps=20, checks=10)).finished


def test_short_runs_are_not_measured(
    target: Transformer, examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(target, examples, tmp_path, replace(OPTIONS, checks=8))
    monkeypatch.setattr(checks_module, "LEAST_STEPS", 16)
    steps = [step for step in range(65) if run.checks.is_due(Progress(step, 64, checks=[Check(0, 1.0)]))]
    assert steps[0] == 16
    assert not run.checks.is_due(Progress(0, 15))
    assert run.checks.is_due(Progress(0, 16))


def test_a_check_measures_what_is_written(target: Transformer, examples: Examples, tmp_path: Path) -> None:
    run = trainer(target, examples, tmp_path, replace(OPTIONS, checks=2, round_weights=True))
    run.train()
    assert [check.step for check in run.progress.checks] == [0, 10, 20]
    found = tokens_per_pass(run.objective.accepted, islice(run.held_out_batches(), CHECKED_BATCHES))
    assert run.progress.best is not None
    assert run.progress.best.tokens_per_pass == pytest.approx(found)
