"""Charts as self-contained SVG: no script, font or style from elsewhere.

Colours are CSS classes (`c0`, `c1`, ...) and inks are CSS variables, so that a page can be light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from html import escape

from paceline.bench.report.result import Chart, Lines, Mark, Point, Ranges

WIDTH = 1080  # pixels of a range chart: as wide as the page; heights follow from the contents
SMALL_WIDTH = 420  # pixels of a line chart: two fit side by side
LETTER = 7.0  # approximate width of a letter in pixels, to measure labels
MAX_LABEL_LENGTH = 34  # letters of a label at the left; longer ones are cut, and shown in full as a tooltip
NUM_COLOURS = 8
Scale = Callable[[float], float]  # from a value to pixels
Colours = Mapping[str, int]  # colour number of each series


def nice_ticks(high: float, count: int = 5) -> list[float]:
    """About `count` round numbers from 0 to just above `high`."""
    if high <= 0:
        return [0.0, 1.0]
    rough = high / count
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(scale * factor for factor in (1, 2, 2.5, 5, 10) if scale * factor >= rough * (1 - 1e-9))
    return [index * step for index in range(math.ceil(high / step - 1e-9) + 1)]


def svg(chart: Chart, colours: Colours, is_alone: bool = False) -> str:
    """A chart in the colours of its series; a line chart that is alone is as wide as the others."""
    if isinstance(chart, Ranges):
        return _ranges(chart, colours)
    return _lines(chart, colours, WIDTH if is_alone or not chart.few else SMALL_WIDTH)


def _ranges(chart: Ranges, colours: Colours) -> str:
    marks = [mark for marks_of_section in chart.sections.values() for mark in marks_of_section]
    highest = max([mark.high for mark in marks] + [mark.value for mark in marks] + [chart.reference or 0])
    ticks = nice_ticks(highest)
    left = 24 + LETTER * max(min(len(mark.label), MAX_LABEL_LENGTH) for mark in marks)
    right = 16 + LETTER * max(len(mark.text) for mark in marks)
    span = WIDTH - left - right

    def x(value: float) -> float:
        return left + span * value / ticks[-1]

    parts, y = [], 8.0
    for heading, marks_of_section in chart.sections.items():
        parts.append(_text(4, y + 14, heading, "heading"))
        y += 24
        for mark in marks_of_section:
            parts += _mark_parts(mark, colours, x, y, WIDTH - right + 8)
            y += 20
        y += 6
    grid = [
        part
        for tick in ticks
        for part in (_line(x(tick), 4, x(tick), y, "grid"), _text(x(tick), y + 16, _number(tick), "middle"))
    ]
    if chart.reference is not None:
        grid.append(_line(x(chart.reference), 4, x(chart.reference), y, "reference"))
    grid.append(_text(left + span / 2, y + 36, chart.axis, "middle axis"))
    return _svg(WIDTH, y + 44, [*grid, *parts], chart.axis)


def _mark_parts(mark: Mark, colours: Colours, x: Scale, y: float, text_x: float) -> list[str]:
    label = mark.label if len(mark.label) <= MAX_LABEL_LENGTH else mark.label[: MAX_LABEL_LENGTH - 1] + "…"
    middle, colour = y + 8, _colour(colours, mark.series)
    return [
        f'<g class="{colour}"><title>{escape(f"{mark.label}: {mark.text}")}</title>',
        _text(16, middle + 4, label, "label"),
        _line(x(mark.low), middle, x(mark.high), middle, "range"),
        *(_line(x(tick), middle - 5, x(tick), middle + 5, "tick") for tick in mark.ticks),
        f'<circle cx="{x(mark.value):.1f}" cy="{middle:.1f}" r="4.5"/>',
        _text(text_x, middle + 4, mark.text, "value"),
        "</g>",
    ]


def _lines(chart: Lines, colours: Colours, width: int) -> str:
    """A line chart; series are named in the page's legend."""
    columns = sorted({x for points in chart.series.values() for x, _ in points})
    if chart.few:  # concurrencies double, and positions are consecutive
        shares = {column: number / max(len(columns) - 1, 1) for number, column in enumerate(columns)}
        labels, top = columns[:: max(1, math.ceil(len(columns) / 12))], 30.0
    else:
        labels, top = nice_ticks(columns[-1], 8), 44.0
        shares = {x: x / labels[-1] for x in (*columns, *labels, *chart.places)}
    ticks = nice_ticks(max(y for points in chart.series.values() for _, y in points))
    left, bottom, right = 58.0, top + 200.0, width - 14.0

    def place(point: Point) -> Point:
        x, y = point
        return left + (right - left) * shares[x], bottom - (bottom - top) * y / ticks[-1]

    parts = [_text(left, 16, chart.title, "heading")]
    for tick in ticks:
        y = place((labels[0], tick))[1]
        parts += [_line(left, y, right, y, "grid"), _text(left - 6, y + 4, _number(tick), "end")]
    parts += [_text(place((label, 0))[0], bottom + 16, _number(label), "middle") for label in labels]
    for where, word in chart.places.items():
        x = place((where, 0))[0]
        parts += [_line(x, top - 12, x, bottom, "reference"), _text(x + 4, top - 4, word, "axis")]
    for name, points in chart.series.items():
        placed = [place(point) for point in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<g class="{_colour(colours, name)}"><title>{escape(name)}</title>')
        parts.append(f'<polyline points="{path}"/>')
        if chart.few:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in placed]
        parts.append("</g>")
    parts += _axes(chart.axes, (left + right) / 2, (top + bottom) / 2, bottom)
    return _svg(width, bottom + 44, parts, chart.title)


def _axes(axes: tuple[str, str], x: float, y: float, bottom: float) -> list[str]:
    """Labels of the x axis and of the y axis."""
    turned = f"translate(13 {y:.0f}) rotate(-90)"
    return [
        _text(x, bottom + 34, axes[0], "middle axis"),
        f'<text class="middle axis" transform="{turned}">{escape(axes[1])}</text>',
    ]


def legend(colours: Colours) -> str:
    """The legend of colours, as HTML."""
    entries = (
        f'<span><svg class="{_colour(colours, name)}" width="12" height="12"><circle cx="6" cy="6" r="5"/>'
        f"</svg> {escape(name)}</span>"
        for name in colours
    )
    return f'<p class="legend">{" ".join(entries)}</p>'


def _colour(colours: Colours, series: str) -> str:
    return f"c{colours[series] % NUM_COLOURS}"


def _svg(width: float, height: float, parts: Iterable[str], label: str) -> str:
    return (
        f'<svg class="plot" role="img" aria-label="{escape(label)}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'style="max-width:{width:.0f}px">' + "".join(parts) + "</svg>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:g}"
