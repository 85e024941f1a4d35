"""The description of a result, which terminal.py, output.py and page.py show."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Point = tuple[float, float]


@dataclass(frozen=True)
class Table:
    """Cells under headings. Columns are right-aligned numbers, except the first and those in `text`."""

    title: str
    columns: Sequence[str]  # a heading may contain line breaks
    rows: Sequence[Sequence[str]]  # one cell: the heading of the rows below; missing cells are empty
    text: Collection[str] = ()  # columns of words: left-aligned, wrapped on narrow terminals


@dataclass(frozen=True)
class Mark:
    """One line of a range chart: a value, its range and its texts."""

    label: str
    text: str  # at the right
    series: str
    value: float
    low: float  # start of the thick line
    high: float  # and its end
    ticks: tuple[float, ...] = ()  # small strokes on it


@dataclass(frozen=True)
class Ranges:
    """Marks in lines, under the headings of their sections."""

    axis: str
    sections: Mapping[str, Sequence[Mark]]
    reference: float | None = None  # a value to draw a reference line at


@dataclass(frozen=True)
class Lines:
    """Lines through points. Two charts of few points fit side by side."""

    title: str
    axes: tuple[str, str]  # labels of the x axis and the y axis
    series: Mapping[str, Sequence[Point]]
    places: Mapping[float, str] = field(default_factory=dict)  # labelled vertical lines at some x values
    few: bool = True  # points are marked and equally spaced; False: x is to scale, from 0 on


Chart = Ranges | Lines


@dataclass(frozen=True)
class Figure:
    """Charts under one heading of the page."""

    heading: str
    charts: Sequence[Chart]


@dataclass(frozen=True)
class Finding:
    """A claim in one sentence, and whether it holds."""

    text: str
    good: bool = True


@dataclass(frozen=True)
class Result:
    """A complete result. Charts appear on the page only, facts in the JSON only."""

    title: str
    tables: Sequence[Table]
    facts: Mapping[str, Any]  # JSON values; `threads` and `quantization` are shown with the machine
    findings: Sequence[Finding] = ()
    notes: Sequence[str] = ()  # explanations of the tables, one line each
    figures: Sequence[Figure] = ()
    series: Sequence[str] = ()  # all series of the charts, in the order of their colours
    timed: bool = True  # whether other work on the machine can change the figures
