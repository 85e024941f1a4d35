"""The plot of a run."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from paceline.train.plot import plot
from paceline.train.trainer import Record

SVG = "{http://www.w3.org/2000/svg}"


def test_the_plot_has_loss_matches_and_length() -> None:
    history = [Record(10, 9.0, [0.1, 0.0]), Record(20, 3.0, [0.5, 0.2]), Record(30, 1.0, [0.7, 0.4])]
    picture = ET.fromstring(plot(history))
    curves = picture.findall(f".//{SVG}polyline")
    assert len(curves) == 1 + 2 + 1
    loss = [tuple(map(float, point.split(","))) for point in curves[0].get("points", "").split()]
    assert [x for x, _ in loss] == sorted(x for x, _ in loss)
    assert loss[1][1] - loss[0][1] == loss[2][1] - loss[1][1], "each third of the loss is one step down"
    titles = [text.text for text in picture.findall(f".//{SVG}text") if text.text and ":" in text.text]
    assert titles[1] == "right guesses of one token ahead, two, ...: 70 40 %"


def test_runs_with_at_most_one_record_can_be_plotted() -> None:
    ET.fromstring(plot([]))
    ET.fromstring(plot([Record(10, 0.0, [0.0])]))
