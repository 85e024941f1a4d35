"""Training is deterministic, resumes bit for bit after a kill, and learns."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import ConfigError
from paceline.models.transformer.model import Transformer
from paceline.train.data.examples import Examples
from paceline.train.loop import trainer as trainer_module
from paceline.train.loop.average import WARMUP
from paceline.train.loop.batches import (
    Batch,
    Indices,
    all_batches,
    epoch_batches,
)
from paceline.train.loop.processes import Processes
from paceline.train.loop.progress import Pace, Progress, Record, choose_pace, learning_rate
from paceline.train.loop.trainer import Trainer
from paceline.train.objectives.eagle3_objective import Eagle3Objective
from paceline.train.objectives.losses import StepLosses
from paceline.train.options import Eagle3Options
from tests.large import repeated

OPTIONS = Eagle3Options(
    max_steps=20,
    unroll=3,
    draft_vocab_size=100,
    intermediate_size=32,
    batch_tokens=96,
    max_length=48,
    learning_rate=3e-3,
    warmup_steps=5,
    held_out=0.1,
    checkpoint_every=10,
    average=0.9,
    checks=0,
)


class Recording(Trainer):
    """Remembers the examples of every step."""

    def step(self, indices: Indices) -> StepLosses:
        self.seen = [*getattr(self, "seen", []), tuple(indices)]
        return super().step(indices)


def trainer(
    target: Transformer,
    examples: Examples,
    folder: Path,
    options: Eagle3Options = OPTIONS,
    processes: Processes | None = None,
) -> Recording:
    return Recording(Eagle3Objective(target, examples, options), examples, options, folder, processes)


def weights(of: Trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in of.objective.network.parameters()])


@pytest.fixture(scope="module")
def whole(target: Transformer, examples: Examples, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """A finished run with OPTIONS."""
    run = trainer(target, examples, tmp_path_factory.mktemp("whole"))
    run.train()
    return run


class Killed(Exception):
    pass


def test_a_killed_run_that_is_resumed_ends_with_the_same_bits(
    target: Transformer, examples: Examples, tmp_path: Path, whole: Recording
) -> None:

    def kill(progress: Progress) -> bool:
        if progress.step == 20:  # after the checkpoint of step 10, before that of step 20
            raise Killed
        return True

    killed = trainer(target, examples, tmp_path / "killed")
    with pytest.raises(Killed):
        killed.train(kill)
    resumed = trainer(target, examples, tmp_path / "killed")
    assert resumed.progress.step == 10
    resumed.train()
    assert torch.equal(weights(whole), weights(resumed))
    assert whole.progress.history == resumed.progress.history
    assert whole.evaluate() == resumed.evaluate()


def test_a_finished_run_has_the_average_of_its_weights(
    target: Transformer, examples: Examples, tmp_path: Path
) -> None:
    seen: list[torch.Tensor] = []
    running = trainer(target, examples, tmp_path)
    average = weights(running).clone()

    def remember(progress: Progress) -> bool:
        if progress.step > len(seen):
            seen.append(weights(running).clone())
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "choose_pace", lambda *_: Pace(96, 1))
        running.train(remember)
    for step, after in enumerate(seen):
        average.lerp_(after, 1 - min(0.9, (1 + step) / (WARMUP + step)))
    assert len(seen) == OPTIONS.max_steps
    torch.testing.assert_close(weights(running), average, rtol=1e-5, atol=1e-6)


def test_slow_steps_are_checkpointed_by_time(
    target: Transformer, examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "CHECKPOINT_SECONDS", 0.0)
    run = trainer(target, examples, tmp_path, Eagle3Options(**{**vars(OPTIONS), "checkpoint_every": 1000}))
    written: list[int] = []
    monkeypatch.setattr(run, "save", lambda: written.append(run.progress.step))
    run.train()
    assert written == [10, 20, 20]  # where a record ends, and at the end of the run


def test_a_finished_run_is_not_trained_again(
    target: Transformer, examples: Examples, whole: Recording
) -> None:
    again = trainer(target, examples, whole.path.parent)
    again.train()
    assert torch.equal(weights(whole), weights(again))
    assert not hasattr(again, "seen")


def test_another_seed_gives_other_weights(target: Transformer, examples: Examples, tmp_path: Path) -> None:
    results = []
    for seed in (0, 1):
        options = Eagle3Options(**{**vars(OPTIONS), "seed": seed, "max_steps": 3})
        run = trainer(target, examples, tmp_path / str(seed), options)
        run.train()
        results.append(weights(run))
    assert not torch.equal(*results)


def test_a_checkpoint_of_another_run_is_refused(
    target: Transformer, examples: Examples, tmp_path: Path
) -> None:
    trainer(target, examples, tmp_path).save()
    with pytest.raises(ConfigError, match="other options or data"):
        trainer(target, examples, tmp_path, Eagle3Options(**{**vars(OPTIONS), "unroll": 2}))


@pytest.mark.parametrize("loss", [*repeated("kl"), "lk"])
def test_the_head_learns_to_predict_its_target(
    target: Transformer, examples: Examples, tmp_path: Path, loss: str
) -> None:
    changed = {"max_steps": 60, "learning_rate": 1e-2, "loss": loss}
    run = trainer(target, examples, tmp_path, Eagle3Options(**{**vars(OPTIONS), **changed}))
    history = run.train().history
    assert history[-1].loss < 0.95 * history[0].loss
    assert history[-1].matches[0] > history[0].matches[0]


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 0.01
        return self.now


def test_within_its_minutes_a_run_has_no_more_epochs_than_asked_for(
    target: Transformer, examples: Examples, tmp_path: Path
) -> None:
    few = {"max_steps": None, "minutes": 600.0, "max_epochs": 2, "unroll": 1, "batch_tokens": 512}
    run = trainer(target, examples, tmp_path, Eagle3Options(**{**vars(OPTIONS), **few}))
    assert run.train().step == sum(
        len(epoch_batches(examples, run.chosen, 512, OPTIONS.seed, epoch, run.shares)) for epoch in range(2)
    )
    seen = [index for indices in run.seen for index in indices]
    assert sorted(seen) == sorted([*run.chosen, *run.chosen])


@pytest.mark.parametrize(("spent", "step_seconds"), [(0.0, 1.0), (0.0, 7.0), (30.0, 1.0), (99.0, 1.0)])
def test_a_run_ends_within_a_step_of_its_minutes(
    target: Transformer,
    examples: Examples,
    tmp_path: Path,
    spent: float,
    step_seconds: float,
) -> None:
    clock = Clock()

    class Slow(Trainer):
        def _backward(self, batch: Batch) -> StepLosses:
            clock.now += step_seconds
            return super()._backward(batch)

    options = Eagle3Options(**{**vars(OPTIONS), "max_steps": None, "minutes": 1.0, "unroll": 1})
    objective = Eagle3Objective(target, examples, options)
    run = Slow(objective, examples, options, tmp_path, spent=spent, clock=clock.monotonic)
    totals: list[int] = []

    def show(progress: Progress) -> bool:
        totals.append(progress.total)
        return True

    progress = run.train(show)
    assert totals[0] > 0, "about how many steps there will be is known before the first"
    assert run.finished
    assert progress.step == len(progress.history) - 1, "every slow step is recorded"
    end = 0.85 * 60  # the rest is for measuring
    assert progress.step == 1 if spent > end else end - step_seconds - 2 < progress.seconds < end + 1


def test_the_batch_is_chosen_by_speed_and_stays_in_a_resumed_run(
    target: Transformer, examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Eagle3Options(**{**vars(OPTIONS), "batch_tokens": None, "max_steps": 12})
    first = trainer(target, examples, tmp_path, options)
    stopped = first.train(lambda progress: progress.step < 10)
    assert (stopped.step, first.finished) == (10, False)
    assert stopped.pace is not None
    chosen = stopped.pace.batch_tokens

    def measured_again(*_: object) -> Pace:
        raise AssertionError("the pace is part of the checkpoint")

    monkeypatch.setattr(trainer_module, "choose_pace", measured_again)
    resumed = trainer(target, examples, tmp_path, options)
    assert resumed.train().pace == stopped.pace
    batches = all_batches(examples, resumed.chosen, chosen, options.seed)
    assert [*first.seen, *resumed.seen] == [tuple(one) for one in islice(batches, 12)]


@pytest.mark.parametrize(
    ("speed", "asked", "seconds", "expected"),
    [
        (1e6, None, None, Pace(8192, 10)),
        (1000.0, None, None, Pace(2048, 1)),  # 4096 would take more than 4 s
        (1000.0, None, 60.0, Pace(1024, 1)),  # 50 steps within a minute
        (100.0, None, None, Pace(512, 1)),
        (100.0, 4096, 60.0, Pace(4096, 1)),
        (1e6, 4096, None, Pace(4096, 10)),
    ],
)
def test_slow_devices_get_small_batches(
    speed: float, asked: int | None, seconds: float | None, expected: Pace
) -> None:
    assert choose_pace(speed, asked, seconds) == expected


def test_short_runs_have_a_short_warm_up() -> None:
    rates = [learning_rate(1.0, 100, step, 20) for step in range(20)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[3:] == sorted(rates[3:], reverse=True)


def test_the_history_begins_with_the_untrained_head(whole: Recording) -> None:
    progress = whole.progress
    assert [record.step for record in progress.history] == [0, 10, 20]
    assert [record.step for record in progress.held_out] == [0, 20]
    assert progress.held_out[-1].loss < progress.held_out[0].loss


def test_epochs_decide_the_number_of_steps(target: Transformer, examples: Examples, tmp_path: Path) -> None:
    options = Eagle3Options(**{**vars(OPTIONS), "max_steps": None, "epochs": 2, "batch_tokens": 400})
    run = trainer(target, examples, tmp_path, options)
    batches = [epoch_batches(examples, run.chosen, options.batch_tokens, 0, epoch) for epoch in range(2)]
    assert run.train().step == len(batches[0]) + len(batches[1])


def test_the_expected_length_multiplies_the_matches() -> None:
    assert Record(1, 0.0, [0.5, 0.5]).expected_length == 1.75


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs must be"),
        ({"held_out": 0.9}, "held_out must be"),
        ({"minutes": 1.0, "max_steps": 3}, "give one of them"),
        ({"weights": "chat"}, "such as chat=2,code=0.5"),
        ({"weights": "chat=0"}, "numbers above 0"),
        ({"epoch": 3}, "did you mean 'epochs'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Eagle3Options(**options)


class Threads:
    """The processes of a run, as threads of this test."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.barrier = threading.Barrier(number, timeout=60)
        self.given: dict[int, list[torch.Tensor]] = {}

    def of(self, rank: int) -> Member:
        return Member(self, rank)


class Member:
    def __init__(self, threads: Threads, rank: int) -> None:
        self.threads, self.rank, self.number = threads, rank, threads.number

    def average(self, tensors: Iterable[torch.Tensor]) -> None:
        own = list(tensors)
        self.threads.given[self.rank] = [tensor.clone() for tensor in own]
        self.threads.barrier.wait()
        for index, tensor in enumerate(own):
            total = sum(self.threads.given[rank][index] for rank in range(self.number))
            tensor.copy_(total / self.number)  # type: ignore[operator]
        self.threads.barrier.wait()

    def agree(self, value: int) -> int:
        return value


def test_processes_take_their_own_batches_and_end_with_the_same_weights(
    target: Transformer, examples: Examples, tmp_path: Path
) -> None:
    options = Eagle3Options(**{**vars(OPTIONS), "max_steps": 4})
    threads = Threads(2)
    members = [trainer(target, examples, tmp_path / "two", options, threads.of(rank)) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda member: member.train(), members))
    assert torch.equal(weights(members[0]), weights(members[1]))
    expected = [tuple(one) for one in islice(all_batches(examples, members[0].chosen, 96, 0), 8)]
    assert [
        batch for pair in zip(*(member.seen for member in members), strict=True) for batch in pair
    ] == expected
