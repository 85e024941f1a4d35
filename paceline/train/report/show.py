"""Training progress on the terminal: answers, steps, loss, acceptance and time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from paceline.terminal.session import Interrupt, note
from paceline.train.data.make_answers import Answered
from paceline.train.loop.progress import Progress as TrainingProgress
from paceline.train.loop.trainer import OnProgress
from paceline.train.report.card import Measured
from paceline.train.report.evaluation import DRAFTED
from paceline.words import counted

LINE_SECONDS = 10.0  # between two lines where standard error is no terminal
BAR_SECONDS = 0.2  # between two changes of the bar

Draw = Callable[[str, int, int], None]  # (text, completed, total)


@contextmanager
def _bar(first: str, visible: bool = True) -> Iterator[Draw]:
    """A bar with a text on standard error; where that is no terminal, a line of text now and then."""
    console = Console(stderr=True)
    lines = visible and not console.is_terminal
    latest = -LINE_SECONDS
    columns = TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not visible or lines) as bar:
        task = bar.add_task(first, total=None)
        if lines:
            console.print(first, highlight=False)

        def draw(text: str, completed: int, total: int) -> None:
            nonlocal latest
            now = time.monotonic()
            ended = completed == total
            if now - latest < (LINE_SECONDS if lines else BAR_SECONDS) and not ended:
                return
            latest = now
            if lines:
                console.print(text, highlight=False, soft_wrap=True)
            bar.update(task, description=text, completed=completed, total=total)

        yield draw


@contextmanager
def answering_progress(interrupt: Interrupt, seconds: float | None) -> Iterator[Callable[[Answered], bool]]:
    """A function that shows answering progress and returns whether to continue; `seconds`: the limit."""
    started, before = 0.0, -1  # when the first answer was awaited, and how many there were then
    with _bar("loading the model") as draw:

        def show(answered: Answered) -> bool:
            nonlocal started, before
            now = time.monotonic()
            if before < 0:
                started, before = now, answered.answers
                if before:
                    note(f"going on: {counted(before, 'answers')} already there")
            left = None if seconds is None else started + seconds - now
            if answered.answers > before:
                rest = (answered.total - answered.answers) * (now - started) / (answered.answers - before)
                left = rest if left is None else min(left, rest)
            doing = "writing prompts: answered" if answered.writing_prompts else "answered"
            tokens = counted(answered.tokens, "tokens")
            text = f"{doing} {answered.answers} of {answered.total}, {tokens}{_ends(left)}"
            draw(text, answered.answers, answered.total)
            return not interrupt.asked

        yield show


@contextmanager
def training_progress(interrupt: Interrupt, visible: bool) -> Iterator[OnProgress]:
    """A function that shows step, loss, acceptance and time left, and returns whether to continue."""
    resumed: bool | None = None  # None until the first call
    with _bar("training: loading the target, measuring the first step", visible) as draw:

        def show(progress: TrainingProgress) -> bool:
            nonlocal resumed
            if resumed is None:
                resumed = visible and progress.step > 0
                if resumed:
                    note(f"going on from the checkpoint: step {progress.step} of {progress.total}")
            last = progress.history[-1]
            matches = " ".join(f"{100 * match:.0f}" for match in last.matches)
            text = (
                f"step {progress.step} of {progress.total}: loss {last.loss:.3f}, accepted {matches} %"
                f"{_ends(progress.seconds_left)}"
            )
            draw(text, progress.step, progress.total)
            return not interrupt.asked

        yield show


def _ends(seconds: float | None) -> str:
    """Time left as the end of a line; nothing while it is unknown."""
    return "" if seconds is None else f", {duration(seconds)} left"


def duration(seconds: float) -> str:
    """A time for people: 45 s, 12 min, 3.5 h."""
    if seconds < 100:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def show_measured(measured: Measured, number: int) -> None:
    """Print the tokens per pass of each method."""
    segments = list(next(iter(measured.values())))
    title = f"tokens per pass, greedy, {DRAFTED} drafted, {number} held-out prompts"
    table = Table("", *map(escape, segments), title=title, title_justify="left")
    for method, lengths in measured.items():
        table.add_row(method, *(f"{lengths[segment]:.2f}" for segment in segments))
    Console().print(table)
