"""The training loop: batches in, a trained head out, resumable after a kill.

A checkpoint is one safetensors file, written to a temporary name and renamed: weights, the optimizer's
moments, and the progress. The data order follows from seed, step and the size of a batch, which is part
of the progress, and nothing else is random, so a resumed run continues bit for bit.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file

from paceline.errors import ConfigError
from paceline.train.data.examples import Examples
from paceline.train.disk import writing
from paceline.train.loop.average import WeightAverage
from paceline.train.loop.batches import (
    Batch,
    Indices,
    all_batches,
    collate,
    epoch_batches,
    segment_shares,
    split,
)
from paceline.train.loop.checks import CHECKED_BATCHES, AcceptanceChecks
from paceline.train.loop.processes import Processes, SingleProcess
from paceline.train.loop.progress import (
    MAX_BATCH_TOKENS,
    MIN_BATCH_TOKENS,
    Pace,
    Progress,
    Record,
    choose_pace,
    learning_rate,
)
from paceline.train.loop.rounding import rounded_weights
from paceline.train.objectives.losses import StepLosses
from paceline.train.objectives.objective import Objective
from paceline.train.options import TrainOptions

CHECKPOINT = "checkpoint.safetensors"  # in the folder of the head
TIMED_RECORDS = 9  # records whose median predicts the steps within `minutes`; compiling slows some of them
CHECKPOINT_SECONDS = 300.0  # maximum between two checkpoints, if steps are slow
PROBES = 4  # measured steps: the first ones compile on a GPU
PLANNED = 0.9  # of the steps: until then their number follows the time of a step
UNTIMED_RECORDS = 8  # planned at least, because the first steps may have been slow for other reasons
PROBE_SECONDS = 2.0  # after which no second one is measured, where nothing is compiled
HELD_OUT_BATCHES = 32  # evaluated at the end, at most
CURVE_BATCHES = 4  # of them, evaluated at steps 0, 16, 32, 64, ...
CURVE_FROM = 16  # steps
LAST_SHARE = 0.15  # of `minutes`, kept for measuring the head

OnProgress = Callable[[Progress], bool]  # returns whether to continue


class Trainer:
    """Trains one head."""

    def __init__(
        self,
        objective: Objective,
        examples: Examples,
        options: TrainOptions,
        folder: Path | None,
        processes: Processes | None = None,
        *,
        spent: float = 0.0,
        data: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Checkpoints are written to `folder`, and resumed from there; None: there are none.

        `spent`: seconds of `minutes` that this process has used so far; `data`: what the examples come
        from. A run is resumed with the same data only. `minutes` are those of `clock`.
        """
        self.objective, self.options, self.examples = objective, options, examples
        self.processes = processes or SingleProcess()
        self.device = objective.target.embedding.device
        self.chosen, self.held_out = split(examples, options.held_out, options.seed)
        self.shares = segment_shares(examples, options.segment_weights)
        self.parameters = dict(objective.network.named_parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.average = WeightAverage(self.parameters, options.average)
        self.checks = AcceptanceChecks(objective, self.average, options)
        self.weights = torch.tensor(options.step_weights(objective.num_steps), device=self.device)
        self._data = dict(data or {})
        self._times: deque[float] = deque(maxlen=TIMED_RECORDS + 1)  # seconds at the latest records
        self.path = None if folder is None else folder / CHECKPOINT
        self.progress = Progress()
        self._clock = clock
        if self.path is not None and self.path.is_file():
            self._load(self.path)
        self.progress.seconds += spent

    def train(
        self,
        on_progress: OnProgress = lambda progress: True,
        begin_step: Callable[[], bool] = lambda: True,
    ) -> Progress:
        """Train to the end, or until `on_progress` or `begin_step` returns False.

        `on_progress` is called after every record, and once before the first step; `begin_step` before every
        step.
        """
        progress, options = self.progress, self.options
        started = self._clock() - progress.seconds
        pace = progress.pace or self._first_step()
        batches = all_batches(self.examples, self.chosen, pace.batch_tokens, options.seed, self.shares)
        losses: list[StepLosses] = []
        self._check_acceptance()
        progress.seconds = saved = self._clock() - started
        rank, number = self.processes.rank, self.processes.number
        go_on = self._agree_to(on_progress(progress))
        for indices in islice(batches, progress.step * number + rank, None, number):
            if not go_on or progress.step >= progress.total or not self._agree_to(begin_step()):
                break
            losses.append(self.step(indices))
            progress.step += 1
            if progress.step % pace.record_every == 0:
                self._add_record(losses)
                losses = []
                progress.seconds = self._clock() - started
                self._plan(pace)
                self._check_acceptance()
                go_on = self._agree_to(on_progress(progress))
            # only after a record, so that the history has no gap after a resume
            if not losses and self._is_due(saved):
                self.save()
                saved = progress.seconds
        if losses:
            self._add_record(losses)
            self._check_acceptance()
        progress.seconds = self._clock() - started
        self.save()
        if self.finished:
            self.checks.apply()
        return progress

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return 0 < self.progress.total <= self.progress.step

    def _first_step(self) -> Pace:
        """Measure a small step, which changes nothing, and choose the pace by its time."""
        progress, options = self.progress, self.options
        # a small batch would show a GPU's overhead, not its speed
        most = MAX_BATCH_TOKENS if self.device.type == "cuda" else MIN_BATCH_TOKENS
        small = options.batch_tokens or most
        small = small if self.device.type == "cuda" else min(small, most)
        batch = collate(
            self.examples,
            epoch_batches(self.examples, self.chosen, small, options.seed, 0, self.shares)[0],
            self.device,
        )
        times: list[float] = []
        while len(times) < PROBES and (self.device.type == "cuda" or sum(times) < PROBE_SECONDS):
            start = self._clock()
            losses = self._backward(batch)
            untrained = self._record([losses])  # waits for the device
            times.append(self._clock() - start)
        self.optimizer.zero_grad(set_to_none=True)
        left = None if options.minutes is None else self._end() - progress.seconds - sum(times)
        pace = choose_pace(batch.tokens.numel() / min(times), options.batch_tokens, left)
        pace = Pace(self.processes.agree(pace.batch_tokens), self.processes.agree(pace.record_every))
        progress.pace, progress.history = pace, [untrained]
        progress.step_seconds = min(times) * pace.batch_tokens / batch.tokens.numel()
        if (held_out := self.evaluate(CURVE_BATCHES)) is not None:
            progress.held_out.append(held_out)
        progress.total = self._planned_steps(pace, left)
        return pace

    def _add_record(self, losses: list[StepLosses]) -> None:
        """Append these steps to the history, and what is held out where its curve has a point."""
        progress = self.progress
        record = self._record(losses)
        if not math.isfinite(record.loss):
            raise ConfigError(
                f"The loss is {record.loss} after {progress.step} steps: lower --learning-rate, which is "
                f"{self.options.learning_rate:g}, and start in another folder."
            )
        progress.history.append(record)
        doublings = math.log2(progress.step / CURVE_FROM)
        last = progress.held_out[-1].step if progress.held_out else 0
        if doublings >= 0 and CURVE_FROM * 2 ** int(doublings) > last:
            progress.held_out += [record for record in [self.evaluate(CURVE_BATCHES)] if record is not None]

    def _check_acceptance(self) -> None:
        """Measure acceptance where a check is due, and end the run if it has fallen."""
        progress = self.progress
        if not len(self.held_out) or not self.checks.is_due(progress):
            return
        self.checks.measure(progress, islice(self.held_out_batches(), CHECKED_BATCHES))
        if not self._agree_to(not self.checks.has_fallen(progress)):
            progress.total = progress.step

    def _agree_to(self, go_on: bool) -> bool:
        """Whether to continue, as rank 0 decides."""
        return bool(self.processes.agree(int(go_on)))

    def _is_due(self, saved: float) -> bool:
        """Whether to write a checkpoint now; `saved` is the time of the last one, in seconds."""
        progress = self.progress
        late = progress.seconds - saved > CHECKPOINT_SECONDS
        return late or progress.step % self.options.checkpoint_every == 0

    def step(self, indices: Indices) -> StepLosses:
        """One optimizer step on the examples at these indices."""
        options, progress = self.options, self.progress
        rate = learning_rate(options.learning_rate, options.warmup_steps, progress.step, progress.total)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        losses = self._backward(collate(self.examples, indices, self.device))
        self.processes.average(
            parameter.grad for parameter in self.parameters.values() if parameter.grad is not None
        )
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), options.clip)
        self.optimizer.step()
        self.average.update(progress.step)
        return losses

    def _backward(self, batch: Batch) -> StepLosses:
        """The losses of a batch, with their gradients in the parameters."""
        is_rounded = self.options.round_weights and 2 * self.progress.step >= self.progress.total > 0
        with rounded_weights(self.parameters) if is_rounded else nullcontext():
            losses = self.objective.losses(batch)
            self.optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward((losses.losses * self.weights).sum())
        return StepLosses(losses.losses.detach(), losses.matches)

    @torch.no_grad()
    def evaluate(self, batches: int = HELD_OUT_BATCHES) -> Record | None:
        """Loss and matches on this many held-out batches, with equal weight; None if there are none."""
        losses = [self.objective.losses(batch) for batch in islice(self.held_out_batches(), batches)]
        return self._record(losses) if losses else None

    def held_out_batches(self) -> Iterator[Batch]:
        """The held-out examples in batches, HELD_OUT_BATCHES at most."""
        assert self.progress.pace is not None
        size = self.progress.pace.batch_tokens
        for indices in epoch_batches(self.examples, self.held_out, size, 0, 0)[:HELD_OUT_BATCHES]:
            yield collate(self.examples, indices, self.device)

    def save(self) -> None:
        """Write the checkpoint; the old one stays until the new one is complete."""
        if self.processes.rank != 0 or self.path is None:
            return
        tensors = {f"head.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            state = self.optimizer.state[parameter]
            tensors |= {f"{part}.{name}": state[part] for part in state}
        tensors |= {f"average.{name}": tensor for name, tensor in self.average.tensors.items()}
        tensors |= {f"best.{name}": tensor for name, tensor in self.checks.best.items()}
        tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        facts = {"run": self._run_facts(), "progress": self.progress.facts()}
        unfinished = self.path.with_suffix(".unfinished")
        with writing(self.path, "Make room: the same command continues from the previous checkpoint."):
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                save_file(tensors, str(unfinished), {"facts": json.dumps(facts)})
                os.replace(unfinished, self.path)
            finally:
                unfinished.unlink(missing_ok=True)

    def _load(self, path: Path) -> None:
        with safetensors.safe_open(str(path), framework="pt", device="cpu") as file:
            facts = json.loads(file.metadata()["facts"])
            self._check_run(facts["run"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        self.objective.network.load_state_dict({name: tensors[f"head.{name}"] for name in self.parameters})
        self.average.load({name: tensors[f"average.{name}"] for name in self.average.tensors})
        best = {name: tensors[f"best.{name}"] for name in self.parameters if f"best.{name}" in tensors}
        self.checks.load(best)
        parts = {name.split(".", 1)[0] for name in tensors} - {"head", "average", "best"}
        state = {
            index: {part: tensors[f"{part}.{name}"] for part in parts}
            for index, name in enumerate(self.parameters)
        }
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state if parts else {}, "param_groups": groups})
        self.progress = Progress.of(facts["progress"])

    def _check_run(self, run: Mapping[str, Any]) -> None:
        """ConfigError, with what differs, if the checkpoint is of another run."""
        ours: dict[str, Any] = json.loads(json.dumps(self._run_facts()))
        differing = [name for name in {**run, **ours} if run.get(name) != ours.get(name)]
        if differing:
            changes = ", ".join(f"{name} {run.get(name)!r} (now {ours.get(name)!r})" for name in differing)
            raise ConfigError(
                f"{self.path} is of a run with other options or data: {changes}. Give the same ones to go "
                "on, or another folder with --out."
            )

    def _run_facts(self) -> dict[str, Any]:
        """What must be equal for a run to be resumed."""
        options = dict(vars(self.options))
        options.pop("checkpoint_every")
        sizes = {"examples": len(self.examples), "tokens": len(self.examples.tokens)}
        head = {"method": self.objective.method, "start": self.objective.start, "batches": "packed"}
        return {**head, **options, **sizes, **self._data, "processes": self.processes.number}

    def _end(self) -> float:
        """The `seconds` of the progress at which training ends, if `minutes` are given."""
        return (1 - LAST_SHARE) * 60 * (self.options.minutes or 0.0)

    def _planned_steps(self, pace: Pace, left: float | None) -> int:
        """The number of steps; within `left` seconds an estimate, which _plan improves."""
        options = self.options
        if left is not None:
            fitting = max(UNTIMED_RECORDS * pace.record_every, int(left / self.progress.step_seconds))
            return self.processes.agree(min(fitting, self._most_steps(pace)))
        return options.max_steps or self._steps_of(options.epochs, pace)

    def _most_steps(self, pace: Pace) -> int:
        """The most steps within `minutes`."""
        epochs = self.options.max_epochs
        return sys.maxsize if epochs is None else self._steps_of(epochs, pace)

    def _steps_of(self, epochs: int, pace: Pace) -> int:
        """The number of steps of that number of passes over the examples."""
        size, seed = pace.batch_tokens, self.options.seed
        batches = sum(
            len(epoch_batches(self.examples, self.chosen, size, seed, epoch, self.shares))
            for epoch in range(epochs)
        )
        return -(-batches // self.processes.number)

    def _plan(self, pace: Pace) -> None:
        """Compute how many steps fit into `minutes`: until PLANNED of them are done, and when time is up."""
        progress = self.progress
        self._times.append(progress.seconds)
        timed = len(self._times) > 3
        if timed:
            records = [after - before for before, after in pairwise(self._times)]
            progress.step_seconds = statistics.median(records) / pace.record_every
        if self.options.minutes is None:
            return
        total, left = progress.total, self._end() - progress.seconds
        if timed and progress.step <= PLANNED * total:
            fitting = progress.step + max(0, int(left / progress.step_seconds))
            total = min(fitting, self._most_steps(pace))
        is_over = left < (progress.step_seconds if timed else 0.0)
        progress.total = self.processes.agree(progress.step if is_over else total)

    def _record(self, losses: list[StepLosses]) -> Record:
        mean = torch.stack([each.losses for each in losses]).mean(0)
        matches = torch.stack([each.matches for each in losses]).mean(0)
        return Record(self.progress.step, float((mean * self.weights).sum()), matches.tolist())
