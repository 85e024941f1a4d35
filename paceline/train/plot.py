"""The training history as an SVG plot, written by hand to need no plotting library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from paceline.train.trainer import Record

WIDTH, HEIGHT = 720, 220  # of a panel, pixels
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 36, 28  # margins around the curves
COLOURS = ("#2060a0", "#b04030", "#2f7f3f", "#8a5aa8", "#b07a20", "#4aa0a8", "#707070")


def plot(history: Sequence[Record]) -> str:
    """Loss, matches per token ahead, and estimated acceptance length over the steps."""
    if not history:
        return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"/>\n'
    steps, last = [record.step for record in history], history[-1]
    ahead = [100 * match for match in last.matches]
    shares = " ".join(f"{share:.0f}" for share in ahead)
    panels = [
        _panel(
            f"loss: {last.loss:.3f}",
            steps,
            [[math.log(max(record.loss, 1e-9)) for record in history]],
            math.exp,
        ),
        _panel(
            f"right guesses of one token ahead, two, ...: {shares} %",
            steps,
            [[100 * record.matches[step] for record in history] for step in range(len(ahead))],
        ),
        _panel(
            f"tokens per verification (estimate): {last.expected_length:.2f}",
            steps,
            [[record.expected_length for record in history]],
        ),
    ]
    size = f"0 0 {WIDTH} {len(panels) * HEIGHT}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{len(panels) * HEIGHT}" fill="#ffffff"/>',
    ]
    for row, panel in enumerate(panels):
        lines += [f'<g transform="translate(0 {row * HEIGHT})">', *panel, "</g>"]
    return "\n".join([*lines, "</svg>", ""])


def _panel(
    title: str,
    steps: Sequence[int],
    curves: Sequence[Sequence[float]],
    shown: Callable[[float], float] = lambda value: value,
) -> list[str]:
    """Axes, and curves over the steps; `shown` maps a value to its axis label."""
    low, high = min(map(min, curves)), max(map(max, curves))
    span, bottom, right = (high - low) or 1.0, HEIGHT - BOTTOM, WIDTH - RIGHT

    def place(step: int, value: float) -> str:
        x = LEFT + (right - LEFT) * step / steps[-1]
        return f"{x:.1f},{bottom - (bottom - TOP) * (value - low) / span:.1f}"

    lines = [
        f'<text x="{LEFT}" y="{TOP - 14}">{title}</text>',
        f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="#888888"/>',
        f'<text x="{right}" y="{bottom + 16}" text-anchor="end">{steps[-1]} steps</text>',
    ]
    for value in (low, low + span / 2, low + span):
        x, y = place(0, value).split(",")
        lines.append(
            f'<text x="{LEFT - 6}" y="{float(y) + 4:.1f}" text-anchor="end">{shown(value):.2f}</text>'
        )
        lines.append(f'<path d="M{x} {y}H{right}" stroke="#e4e4e4"/>')
    for number, values in enumerate(curves):
        points = " ".join(place(step, value) for step, value in zip(steps, values, strict=True))
        colour = COLOURS[number % len(COLOURS)]
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.2"/>')
    return lines
