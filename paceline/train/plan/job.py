"""`paceline train plan`: train pilots, fit the law, time steps, and recommend a head."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from paceline.errors import ConfigError
from paceline.models.heads.config import TargetName
from paceline.models.heads.fingerprint import target_fingerprint
from paceline.models.registry import load_checkpoint, resolve
from paceline.terminal.session import note
from paceline.train.data.examples import Examples, is_answers, read_examples
from paceline.train.job import chosen_device, engine_loader
from paceline.train.loop.sequences import load_target
from paceline.train.objectives.new_head import choose_draft_ids, coverage
from paceline.train.options import TrainOptions
from paceline.train.plan.choose import Choice, StepCosts, choices
from paceline.train.plan.costs import KV_TOKENS, measure_steps
from paceline.train.plan.law import Law, Pilot
from paceline.train.plan.pilots import PilotPlan, run_pilots

# Kinds of heads that can be planned, and the flags by which the recommended one is trained
FLAGS = {"dspark": "--layers {layers} --block-size {drafts}", "eagle3": "--unroll {positions}"}
FEWEST_DRAFTS = 2  # of a recommended draft. Step times between it and the longest draft are interpolated


@dataclass(frozen=True)
class PlanJob:
    """The options of the command."""

    method: str  # of FLAGS
    model: str
    answers: Sequence[Path]
    pilots: PilotPlan
    epochs: Sequence[int]  # of the training that is planned
    concurrency: int  # requests at once that the head is to serve
    device: str
    json_file: Path | None = None

    @property
    def options(self) -> TrainOptions:
        """Those of a pilot: they differ in layers only."""
        return next(iter(self.pilots.options.values()))


def plan(job: PlanJob) -> list[Choice]:
    """The heads that could be trained, the fastest first; also shown on the terminal."""
    options = job.options
    for path in job.answers:
        if not is_answers(path):
            raise ConfigError(
                f"{path} has prompts, not answers. Let the model answer them first: "
                f"paceline train answers {job.model} --data {path} --out answers.jsonl"
            )
    model, device = resolve(job.model), chosen_device(job.device)
    checkpoint, examples = load_checkpoint(model), read_examples(job.answers, options.max_length)
    if len(set(examples.prompts.tolist())) < 2:
        raise ConfigError("The data answers one prompt, so none can be held out to measure on: give more.")
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    target = load_target(checkpoint, torch.device(device), dtype)
    name = TargetName(target_fingerprint(checkpoint), checkpoint.source.name)
    pilots, heads = run_pilots(target, examples, name, job.pilots, _tell)
    del target
    vocabularies = job.pilots.vocabularies(examples)
    laws = {
        len(ids): Law([pilot for pilot in pilots if pilot.vocabulary == len(ids)], options.seed)
        for ids in vocabularies
    }
    note(f"timing the engine's steps, {job.concurrency} requests at once")
    load = engine_loader(model, device, job.concurrency * KV_TOKENS)
    longest = len(pilots[0].survival)
    blocks, ends = (min(FEWEST_DRAFTS, longest), longest), [vocabularies[0], *vocabularies[1:][-1:]]
    costs = measure_steps(load, heads, job.method, job.concurrency, blocks, ends)
    found = choices(laws, pilots, costs, int(examples.answer_counts().sum()), job.epochs)
    _show(job, examples, pilots, laws, costs, found)
    return found


def _tell(pilot: Pilot) -> None:
    note(
        f"pilot: {pilot.layers} layers, {pilot.tokens:,} tokens: {pilot.length:.2f} tokens a pass, "
        f"{1e6 * pilot.seconds_per_token:.0f} µs a token"
    )


def _same_as_pilots(options: TrainOptions) -> str:
    """The flags of the pilots' options: a head that is trained otherwise is not the one of the plan."""
    names = ("batch_tokens", "max_length", "seed")
    return " ".join(f"--{name.replace('_', '-')} {getattr(options, name)}" for name in names)


def _coverages(examples: Examples, sizes: Sequence[int]) -> str:
    """The answered tokens that heads with vocabularies of these sizes can predict."""
    counts = examples.answer_counts()
    shares = [f"{100 * coverage(counts, choose_draft_ids(counts, each)):.1f} %" for each in sizes]
    told = ", ".join(f"{each:,}: {share}" for each, share in zip(sizes, shares, strict=True))
    return f"Answered tokens that a head can guess, by --draft-vocab-size: {told}. Others end a chain."


def _show(
    job: PlanJob,
    examples: Examples,
    pilots: Sequence[Pilot],
    laws: Mapping[int, Law],
    costs: StepCosts,
    found: Sequence[Choice],
) -> None:
    """Two tables, the recommendation, and the JSON file."""
    trained = Table("layers", "vocabulary", "tokens", "tokens a pass", "by the law", title="Pilots")
    for pilot in pilots:
        fitted = laws[pilot.vocabulary].predict(pilot.layers, pilot.tokens).length
        trained.add_row(
            str(pilot.layers),
            str(pilot.vocabulary),
            f"{pilot.tokens:,}",
            f"{pilot.length:.2f}",
            f"{fitted:.2f}",
        )
    console, has_interval = Console(), next(iter(laws.values())).has_interval
    console.print(trained)
    columns = (
        "layers",
        "vocabulary",
        "epochs",
        "drafts",
        "tokens a pass",
        "90 % interval",
        "step ms",
        "times plain",
        "hours",
    )
    planned = Table(*columns, "with twice the data", title="Heads trained on all of the data")
    for choice in found:
        acceptance = choice.acceptance
        planned.add_row(
            str(choice.layers),
            str(choice.vocabulary),
            str(choice.epochs),
            str(choice.drafts),
            f"{acceptance.length:.2f}",
            f"{acceptance.low:.2f} to {acceptance.high:.2f}" if has_interval else "unknown",
            f"{1e3 * choice.step_seconds:.2f}",
            f"{choice.speedup:.2f}",
            f"{choice.hours:.2f}",
            f"{100 * (choice.more_data - 1):+.1f} %",
        )
    console.print(planned)
    best = found[0]
    files = " ".join(f"--data {path}" for path in job.answers)
    advice = "Recommended"
    if best.speedup <= 1:
        advice = (
            "No head is expected to be faster than plain decoding: plan again with more answers (--data) or "
            "--epochs. The best of these"
        )
    if not has_interval:
        note("The pilots are too few to tell how sure the law is: give more numbers of --steps or --layers.")
    flags = FLAGS[job.method].format(
        layers=best.layers, drafts=best.drafts, positions=len(pilots[0].survival)
    )
    note(
        f"A plain step takes {1e3 * costs.plain:.2f} ms with {job.concurrency} requests. Every step is "
        f"assumed to draft {best.drafts} tokens; `auto` drafts less where that is faster.\n"
        f"{_coverages(examples, list(laws))}\n"
        f"{advice}: paceline train {job.method} {job.model} {files} {flags} --epochs {best.epochs} "
        f"--draft-vocab-size {best.vocabulary} "
        f"{_same_as_pilots(job.options)} --out HEAD"
    )
    if job.json_file is not None:
        facts: dict[str, Any] = {
            "method": job.method,
            "answers": len(examples),
            "pilots": [asdict(pilot) for pilot in pilots],
            "plain_seconds": costs.plain,
            "drafted_seconds": costs.drafted,
            "choices": [asdict(choice) for choice in found],
        }
        job.json_file.write_text(json.dumps(facts, indent=2) + "\n")
