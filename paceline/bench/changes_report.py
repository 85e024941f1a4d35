"""How soon the controller follows, on the terminal and as a page with plots."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rich.table import Table

from paceline.bench.changes import LEAST_CHANGE, MOST_SECONDS, MOST_STEPS, WINDOW, Changes, Course, Reaction
from paceline.bench.page import page
from paceline.bench.plots import Point, course_plot, legend
from paceline.bench.tables import machine_notes

VERDICTS = {True: "yes", False: "NO", None: "no change"}
COLOURS = {"drafted for a request": 1, "tokens of a request": 3}


def show_changes(changes: Changes) -> tuple[list[Table], list[str]]:
    """The table of changes, and what it says."""
    table = Table(title=f"{changes.model}: how soon auto follows", title_justify="left")
    table.add_column("change", no_wrap=True)
    for heading in ("drafted\nbefore", "drafted\nafter", "steps", "seconds", "in time"):
        table.add_column(heading, justify="right")
    for reaction in changes.reactions:
        table.add_row(reaction.change, *_figures(reaction))
    return [table], _notes()


def _figures(reaction: Reaction) -> list[str]:
    return [
        f"{reaction.before:.2f}",
        f"{reaction.after:.2f}",
        str(reaction.steps),
        f"{reaction.seconds:.2f}",
        VERDICTS[reaction.holds],
    ]


def _notes() -> list[str]:
    return [
        "drafted: tokens for each request in a step, in the second half of a phase. steps and seconds: until "
        f"that is, in the mean of {WINDOW} steps, nearer to the new phase's than to the old one's.",
        f"In time: within {MOST_STEPS} steps or {MOST_SECONDS:g} seconds. Where drafts differ by less than "
        f"{LEAST_CHANGE} tokens there is nothing to follow.",
    ]


def changes_page(changes: Changes, machine: Mapping[str, Any]) -> str:
    """The courses as plots over steps and over time, with the changes marked."""
    heading = f"{changes.model}: how soon auto follows a change"
    cells = (
        "".join(f"<td>{escape(cell)}</td>" for cell in (reaction.change, *_figures(reaction)))
        for reaction in changes.reactions
    )
    head = "".join(
        f"<th>{word}</th>" for word in ("change", "drafted before", "after", "steps", "seconds", "in time")
    )
    body = [
        f"<h1>{escape(heading)}</h1>",
        *(f'<p class="soft">{escape(line)}</p>' for line in machine_notes(machine, None, None)),
        f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>",
        *(f'<p class="soft">{escape(note)}</p>' for note in _notes()),
        legend(COLOURS),
        *(plot for course in changes.courses for plot in _plots(course)),
        f'<p class="soft">Lines are means of {WINDOW} steps.</p>',
    ]
    return page(heading, body)


def _plots(course: Course) -> list[str]:
    """Over steps and over seconds."""
    seconds = [moment.seconds for moment in course.moments]
    starts = course.starts()
    plots = [f"<h2>A change of {escape(course.name)}</h2>"]
    for axis, places in (("steps", list(range(len(seconds)))), ("seconds of the engine", seconds)):
        marks = {float(places[start]): name for start, name in zip(starts, course.phases, strict=True)}
        values = {
            "drafted for a request": [moment.drafted_each for moment in course.moments],
            "tokens of a request": [moment.tokens_each for moment in course.moments],
        }
        series = {name: (COLOURS[name], _smooth(places, own)) for name, own in values.items()}
        plots.append(course_plot(f"by {axis}", (axis, "tokens in a step"), series, marks))
    return plots


def _smooth(places: Sequence[float], values: Sequence[float]) -> list[Point]:
    """Each value in the mean with those before it."""
    return [
        (float(place), statistics.fmean(values[max(0, index - WINDOW + 1) : index + 1]))
        for index, place in enumerate(places)
    ]
