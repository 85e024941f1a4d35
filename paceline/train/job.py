"""The `paceline train` commands: answer, train, measure, write, and report on the terminal."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from paceline.errors import ConfigError
from paceline.kv.pages import pages_for
from paceline.models.registry import load_checkpoint, resolve
from paceline.terminal.session import Interrupt, announce_compilation, note
from paceline.train.data.examples import is_answers
from paceline.train.data.make_answers import AnswerOptions, engine_options, make_answers
from paceline.train.disk import make_folder, writing
from paceline.train.loop.processes import processes_on, started_by_torchrun
from paceline.train.loop.progress import Stopped
from paceline.train.loop.trainer import CHECKPOINT
from paceline.train.objectives.objective import NEW
from paceline.train.options import TrainOptions
from paceline.train.report.card import Measured, serve_command, write_report
from paceline.train.report.show import answering_progress, duration, show_measured, training_progress
from paceline.train.run import Start, Trained, train_head
from paceline.words import counted

if TYPE_CHECKING:
    from paceline.llm import LLM

ANSWERING_SHARE = 1 / 3  # of `minutes`, at most
MIN_MEASURING = 5.0  # seconds, whatever is left of `minutes`
FEW_STEPS = 100  # a shorter run gets a warning
MIN_COVERAGE = 0.95  # of the answered tokens: a head with a smaller vocabulary gets a warning
VOCABULARY_REMEDIES = {
    True: "Give a larger --draft-vocab-size.",
    False: "It is that of --init-from: train a new head instead.",
}
HEAD_ROOM = 2  # times the target's keys and values: a head's pages and features count too
INTERRUPTED = 130  # exit status after Ctrl-C, as of a shell


@dataclass(frozen=True)
class Job:
    """The options of a training command that do not depend on the kind of head."""

    model: str
    data: Sequence[Path]  # prompts or answers
    out: Path  # folder of the head
    device: str  # cpu, cuda or auto
    evaluate: int  # number of held-out prompts to measure the head with
    answering: AnswerOptions
    exclude: Sequence[Path] = ()  # prompts that must not be answered


def train(job: Job, options: TrainOptions, start: Start) -> None:
    """Answer the prompts, train the head that `start` creates, measure it, and write everything."""
    started = time.monotonic()
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
        limit = None if options.minutes is None else ANSWERING_SHARE * 60 * options.minutes
        if limit is None or not (job.out / CHECKPOINT).exists():  # what a third of the minutes gave stays
            answer(model, prompts, answers[-1], job.answering, device, limit, job.exclude)
    processes, own_device = processes_on(device)
    smaller = "a smaller --batch-tokens and another folder"
    with (
        _enough_memory(smaller),
        Interrupt() as interrupt,
        _resumable(job.out),
        training_progress(interrupt, visible=processes.rank == 0) as show,
    ):
        trained = train_head(
            load_checkpoint(model),
            answers,
            job.out,
            options,
            own_device,
            start,
            show,
            processes,
            spent=time.monotonic() - started,
            data={"prompts": [f"{path.name}, {path.stat().st_size} bytes" for path in prompts]},
        )
    if processes.rank != 0:
        return
    _warn(trained)
    with writing(job.out, "Make room: the same command writes the head, nothing is trained again."):
        trained.objective.snapshot()(job.out)
        write_report(trained, job.model, options, {}, job.out)  # in case the measurement fails
    use = f"The head is in {job.out}. Serve it: {serve_command(job.model, trained.objective.method, job.out)}"
    left = None
    if options.minutes is not None:
        left = max(MIN_MEASURING, started + 60 * options.minutes - time.monotonic())
    try:
        measured = _measure(model, device, trained, job.out, job.evaluate, options.seed, left)
    except KeyboardInterrupt:
        note(f"Interrupted while measuring. {use}\nThe same command measures it again, and trains no more.")
        raise SystemExit(INTERRUPTED) from None
    with writing(job.out, "Make room: the same command measures the head again."):
        write_report(trained, job.model, options, measured, job.out)
    if trained.progress.step < FEW_STEPS:
        learned = counted(len(trained.examples), "answers")
        note(
            f"Trained for few steps ({trained.progress.step}, on {learned}), a head "
            "guesses badly: more --minutes and another --out, or a GPU, make a better one."
        )
    note(use)


def _warn(trained: Trained) -> None:
    """Say what keeps the head from guessing well."""
    if trained.coverage < MIN_COVERAGE:
        note(
            f"warning: the draft vocabulary ({len(trained.objective.draft_ids)} tokens) covers only "
            f"{100 * trained.coverage:.0f} % of the answered tokens; the head can never guess the others. "
            f"{VOCABULARY_REMEDIES[trained.objective.start == NEW]}"
        )
    if (best := trained.progress.best) is not None and best.step == 0:
        note(
            "warning: no weights of this run guess held-out answers better than its initial weights, "
            "which are written. Give more data, another --learning-rate, or --checks 0 for the last weights."
        )


def answer(
    model: Path,
    prompts: Sequence[Path],
    out: Path,
    options: AnswerOptions,
    device: str,
    seconds: float | None = None,
    exclude: Sequence[Path] = (),
) -> None:
    """Let the target answer prompts into the file `out`, and report how many rows were skipped.

    `seconds`: for this long at most. `exclude`: files of prompts that must not be trained on.
    """
    smaller = "smaller --max-prompt-tokens and --max-tokens"
    if device == "cpu":
        announce_compilation()
    with (
        _enough_memory(smaller),
        Interrupt() as interrupt,
        answering_progress(interrupt, seconds) as show,
    ):
        answered = make_answers(model, prompts, out, options, device, show, seconds, exclude)
    gc.collect()  # free the engine's GPU memory for training
    if interrupt.asked:
        note(
            f"Interrupted: {answered.answers} of {answered.total} answers are kept in {out}. The same "
            "command continues from there."
        )
        raise SystemExit(INTERRUPTED)
    for line in answered.skipped.lines():
        note(line)
    if not answered.answers and answered.total:
        raise ConfigError(
            f"No prompt was answered within {seconds or 0:.0f} s, which is a third of --minutes: give more "
            "minutes, or let nothing else run here."
        )
    if not answered.answers:
        raise ConfigError(
            "None of the prompts can be used: give others, or let the model write --self-written."
        )
    answers, tokens = counted(answered.answers, "answers"), counted(answered.tokens, "tokens")
    many = "" if answered.complete else f" of {answered.total}, as many as a third of --minutes gave"
    note(f"{answers}{many}, {tokens}: {out}")


@contextmanager
def _resumable(out: Path) -> Iterator[None]:
    """A context in which a stopped run ends the command and prints what was kept and how to continue."""
    try:
        yield
    except Stopped as stopped:
        progress = stopped.progress
        note(
            f"Interrupted: {progress.step} of {progress.total} steps are kept in {out / CHECKPOINT}. "
            f"The same command continues from there, {duration(progress.seconds_left)} to the last step."
        )
        raise SystemExit(INTERRUPTED) from None


@contextmanager
def _enough_memory(smaller: str) -> Iterator[None]:
    """A context in which running out of GPU memory raises an error that says what to make smaller."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"The GPU has not enough free memory: give {smaller}, or end what else runs there. ({error})"
        ) from error


def _measure(
    model: Path,
    device: str,
    trained: Trained,
    out: Path,
    number: int,
    seed: int,
    seconds: float | None,
) -> Measured:
    """Tokens per pass on held-out prompts: of the head, of the head before training, and of n-gram drafts.

    `seconds`: with as many of the prompts as that gives.
    """
    from paceline.train.report.evaluation import contestants, held_out_prompts, tokens_per_pass

    prompts = held_out_prompts(trained.examples, trained.held_out_examples, number, seed)
    if not prompts:
        return {}
    objective = trained.objective
    load = engine_loader(model, device)
    note(f"measuring the head in the engine, on {len(prompts)} held-out prompts at most")
    with TemporaryDirectory() as before:
        trained.write_untrained(Path(before))
        compared = contestants(objective.method, out, Path(before), objective.start)
        measured, number = tokens_per_pass(load, prompts, compared, seconds=seconds)
    show_measured(measured, number)
    if left_out := [method for method in compared if method not in measured]:
        note(f"--minutes are over. Not measured: {', '.join(left_out)}; the same command measures all.")
    return measured


def engine_loader(model: Path, device: str, kv_tokens: int | None = None) -> Callable[[Any], LLM]:
    """A function that gives an engine for a speculative configuration; all share the model's weights.

    `kv_tokens`: tokens in the KV cache of each; None: most of a GPU's memory, so only one engine at a time.
    """
    from paceline.build import build_engine, load_model
    from paceline.config import EngineConfig
    from paceline.llm import LLM

    def config_of(draft: Any, kv_bytes: int | None = None) -> EngineConfig:
        options = {**engine_options(device), "kv_cache_memory_bytes": kv_bytes}
        return EngineConfig.from_options(model=str(model), **options, speculative_config=draft)

    loaded = load_model(config_of("off"))
    kv_bytes = None
    if kv_tokens is not None:
        pages = pages_for(kv_tokens, loaded.backend.page_size)
        kv_bytes = HEAD_ROOM * pages * loaded.backend.bytes_per_page()

    def load(draft: Any) -> LLM:
        built = build_engine(config_of(draft, kv_bytes), loaded)
        built.engine.prepare()
        return LLM.from_engine(built.engine, built.tokenizer)

    return load


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
