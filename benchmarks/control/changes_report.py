"""The controller's reactions to changes, as a table and charts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.control.changes import MAX_SECONDS, MAX_STEPS, MIN_CHANGE, WINDOW, Changes
from benchmarks.control.changes import Course as Measured
from paceline.bench.report.result import Figure, Lines, Point, Result, Table

VERDICTS = {True: "yes", False: "NO", None: "no change"}
DRAFTED, TOKENS = "drafted for a request", "tokens of a request"  # series


def changes_result(changes: Changes) -> Result:
    """The table of changes, and the courses over steps and over time with the changes marked."""
    title = f"{changes.model}: how soon auto follows a change"
    rows = [
        (
            reaction.change,
            f"{reaction.before:.2f}",
            f"{reaction.after:.2f}",
            str(reaction.steps),
            f"{reaction.seconds:.2f}",
            VERDICTS[reaction.holds],
        )
        for reaction in changes.reactions
    ]
    columns = ("change", "drafted\nbefore", "drafted\nafter", "steps", "seconds", "in time")
    notes = [
        "drafted: tokens for each request in a step, in the second half of a phase. steps and seconds: until "
        f"that is, in the mean of {WINDOW} steps, nearer to the new phase's than to the old one's.",
        f"In time: within {MAX_STEPS} steps or {MAX_SECONDS:g} seconds. Where drafts differ by less than "
        f"{MIN_CHANGE} tokens there is nothing to follow.",
        f"Lines of charts are means of {WINDOW} steps.",
    ]
    return Result(
        title,
        [Table(title, columns, rows)],
        changes.facts(),
        notes=notes,
        figures=[_figure(course) for course in changes.courses],
        series=(DRAFTED, TOKENS),
    )


def _figure(course: Measured) -> Figure:
    """Over steps and over seconds."""
    seconds = [moment.seconds for moment in course.moments]
    values = {
        DRAFTED: [moment.drafted_each for moment in course.moments],
        TOKENS: [moment.tokens_each for moment in course.moments],
    }
    charts = []
    for axis, places in (("steps", list(range(len(seconds)))), ("seconds of the engine", seconds)):
        starts = {
            float(places[start]): name for start, name in zip(course.starts(), course.phases, strict=True)
        }
        series = {name: _smooth(places, series_values) for name, series_values in values.items()}
        charts.append(Lines(f"by {axis}", (axis, "tokens in a step"), series, starts, few=False))
    return Figure(f"A change of {course.name}", charts)


def _smooth(places: Sequence[float], values: Sequence[float]) -> list[Point]:
    """Moving average: each value averaged with those before it."""
    return [
        (float(place), statistics.fmean(values[max(0, index - WINDOW + 1) : index + 1]))
        for index, place in enumerate(places)
    ]
