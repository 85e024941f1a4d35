"""The report of a trained head: model card, history as JSON, and a plot."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.train.evaluation import DRAFTED
from paceline.train.options import TrainOptions
from paceline.train.plot import plot
from paceline.train.run import Trained
from paceline.train.trainer import Record

MAX_SEGMENTS = 12  # named on the card

Measured = dict[str, dict[str, float]]  # method -> segment -> tokens per pass


def write_report(
    trained: Trained, target: str, options: TrainOptions, measured: Measured, folder: Path
) -> None:
    """Write README.md, training.json and training.svg beside the head."""
    history = [dataclasses.asdict(record) for record in trained.history]
    held_out = dataclasses.asdict(trained.held_out) if trained.held_out else None
    facts = {
        "target": target,
        "options": vars(options),
        "answers": trained.settings,
        "held_out": held_out,
        "tokens_per_pass": measured,
        "history": history,
    }
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (folder / "training.svg").write_text(plot(trained.history), encoding="utf-8")
    (folder / "README.md").write_text(card(trained, target, options, measured), encoding="utf-8")


def card(trained: Trained, target: str, options: TrainOptions, measured: Measured) -> str:
    """The model card as Markdown."""
    answered = int((trained.examples.lengths - trained.examples.answers).sum())
    objective = trained.objective
    steps = trained.history[-1].step if trained.history else 0
    lines = [
        f"# {objective.title} for {target}",
        "",
        f"Trained by `paceline train {objective.method}` on the target's own answers. It only makes the",
        "target faster: with paceline the output is the target's, byte for byte.",
        "",
        f"    paceline serve {target} --draft {objective.method}:FOLDER",
        "",
        "| | |",
        "| --- | --- |",
        f"| answers | {len(trained.examples)}, {answered} answered tokens |",
        f"| segments | {_segments(trained.examples.segments)} |",
        f"| answered at | {_temperatures(trained.settings)} |",
        f"| draft vocabulary | {len(objective.draft_ids)} tokens, {100 * trained.coverage:.1f} % of those |",
        f"| size | {objective.size()} |",
        f"| training | {steps} steps of {options.batch_tokens} tokens, {objective.num_steps} tokens ahead |",
        f"| | learning rate {options.learning_rate:g}, loss {options.loss}, seed {options.seed} |",
        f"| time | {trained.seconds / 60:.1f} minutes on {trained.device} |",
    ]
    if trained.held_out is not None:
        lines += ["", _held_out(trained.held_out)]
    if measured:
        lines += ["", f"Tokens per pass over the target, greedy, {DRAFTED} drafted, on held-out prompts:", ""]
        lines += _measured_table(measured)
    return "\n".join([*lines, "", "![training](training.svg)", ""])


def _segments(segments: Sequence[str]) -> str:
    """The number of answers per segment."""
    counts = Counter(segments).most_common()
    shown = ", ".join(f"{segment} {count}" for segment, count in counts[:MAX_SEGMENTS])
    return shown if len(counts) <= MAX_SEGMENTS else f"{shown} and {len(counts) - MAX_SEGMENTS} more"


def _temperatures(settings: Sequence[Mapping[str, Any]]) -> str:
    temperatures = sorted({float(value) for setting in settings for value in setting.get("temperatures", ())})
    return (
        "temperatures " + ", ".join(f"{value:g}" for value in temperatures)
        if temperatures
        else "unknown temperatures"
    )


def _measured_table(measured: Measured) -> list[str]:
    segments = list(next(iter(measured.values())))
    lines = ["| | " + " | ".join(segments) + " |", "| --- " * (len(segments) + 1) + "|"]
    for method, lengths in measured.items():
        lines.append(f"| {method} | " + " | ".join(f"{lengths[segment]:.2f}" for segment in segments) + " |")
    return lines


def _held_out(record: Record) -> str:
    shares = ", ".join(f"{100 * match:.1f} %" for match in record.matches)
    return (
        "On answers that were held out, with the true tokens before each guess, guesses of one token ahead, "
        f"two ahead and so on were the target's likeliest token in {shares} of the cases. Were these "
        "independent, a "
        f"verification would give {record.expected_length:.2f} tokens."
    )
