"""Training progress on the terminal: answered tokens, loss, acceptance and time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from paceline.train.card import Measured
from paceline.train.evaluation import DRAFTED
from paceline.train.make_answers import Answered
from paceline.train.trainer import Progress as TrainingProgress


@contextmanager
def answering_progress() -> Iterator[Callable[[Answered], None]]:
    """A progress line on standard error, to be called after each batch."""
    columns = TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("answering", total=None)

        def show(answered: Answered) -> None:
            left_out = sum(answered.skipped.counts.values())
            text = f"{answered.answers} answers, {answered.tokens} tokens, {left_out} rows left out"
            bar.update(task, description=text)

        yield show


@contextmanager
def training_progress(visible: bool) -> Iterator[Callable[[TrainingProgress], None]]:
    """A progress bar on standard error with loss, acceptance per draft step, and time left."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), disable=not visible) as bar:
        task = bar.add_task("training", total=None)

        def show(progress: TrainingProgress) -> None:
            last = progress.history[-1]
            matches = " ".join(f"{100 * match:.0f}" for match in last.matches)
            text = f"step {progress.step}: loss {last.loss:.3f}, accepted {matches} %"
            bar.update(task, description=text, completed=progress.step, total=progress.total)

        yield show


def show_measured(measured: Measured, number: int) -> None:
    """Print the tokens per pass of each method."""
    segments = list(next(iter(measured.values())))
    title = f"tokens per pass, greedy, {DRAFTED} drafted, {number} held-out prompts"
    table = Table("", *map(escape, segments), title=title, title_justify="left")
    for method, lengths in measured.items():
        table.add_row(method, *(f"{lengths[segment]:.2f}" for segment in segments))
    Console().print(table)
