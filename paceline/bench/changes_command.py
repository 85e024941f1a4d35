"""`paceline bench changes`."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.bench.reporting import (
    HtmlFile,
    JsonFile,
    Model,
    Quantization,
    Report,
    Threads,
    check_writable,
)
from paceline.config import DEFAULT_MODEL


def changes_command(
    model: Model = DEFAULT_MODEL,
    crowd: Annotated[int, typer.Option(help="Requests at once while the load is high.")] = 32,
    threads: Threads = None,
    quantization: Quantization = "auto",
    json_file: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """How soon auto follows when text repeats itself, then is random, or when load comes and goes."""
    from paceline.bench.changes import run_changes
    from paceline.bench.changes_report import changes_page, show_changes
    from paceline.bench.tables import progress

    check_writable("--html", html)
    report = Report(json_file)
    with progress(6) as on_turn:
        changes = run_changes(model, threads, quantization, crowd, on_turn)
    report.show(*show_changes(changes), changes.facts())
    if html is not None:
        html.write_text(changes_page(changes, report.machine), encoding="utf-8")
