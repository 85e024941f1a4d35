"""What a measurement found, described once: terminal.py, output.py and page.py show it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Point = tuple[float, float]


@dataclass(frozen=True)
class Table:
    """Cells under headings. Columns are numbers, to the right, but for the first and those in `text`."""

    title: str
    columns: Sequence[str]  # a heading may be broken into lines
    rows: Sequence[Sequence[str]]  # a row of one cell heads the rows below it; missing cells are empty
    text: Collection[str] = ()  # columns of words: to the left, and wrapped where the terminal is narrow


@dataclass(frozen=True)
class Mark:
    """One line of a chart of ranges: a value, where it may lie, and its words."""

    label: str
    text: str  # at the right
    series: str
    value: float
    low: float  # where the thick line begins
    high: float  # and ends
    ticks: tuple[float, ...] = ()  # small strokes on it


@dataclass(frozen=True)
class Ranges:
    """Marks in lines, under the headings of their sections."""

    axis: str
    sections: Mapping[str, Sequence[Mark]]
    reference: float | None = None  # a value with a line of its own


@dataclass(frozen=True)
class Lines:
    """Lines through few points; columns stand at equal distances. Two such charts stand side by side."""

    title: str
    axes: tuple[str, str]  # along the bottom, up the left side
    series: Mapping[str, Sequence[Point]]


@dataclass(frozen=True)
class Course:
    """Lines over many points; some places of the x axis have a line and a word of their own."""

    title: str
    axes: tuple[str, str]
    series: Mapping[str, Sequence[Point]]
    places: Mapping[float, str]


Chart = Ranges | Lines | Course


@dataclass(frozen=True)
class Figure:
    """Charts under one heading of the page."""

    heading: str
    charts: Sequence[Chart]


@dataclass(frozen=True)
class Finding:
    """What was to be shown, in a sentence, and whether it was."""

    text: str
    good: bool = True


@dataclass(frozen=True)
class Result:
    """All that a measurement found. Charts are on the page only, facts in the JSON only."""

    title: str
    tables: Sequence[Table]
    facts: Mapping[str, Any]  # ready for JSON; `threads` and `quantization` are told with the machine
    findings: Sequence[Finding] = ()
    notes: Sequence[str] = ()  # what the tables mean, a line each
    figures: Sequence[Figure] = ()
    series: Sequence[str] = ()  # all series of the charts, in the order of their colours
    timed: bool = True  # whether other work on the machine can change the figures
