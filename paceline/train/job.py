"""The `paceline train` commands: answer, train, measure, write, and report on the terminal."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from paceline.errors import ConfigError
from paceline.models.registry import load_checkpoint, resolve
from paceline.train.card import Measured, write_report
from paceline.train.disk import make_folder, writing
from paceline.train.examples import is_answers
from paceline.train.make_answers import Answered, AnswerOptions, make_answers
from paceline.train.options import TrainOptions
from paceline.train.processes import processes_on, started_by_torchrun
from paceline.train.run import Start, Trained, train_head
from paceline.train.show import answering_progress, show_measured, training_progress


@dataclass(frozen=True)
class Job:
    """The options of a training command that do not depend on the kind of head."""

    model: str
    data: Sequence[Path]  # prompts or answers
    out: Path  # folder of the head
    device: str  # cpu, cuda or auto
    evaluate: int  # number of held-out prompts to measure the head with
    answering: AnswerOptions


def train(job: Job, options: TrainOptions, start: Start) -> None:
    """Answer the prompts, train the head that `start` creates, measure it, and write everything."""
    is_answer = [is_answers(path) for path in job.data]
    prompts = [path for path, answered in zip(job.data, is_answer, strict=True) if not answered]
    answers = [path for path, answered in zip(job.data, is_answer, strict=True) if answered]
    model, device = resolve(job.model), chosen_device(job.device)
    make_folder(job.out)
    if prompts or job.answering.self_written:
        if started_by_torchrun():
            raise ConfigError(
                "torchrun only trains: let one process answer the prompts, with `paceline train answers`, "
                "and give its file as --data."
            )
        answers.append(job.out / "answers.jsonl")
        answer(model, prompts, answers[-1], job.answering, device)
    processes, own_device = processes_on(device)
    smaller = "a smaller --batch-tokens and another folder"
    with _enough_memory(smaller), training_progress(visible=processes.rank == 0) as show:
        checkpoint = load_checkpoint(model)
        trained = train_head(checkpoint, answers, job.out, options, own_device, start, show, processes)
    if processes.rank != 0:
        return
    with writing(job.out, "Make room: the same command writes the head, nothing is trained again."):
        trained.objective.snapshot()(job.out)
        write_report(trained, model.name, options, {}, job.out)  # in case the measurement fails
    measured = _measure(model, device, trained, job.out, job.evaluate, options.seed)
    with writing(job.out, "Make room: the same command measures the head again."):
        write_report(trained, model.name, options, measured, job.out)
    print(
        f"The head is in {job.out}: serve with --draft {trained.objective.method}:{job.out}", file=sys.stderr
    )


def answer(model: Path, prompts: Sequence[Path], out: Path, options: AnswerOptions, device: str) -> None:
    """Let the target answer prompts into the file `out`, and report how many rows were skipped."""
    with _enough_memory("smaller --max-prompt-tokens and --max-tokens"), answering_progress() as show:

        def on_progress(answered: Answered) -> bool:
            show(answered)
            return True

        answered = make_answers(model, prompts, out, options, device, on_progress)
    gc.collect()  # free the engine's GPU memory for training
    for line in answered.skipped.lines():
        print(line, file=sys.stderr)
    if not answered.answers:
        raise ConfigError(
            "None of the prompts can be used: give others, or let the model write --self-written."
        )
    print(f"{answered.answers} answers, {answered.tokens} tokens: {out}", file=sys.stderr)


@contextmanager
def _enough_memory(smaller: str) -> Iterator[None]:
    """A context in which running out of GPU memory raises an error that says what to make smaller."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"The GPU has not enough free memory: give {smaller}, or end what else runs there. ({error})"
        ) from error


def _measure(model: Path, device: str, trained: Trained, out: Path, number: int, seed: int) -> Measured:
    """Tokens per pass on held-out prompts: of the head, of the head before training, and of n-gram drafts."""
    from paceline.llm import LLM
    from paceline.train.evaluation import contestants, held_out_prompts, tokens_per_pass

    prompts = held_out_prompts(trained.examples, trained.held_out_examples, number, seed)
    if not prompts:
        return {}
    objective = trained.objective
    with TemporaryDirectory() as before:
        trained.write_untrained(Path(before))
        measured = tokens_per_pass(
            lambda config: LLM(str(model), device=device, speculative_config=config),
            prompts,
            contestants(objective.method, out, Path(before), objective.start),
        )
    show_measured(measured, len(prompts))
    return measured


def chosen_device(wanted: str) -> str:
    """The device that cpu, cuda, cuda:1 or auto means; ConfigError if this machine lacks it."""
    available = torch.cuda.is_available()
    if wanted == "auto":
        return "cuda" if available else "cpu"
    name, _, number = wanted.partition(":")
    if name not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise ConfigError(f"device must be cpu, cuda or auto, got {wanted!r}.")
    if name == "cuda" and (not available or int(number or 0) >= torch.cuda.device_count()):
        raise ConfigError(f"There is no device {wanted} that torch can use here: give --device cpu.")
    return wanted
