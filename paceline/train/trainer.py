"""The training loop: batches in, a trained head out, resumable after a kill.

A checkpoint is one safetensors file, written to a temporary name and renamed: weights, the optimizer's
moments, the step and the history. The data order follows from seed and step, and nothing else is
random, so a resumed run continues bit for bit.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file

from paceline.errors import ConfigError
from paceline.train.batches import Batch, Indices, all_batches, collate, epoch_batches, split
from paceline.train.disk import writing
from paceline.train.examples import Examples
from paceline.train.losses import StepLosses
from paceline.train.objective import Objective
from paceline.train.options import TrainOptions
from paceline.train.processes import Processes, SingleProcess

TIMED_RECORDS = 9  # records whose median predicts the steps within `minutes`; compiling slows some of them
RECORD_EVERY = 10  # steps between two records of the history
CHECKPOINT_SECONDS = 300.0  # maximum between two checkpoints, if steps are slow
LOWEST_RATE = 0.02  # final fraction of the learning rate


@dataclass(frozen=True)
class Record:
    """Averages over some training steps."""

    step: int  # steps done
    loss: float  # weighted over the tokens ahead
    matches: list[float]  # [tokens ahead] fraction of predictions that were the target's best token

    @property
    def expected_length(self) -> float:
        """Estimated tokens per verification, if matches at different steps were independent."""
        return 1 + sum(math.prod(self.matches[: step + 1]) for step in range(len(self.matches)))


@dataclass
class Progress:
    """The state of a run; all of it is in the checkpoint."""

    step: int = 0
    total: int | None = None  # steps of the whole run; None until known
    seconds: float = 0.0  # spent so far, earlier runs included
    history: list[Record] = field(default_factory=list)


OnProgress = Callable[[Progress], None]


class Trainer:
    """Trains one head."""

    def __init__(
        self,
        objective: Objective,
        examples: Examples,
        options: TrainOptions,
        folder: Path,
        processes: Processes | None = None,
    ) -> None:
        """Checkpoints are written to `folder`, and resumed from there."""
        self.objective, self.options, self.examples = objective, options, examples
        self.processes = processes or SingleProcess()
        self.device = objective.target.embedding.device
        self.chosen, self.held_out = split(examples, options.held_out, options.seed)
        self.parameters = dict(objective.network.named_parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        weights = [options.step_decay**step for step in range(objective.num_steps)]
        self.weights = torch.tensor(weights, device=self.device)
        self._times: deque[float] = deque(maxlen=TIMED_RECORDS + 1)  # seconds at the latest records
        self.path = folder / "checkpoint.safetensors"
        self.progress = Progress(total=self._planned_steps())
        if self.path.is_file():
            self._load()

    def train(self, on_progress: OnProgress = lambda progress: None) -> Progress:
        """Train to the end. `on_progress` is called every RECORD_EVERY steps."""
        progress, options = self.progress, self.options
        started, before = time.monotonic(), progress.seconds
        batches = all_batches(self.examples, self.chosen, options.batch_tokens, options.seed)
        losses: list[StepLosses] = []
        saved = progress.seconds
        rank, number = self.processes.rank, self.processes.number
        for indices in islice(batches, progress.step * number + rank, None, number):
            if progress.total is not None and progress.step >= progress.total:
                break
            losses.append(self.step(indices))
            progress.step += 1
            progress.seconds = before + time.monotonic() - started
            if progress.step % RECORD_EVERY == 0:
                progress.history.append(self._record(losses))
                if not math.isfinite(progress.history[-1].loss):
                    raise ConfigError(
                        f"The loss is {progress.history[-1].loss} after {progress.step} steps: lower "
                        f"learning_rate, which is {options.learning_rate:g}, and start in another folder."
                    )
                losses = []
                self._plan()
                on_progress(progress)
            # only after a record, so that the history has no gap after a resume
            if not losses and self._is_due(saved):
                self.save()
                saved = progress.seconds
        self.save()
        return progress

    def _is_due(self, saved: float) -> bool:
        """Whether to write a checkpoint now; `saved` is the time of the last one, in seconds."""
        progress = self.progress
        late = progress.seconds - saved > CHECKPOINT_SECONDS
        return late or progress.step % self.options.checkpoint_every == 0

    def step(self, indices: Indices) -> StepLosses:
        """One optimizer step on the examples at these indices."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        losses = self.losses(indices)
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward((losses.losses * self.weights).sum())
        self.processes.average(
            parameter.grad for parameter in self.parameters.values() if parameter.grad is not None
        )
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.options.clip)
        self.optimizer.step()
        return StepLosses(losses.losses.detach(), losses.matches)

    def losses(self, indices: Indices) -> StepLosses:
        """The losses of a batch."""
        return self.objective.losses(collate(self.examples, indices, self.device))

    @torch.no_grad()
    def evaluate(self) -> Record | None:
        """Loss and matches on the held-out examples, with equal weight per batch; None if there are none."""
        losses = [self.objective.losses(batch) for batch in self.held_out_batches()]
        return self._record(losses) if losses else None

    def held_out_batches(self) -> Iterator[Batch]:
        """The held-out examples in batches."""
        for indices in epoch_batches(self.examples, self.held_out, self.options.batch_tokens, 0, 0):
            yield collate(self.examples, indices, self.device)

    def save(self) -> None:
        """Write the checkpoint; the old one stays until the new one is complete."""
        if self.processes.rank != 0:
            return
        tensors = {f"head.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            state = self.optimizer.state[parameter]
            tensors |= {f"{part}.{name}": state[part] for part in state}
        tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        progress = self.progress
        facts = {
            "run": self._run_facts(),
            "step": progress.step,
            "total": progress.total,
            "seconds": progress.seconds,
            "history": [[record.step, record.loss, record.matches] for record in progress.history],
        }
        unfinished = self.path.with_suffix(".unfinished")
        with writing(self.path, "Make room: the same command goes on from the checkpoint before."):
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                save_file(tensors, str(unfinished), {"facts": json.dumps(facts)})
                os.replace(unfinished, self.path)
            finally:
                unfinished.unlink(missing_ok=True)

    def _load(self) -> None:
        with safetensors.safe_open(str(self.path), framework="pt", device="cpu") as file:
            facts = json.loads(file.metadata()["facts"])
            if facts["run"] != self._run_facts():
                raise ConfigError(
                    f"{self.path} is of a run with other options or data ({facts['run']}); this one has "
                    f"{self._run_facts()}. Give the same ones to go on, or another folder."
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        self.objective.network.load_state_dict({name: tensors[f"head.{name}"] for name in self.parameters})
        parts = {name.split(".", 1)[0] for name in tensors} - {"head"}
        state = {
            index: {part: tensors[f"{part}.{name}"] for part in parts}
            for index, name in enumerate(self.parameters)
        }
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state if parts else {}, "param_groups": groups})
        history = [Record(*record) for record in facts["history"]]
        self.progress = Progress(facts["step"], facts["total"], facts["seconds"], history)

    def _run_facts(self) -> dict[str, Any]:
        """What must be equal for a run to be resumed."""
        options = dict(vars(self.options))
        options.pop("checkpoint_every")
        sizes = {"examples": len(self.examples), "tokens": len(self.examples.tokens)}
        head = {"method": self.objective.method, "start": self.objective.start}
        return {**head, **options, **sizes, "processes": self.processes.number}

    def _planned_steps(self) -> int | None:
        """The number of steps, if it is known before the run."""
        options = self.options
        if options.minutes is not None:
            return None
        if options.max_steps is not None:
            return options.max_steps
        batches = sum(
            len(epoch_batches(self.examples, self.chosen, options.batch_tokens, options.seed, epoch))
            for epoch in range(options.epochs)
        )
        return -(-batches // self.processes.number)

    def _plan(self) -> None:
        """Compute how many steps fit into `minutes`; repeated until half of them are done."""
        progress = self.progress
        settled = progress.total is not None and progress.step > progress.total / 2
        if self.options.minutes is None or settled:
            return
        self._times.append(progress.seconds)
        if len(self._times) > 3:
            records = [after - before for before, after in pairwise(self._times)]
            left = (self.options.minutes * 60 - progress.seconds) / statistics.median(records)
            progress.total = self.processes.agree(progress.step + max(0, int(left * RECORD_EVERY)))

    def _learning_rate(self) -> float:
        """Warm-up, then a half cosine down to LOWEST_RATE."""
        options, progress = self.options, self.progress
        rate = options.learning_rate
        if progress.step < options.warmup_steps:
            return rate * (progress.step + 1) / options.warmup_steps
        if progress.total is None:
            return rate
        done = (progress.step - options.warmup_steps) / max(1, progress.total - options.warmup_steps)
        return rate * (LOWEST_RATE + (1 - LOWEST_RATE) * (1 + math.cos(math.pi * min(1.0, done))) / 2)

    def _record(self, losses: list[StepLosses]) -> Record:
        mean = torch.stack([each.losses for each in losses]).mean(0)
        matches = torch.stack([each.matches for each in losses]).mean(0)
        return Record(self.progress.step, float((mean * self.weights).sum()), matches.tolist())
