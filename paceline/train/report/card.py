"""The report of a trained head: model card, history as JSON, and a plot."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.train.loop.progress import Record
from paceline.train.options import TrainOptions
from paceline.train.report.evaluation import DRAFTED
from paceline.train.report.plot import plot
from paceline.train.run import Trained
from paceline.words import counted

MAX_SEGMENTS = 12  # named on the card

Measured = dict[str, dict[str, float]]  # method -> segment -> tokens per pass


def write_report(
    trained: Trained, target: str, options: TrainOptions, measured: Measured, folder: Path
) -> None:
    """Write README.md, training.json and training.svg beside the head."""
    held_out = dataclasses.asdict(trained.held_out) if trained.held_out else None
    facts = {
        "target": target,
        "options": vars(options),
        "answers": trained.settings,
        "held_out": held_out,
        "tokens_per_pass": measured,
        "batch_tokens": _batch_tokens(trained),
        "checks": [dataclasses.asdict(check) for check in trained.progress.checks],
        "history": [dataclasses.asdict(record) for record in trained.progress.history],
        "held_out_history": [dataclasses.asdict(record) for record in trained.progress.held_out],
    }
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    curve = [record for record in trained.progress.held_out if record.step < trained.progress.step]
    last = [] if trained.held_out is None else [trained.held_out]
    picture = plot(trained.progress.history, [*curve, *last])
    (folder / "training.svg").write_text(picture, encoding="utf-8")
    text = card(trained, target, options, measured, folder)
    (folder / "README.md").write_text(text, encoding="utf-8")


def serve_command(target: str, method: str, folder: Path) -> str:
    """The command that serves the target, as the user named it, with the head in this folder."""
    return f"paceline serve {shlex.quote(target)} --draft {shlex.quote(f'{method}:{folder}')}"


def _batch_tokens(trained: Trained) -> int:
    return trained.progress.pace.batch_tokens if trained.progress.pace is not None else 0


def card(trained: Trained, target: str, options: TrainOptions, measured: Measured, folder: Path) -> str:
    """The model card as Markdown; `folder` is where the head is."""
    answered = int((trained.examples.lengths - trained.examples.answers).sum())
    objective = trained.objective
    progress = trained.progress
    lines = [
        f"# {objective.title} for {Path(target).name}",
        "",
        f"Trained by `paceline train {objective.recipe}` on the target's own answers. It guesses the",
        "target's next tokens; with paceline the output stays the target's, byte for byte.",
        "",
        f"    {serve_command(target, objective.method, folder)}",
        "",
        "| | |",
        "| --- | --- |",
        f"| answers | {len(trained.examples)}, {answered} answered tokens |",
        f"| segments | {_segments(trained.examples.segments)} |",
        f"| answered at | {_temperatures(trained.settings)} |",
        f"| draft vocabulary | {len(objective.draft_ids)} tokens, {100 * trained.coverage:.1f} % of those |",
        f"| size | {objective.size()} |",
        f"| training | {counted(progress.step, 'steps')} of {_batch_tokens(trained)} tokens, "
        f"{counted(objective.num_steps, 'tokens')} ahead |",
        f"| | learning rate {options.learning_rate:g}, loss {options.loss}, seed {options.seed} |",
        f"| time | {progress.seconds / 60:.1f} minutes, answering included, on {trained.device} |",
    ]
    if progress.best is not None:
        lines.append(
            f"| weights | those after step {progress.best.step}: {progress.best.tokens_per_pass:.2f} tokens "
            f"per pass on held-out answers, {progress.checks[-1].tokens_per_pass:.2f} after the last step |"
        )
    if trained.held_out is not None:
        lines += ["", _held_out(trained.held_out)]
    if measured:
        lines += [
            "",
            f"Tokens per pass over the target, greedy, {DRAFTED} drafted, on held-out prompts. 1.00 is plain",
            "decoding, so a head at 1.00 gains nothing:",
            "",
        ]
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
