"""fine_tune: from a store of traffic and a head to a candidate that may replace it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.learn.data.rows import TrafficRow
from paceline.learn.data.selection import Selection, choose, examples_of, generic_rows
from paceline.learn.data.store import TrafficStore
from paceline.learn.training.early_stop import EarlyStop, Kept
from paceline.learn.training.limits import load_target_beside_server
from paceline.learn.training.objectives import objective_for, options_for
from paceline.learn.training.yielding import Yielding
from paceline.models.checkpoint import Checkpoint
from paceline.models.heads.checkpoint import WEIGHTS, HeadCheckpoint, load_head
from paceline.models.heads.config import TargetName
from paceline.models.heads.fingerprint import check_target, head_fingerprint, target_fingerprint
from paceline.options import check_integer, refuse_unknown
from paceline.train.data.examples import Examples
from paceline.train.disk import make_folder, writing
from paceline.train.loop.progress import Progress
from paceline.train.loop.trainer import Trainer
from paceline.train.options import TrainOptions

CANDIDATE = "candidate.json"  # renamed to this last: without it there is no candidate
MAX_EPOCHS = 3  # passes over the rows of a training, at most
GPU_BATCH_TOKENS = 2048  # of a step: requests stand still meanwhile
UNFINISHED = "candidate.json.unfinished"
OnProgress = Callable[[Progress, Kept | None], None]  # the steps so far, and the head if it was measured


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class FineTuneOptions:
    """How a head is trained further. The trainer's other options are those of `paceline train`."""

    steps: int | None = None
    minutes: float | None = None  # of work: waiting does not count
    learning_rate: float = 1e-4
    batch_tokens: int | None = None  # per step; None: by the speed of a CPU; GPU_BATCH_TOKENS on a GPU
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ConfigError("Say how long to train: give either --steps or --minutes.")
        if self.steps is not None:
            check_integer(ConfigError, "steps", self.steps, 1, None)


@dataclass(frozen=True)
class Candidate:
    """A head that was trained further, with its evidence; candidate.json has the same fields."""

    method: str
    target: str  # fingerprint
    parent: str  # fingerprint of the head that it was trained from
    rows: Mapping[str, int]
    steps: int  # of the weights that are kept
    seconds: float  # of training, waiting not counted
    before: Mapping[str, float]  # tokens per pass of the parent on held-back rows, by group
    after: Mapping[str, float]
    trained: float = 0.0  # when it was begun, in seconds since 1970: later rows are new for the next one
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def gains(self) -> bool:
        """Whether the training has gained anything."""
        return self.steps > 0


def fine_tune(
    checkpoint: Checkpoint,
    store: Path,
    head: Path,
    out: Path,
    options: FineTuneOptions,
    selection: Selection | None = None,
    generic: Sequence[Path] = (),
    device: str = "cpu",
    yielding: Yielding | None = None,
    on_progress: OnProgress = lambda progress, kept: None,
) -> Candidate | None:
    """Train the head on the store's rows, and write what drafts best on held-back rows to `out`.

    None if it was stopped. A candidate that gains nothing is not written. ConfigError if the store or the
    head belongs to another target, if there are too few rows, or if the loss is not a number.
    """
    selection, yielding = selection or Selection(), yielding or Yielding()
    config = checkpoint.config
    name = TargetName(target_fingerprint(checkpoint), checkpoint.source.name)
    traffic = TrafficStore(store, name)
    parent = load_head(head)
    check_target(parent.config, config, name.fingerprint, str(head))
    learning = _train_options(parent, options, selection, device)
    old = generic_rows(generic, config.vocab_size, selection.max_length)
    began, chosen = time.time(), choose(traffic.rows(), old, selection)
    remove_candidate(out, head)
    make_folder(out, mode=0o700)  # a head can reveal what it was trained on
    objective = objective_for(parent, load_target_beside_server(checkpoint, device), name, learning)

    def examples(rows: Sequence[TrafficRow]) -> Examples:
        return examples_of(rows, config.vocab_size, selection.max_length)

    yielding.begin_step()  # what follows loads kernels
    held_back = {group: examples(rows) for group, rows in chosen.stop.items()}
    stopping = EarlyStop(objective, held_back, yielding.begin_step)
    trainer = Trainer(objective, examples(chosen.train), learning, None, clock=yielding.now)
    progress = _train(trainer, stopping, yielding, on_progress)
    if yielding.stopped:
        return None
    best = stopping.best
    candidate = Candidate(
        method=objective.method,
        target=name.fingerprint,
        parent=head_fingerprint(head),
        rows=chosen.counts,
        steps=best.step,
        seconds=round(progress.seconds, 1),
        before=dict(stopping.before.scores),
        after=dict(best.scores),
        trained=began,
        options={**asdict(options), **asdict(selection), "steps_done": progress.step},
    )
    if candidate.gains:
        _write(candidate, best, out)
    return candidate


def _train_options(
    head: HeadCheckpoint, options: FineTuneOptions, selection: Selection, device: str
) -> TrainOptions:
    """The trainer's options. It holds out no rows itself, because the early stop does."""
    return options_for(
        head,
        max_steps=options.steps,
        minutes=options.minutes,
        max_epochs=None if options.minutes is None else MAX_EPOCHS,
        learning_rate=options.learning_rate,
        batch_tokens=options.batch_tokens or (None if device == "cpu" else GPU_BATCH_TOKENS),
        seed=options.seed,
        max_length=selection.max_length,
        held_out=0.0,
    )


def _train(trainer: Trainer, stopping: EarlyStop, yielding: Yielding, report: OnProgress) -> Progress:
    """Train until the steps are done, the head no longer improves, or `yielding` stops it."""

    def on_progress(progress: Progress) -> bool:
        if progress.step == 0:
            report(progress, stopping.before)
            return True
        if not stopping.is_due(progress) and not trainer.finished:
            report(progress, None)
            return True
        go_on = stopping.evaluate(progress.step)
        report(progress, stopping.last)
        return go_on

    progress = trainer.train(on_progress, yielding.begin_step)
    if trainer.finished and stopping.last.step < progress.step:  # the last steps made no record
        on_progress(progress)
    return progress


def read_candidate(folder: Path) -> Candidate | None:
    """The candidate in a folder; None if there is none, or its trainer was killed while it wrote."""
    try:
        return Candidate(**json.loads((folder / CANDIDATE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def remove_candidate(folder: Path, parent: Path) -> None:
    """Delete a candidate, complete or not; ConfigError if the folder has a head that is not a candidate.

    Its note is deleted last, so that after a kill the folder is still recognized as a candidate's.
    """
    notes = [folder / CANDIDATE, folder / UNFINISHED]
    if not any(note.exists() for note in notes):
        if folder.resolve() == parent.resolve() or (folder / WEIGHTS[0]).exists():
            raise ConfigError(f"{folder} has a head that is no candidate: give another --out.")
        return
    with writing(folder, "Give another folder with --out."):
        if notes[0].exists():
            os.replace(*notes)
        for name in (WEIGHTS[0], "config.json", UNFINISHED):
            (folder / name).unlink(missing_ok=True)


def _write(candidate: Candidate, best: Kept, out: Path) -> None:
    """Write the head and then its note: a kill leaves no candidate or a complete one."""
    with writing(out, "Make room, and train again."):
        (out / UNFINISHED).write_text(json.dumps(asdict(candidate), indent=1) + "\n")
        best.write(out)
        os.replace(out / UNFINISHED, out / CANDIDATE)
