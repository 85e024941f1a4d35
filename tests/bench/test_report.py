"""One result, three outputs: terminal, JSON and a page that works offline."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from paceline.bench.report import terminal
from paceline.bench.report.output import Report
from paceline.bench.report.page import html_page
from paceline.bench.report.plots import nice_ticks
from paceline.bench.report.result import Figure, Finding, Lines, Mark, Ranges, Result, Table

TABLE = Table(
    "Speeds & more",
    ("method", "tok/s\n(best)", "words"),
    [("chat x1",), ("off", "100", "as <ever>"), ("auto", "150", "")],
    text=("words",),
)
POINTS = [(1.0, 10.0), (2.0, 25.0)]
MARK = Mark("auto", "1.5", "auto", 1.5, 1.2, 1.8, (1.7,))
RESULT = Result(
    "a model & a machine",
    [TABLE],
    {"threads": 2, "quantization": "int8", "rows": [1, 2]},
    findings=[Finding("every output is the same"), Finding("auto is slower", good=False)],
    notes=["what it means"],
    figures=[
        Figure("Ranges", [Ranges("times", {"chat": [MARK]}, 1.0)]),
        Figure("Lines", [Lines("chat", ("at once", "tok/s"), {"off": POINTS, "auto": POINTS})]),
        Figure(
            "Courses",
            [Lines("by steps", ("steps", "tokens"), {"auto": POINTS}, {1.5: "a change"}, few=False)],
        ),
    ],
    series=("off", "auto"),
)


def test_a_result_is_shown_on_the_terminal_as_json_and_as_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Report(tmp_path / "facts.json", tmp_path / "page.html").show(RESULT)
    shown = capsys.readouterr().out
    for text in (
        "Speeds & more",
        "  auto",
        "as <ever>",
        "every output is the same",
        "what it means",
        "2 threads",
    ):
        assert text in shown
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["rows"] == [1, 2]
    assert facts["machine"]["cpu"]
    page = (tmp_path / "page.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "2 threads, int8 weights" in page


def test_a_page_is_complete_and_works_offline() -> None:
    page = html_page(RESULT, ["a quiet machine"])
    assert page.count('<svg class="plot"') == 3
    assert "a model &amp; a machine" in page
    assert "as &lt;ever&gt;" in page
    assert '<td colspan="3">chat x1</td>' in page
    assert "<th>tok/s (best)</th>" in page
    assert '<li class="bad">auto is slower</li>' in page
    for text in ("a quiet machine", "every output is the same", "what it means", "a change"):
        assert text in page
    assert not re.search(r"<script|<link|<img|https?://|url\(|@import", page)


def test_a_series_has_the_same_colour_in_every_chart() -> None:
    page = html_page(RESULT)
    assert set(re.findall(r'<g class="(c\d)"><title>auto', page)) == {"c1"}
    assert set(re.findall(r'<g class="(c\d)"><title>off', page)) == {"c0"}


def test_ticks_are_round_and_reach_beyond_the_highest_value() -> None:
    assert nice_ticks(1.93) == [0, 0.5, 1.0, 1.5, 2.0]
    assert nice_ticks(100) == [0, 20, 40, 60, 80, 100]
    assert nice_ticks(0) == [0, 1]
    for high in (0.0031, 7.7, 999, 12345.6):
        ticks = nice_ticks(high)
        assert high <= ticks[-1] <= 1.5 * high
        assert 4 <= len(ticks) <= 8


def test_a_table_separates_groups_of_rows_that_begin_alike() -> None:
    rows = [("1", "off"), ("1", "auto"), ("4", "off"), ("4", "auto")]
    page = html_page(Result("speeds", [Table("by load", ("at once", "method"), rows)], {}))
    assert re.findall(r'<tr class="begins"><td class="words">(\d)', page) == ["4"]
    alone = html_page(Result("speeds", [Table("by load", ("at once", "method"), rows[::2])], {}))
    assert 'class="begins"' not in alone


@pytest.mark.parametrize(
    ("pause", "lines"), [(0.0, ["turn 1 of about 2: [a]", "turn 2 of about 2: b"]), (1e9, [])]
)
def test_progress_is_told_in_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, pause: float, lines: list[str]
) -> None:
    monkeypatch.setattr(terminal, "LINE_SECONDS", pause)
    with terminal.progress(2) as on_turn:
        on_turn("[a]")
        on_turn("b")
    captured = capsys.readouterr()
    assert (captured.out, captured.err.splitlines()) == ("", lines)
