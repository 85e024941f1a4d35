"""The plot of a run."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from paceline.train.loop.progress import Record
from paceline.train.report.plot import MAX_POINTS, plot

SVG = "{http://www.w3.org/2000/svg}"
HISTORY = [Record(0, 9.0, [0.1, 0.0]), Record(20, 5.0, [0.5, 0.2]), Record(30, 1.0, [0.7, 0.4])]


def points(curve: ET.Element) -> list[tuple[float, ...]]:
    return [tuple(map(float, point.split(","))) for point in curve.get("points", "").split()]


def test_the_plot_has_axes_a_legend_and_the_untrained_head() -> None:
    picture = ET.fromstring(plot(HISTORY))
    curves = picture.findall(f".//{SVG}polyline")
    assert len(curves) == 1 + 2 + 1
    (x0, y0), (x1, y1), (x2, y2) = points(curves[0])
    assert x1 - x0 == 2 * (x2 - x1), "step 0, 20, 30"
    assert y1 - y0 == y2 - y1, "loss 9, 5, 1"
    texts = [text.text for text in picture.findall(f".//{SVG}text")]
    for expected in ("loss", "0", "10", "30", "training", "1 ahead", "2 ahead"):
        assert expected in texts
    assert "held out" not in texts


def test_what_was_held_out_is_dashed() -> None:
    held_out = [Record(0, 9.5, [0.0, 0.0]), Record(30, 2.0, [0.6, 0.3])]
    picture = ET.fromstring(plot(HISTORY, held_out))
    dashed = [curve for curve in picture.findall(f".//{SVG}polyline") if curve.get("stroke-dasharray")]
    assert [len(points(curve)) for curve in dashed] == [2] * 4
    texts = [text.text for text in picture.findall(f".//{SVG}text")]
    assert texts.count("held out") == 3, "the legend of each panel"


def test_long_histories_are_averaged() -> None:
    history = [Record(step, 1.0 + step % 2, [0.5]) for step in range(1001)]
    curve = ET.fromstring(plot(history)).findall(f".//{SVG}polyline")[0]
    assert len(points(curve)) <= MAX_POINTS


def test_runs_with_at_most_one_record_can_be_plotted() -> None:
    ET.fromstring(plot([]))
    ET.fromstring(plot([Record(10, 0.0, [0.0])]))
