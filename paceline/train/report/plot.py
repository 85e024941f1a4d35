"""The training history as an SVG plot, written by hand to need no plotting library."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from paceline.train.loop.progress import Record

WIDTH, HEIGHT = 720, 240  # of a panel, pixels
LEFT, RIGHT, TOP, BOTTOM = 56, 112, 36, 44  # margins around the curves; the legend is on the right
COLOURS = ("#2060a0", "#b04030", "#2f7f3f", "#8a5aa8", "#b07a20", "#4aa0a8", "#707070")
GREY = "#888888"
MAX_POINTS = 150  # of a curve; more records are averaged
TICKS = 5  # of an axis, about


@dataclass(frozen=True)
class Curve:
    """One line of a panel."""

    label: str
    points: list[tuple[int, float]]  # (place across, value)
    colour: str
    dashed: bool = False


def plot(history: Sequence[Record], held_out: Sequence[Record] = ()) -> str:
    """Loss, matches per token ahead, and estimated acceptance length over the steps.

    `history` is of training batches; `held_out`, drawn dashed, of examples that the head never saw.
    """
    if not history:
        return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"/>\n'
    records, last = list(_averaged(history)), history[-1]

    def curves(label: str, number: int, value: Callable[[Record], float], titled: str = "") -> list[Curve]:
        colour = COLOURS[number % len(COLOURS)]
        given = [Curve(label, [(record.step, value(record)) for record in records], colour)]
        if held_out:
            given.append(Curve(titled, [(each.step, value(each)) for each in held_out], colour, dashed=True))
        return given

    def matches(ahead: int) -> Callable[[Record], float]:
        return lambda record: 100 * record.matches[ahead]

    guesses: list[Curve] = []
    for ahead in range(len(last.matches)):
        guesses += curves(f"{ahead + 1} ahead", ahead, matches(ahead))
    guesses += [Curve("held out", [], GREY, dashed=True)] if held_out else []
    panels = [
        ("loss", curves("training", 0, lambda record: record.loss, "held out")),
        ("accepted guesses, % of the target's likeliest tokens", guesses),
        (
            "tokens per verification (estimate)",
            curves("training", 0, lambda record: record.expected_length, "held out"),
        ),
    ]
    return picture(panels)


def picture(panels: Sequence[tuple[str, Sequence[Curve]]], across: str = "step") -> str:
    """Panels below each other as an SVG: titles and curves over what `across` names."""
    size = f"0 0 {WIDTH} {len(panels) * HEIGHT}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{len(panels) * HEIGHT}" fill="#ffffff"/>',
    ]
    for row, (title, lines_of) in enumerate(panels):
        lines += [f'<g transform="translate(0 {row * HEIGHT})">', *_panel(title, lines_of, across), "</g>"]
    return "\n".join([*lines, "</svg>", ""])


def _averaged(history: Sequence[Record]) -> Iterator[Record]:
    """At most MAX_POINTS records, each an average; the first, of the untrained head, stays as it is."""
    yield history[0]
    rest = history[1:]
    size = max(1, math.ceil(len(rest) / (MAX_POINTS - 1)))
    for start in range(0, len(rest), size):
        some = rest[start : start + size]
        matches = [fmean(column) for column in zip(*(record.matches for record in some), strict=True)]
        yield Record(some[-1].step, fmean(record.loss for record in some), matches)


def _ticks(low: float, high: float) -> list[float]:
    """About TICKS round numbers that span the range."""
    raw = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    first, end = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * number for number in range(first, max(end, first + 1) + 1)]


def _panel(title: str, curves: Sequence[Curve], name: str) -> list[str]:
    """Axes with ticks, curves over the steps, and a legend."""
    points = [point for curve in curves for point in curve.points]
    last = max(1, *(step for step, _ in points))
    across = [tick for tick in _ticks(0, last) if tick <= last and tick == int(tick)]
    up = _ticks(min(value for _, value in points), max(value for _, value in points))
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT

    def x_of(step: float) -> float:
        return LEFT + (right - LEFT) * step / last

    def y_of(value: float) -> float:
        return bottom - (bottom - TOP) * (value - up[0]) / (up[-1] - up[0])

    lines = [f'<text x="{LEFT}" y="{TOP - 14}" font-weight="bold">{title}</text>']
    for value in up:
        y = y_of(value)
        lines.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#e4e4e4"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.10g}</text>')
    for step in across:
        x = x_of(step)
        lines.append(f'<path d="M{x:.1f} {bottom}v4" stroke="{GREY}"/>')
        lines.append(f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{step:.0f}</text>')
    lines.append(f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="{GREY}"/>')
    middle = (LEFT + right) / 2
    lines.append(f'<text x="{middle:.0f}" y="{bottom + 34}" text-anchor="middle">{name}</text>')
    for curve in curves:
        place = " ".join(f"{x_of(step):.1f},{y_of(value):.1f}" for step, value in curve.points)
        if place:
            lines.append(f'<polyline points="{place}" fill="none" {_stroke(curve)}/>')
        if curve.dashed:  # few points: show where they are
            lines += [
                f'<circle cx="{x_of(step):.1f}" cy="{y_of(value):.1f}" r="2.2" fill="{curve.colour}"/>'
                for step, value in curve.points
            ]
    for row, curve in enumerate(curve for curve in curves if curve.label):
        y = TOP + 8 + 16 * row
        lines.append(f'<path d="M{right + 10} {y}h22" {_stroke(curve)}/>')
        lines.append(f'<text x="{right + 38}" y="{y + 4}">{curve.label}</text>')
    return lines


def _stroke(curve: Curve) -> str:
    dashes = ' stroke-dasharray="5 3"' if curve.dashed else ""
    return f'stroke="{curve.colour}" stroke-width="1.4"{dashes}'
