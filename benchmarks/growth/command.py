"""`python -m benchmarks growth`: the command line, its table and its charts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from benchmarks.growth.measure import CURVES, DEFAULT_SIZES, Grown, measure_growth
from paceline.bench.flags import HtmlFile, JsonFile, Model, Quantization, Threads
from paceline.bench.report.result import Figure, Lines, Result, Table
from paceline.config import DEFAULT_MODEL
from paceline.terminal.flags import integers

SERIES = ("measured", "floor of memory", "floor of arithmetic")
NOTES = (
    "Floor of memory: weights once per pass, keys and values of the context, at the bandwidth measured in "
    "this run. Floor of arithmetic: all multiply-adds at the rate of a product that stays in the cache (CPU) "
    "or of the library's largest product (GPU).",
    "At best both overlap: the floor of a pass is the larger one.",
)
Sizes = Annotated[str | None, typer.Option(help="Sizes of this curve; empty: leave it out.")]


def growth_command(
    model: Model = DEFAULT_MODEL,
    shape: Annotated[
        str | None,
        typer.Option(help="Measure random weights of this shape on a CUDA device, e.g. llama-3.1-8b."),
    ] = None,
    context: Sizes = None,
    requests: Sizes = None,
    tree: Sizes = None,
    prompt: Sizes = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs per point.")] = 5,
    threads: Threads = None,
    quantization: Quantization = "auto",
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """How a pass's cost grows with context, requests, tree and prompt, beside what the machine allows."""
    from paceline.bench.report.output import Report
    from paceline.bench.report.terminal import progress
    from paceline.extras import needs_extra

    report = Report(json_file, html_file)
    given = {"context": context, "requests": requests, "tree": tree, "prompt": prompt}
    sizes = {
        name: DEFAULT_SIZES[name] if text is None else tuple(integers(f"--{name}", text) if text else ())
        for name, text in given.items()
    }
    if shape is None:
        from benchmarks.growth.cpu import cpu_subject

        subject = cpu_subject(model, quantization, threads)
    else:
        with needs_extra("gpu", "--shape"):
            from benchmarks.growth.gpu import gpu_subject
        subject = gpu_subject(shape)
    with progress(rounds * sum(len(of_curve) for of_curve in sizes.values())) as on_turn:
        grown = measure_growth(subject, sizes, rounds, on_turn)
    report.show(growth_result(shape or model, grown, rounds))


def growth_result(subject: str, grown: Sequence[Grown], rounds: int) -> Result:
    """Milliseconds along each curve, as a table and as one chart per curve."""
    title = f"{subject}: the cost of a pass as it grows, best of {rounds}"
    rows: list[tuple[str, ...]] = []
    charts = []
    for curve, words in CURVES.items():
        points = [point for point in grown if point.curve == curve]
        if not points:
            continue
        rows.append((words,))
        rows += [_row(point) for point in points]
        charts.append(Lines(curve, (words, "ms"), _series(points)))
    columns = ("size", "ms", "memory floor", "arithmetic floor", "times floor", "µs per row")
    return Result(
        title,
        [Table(title, columns, rows)],
        {"subject": subject, "rounds": rounds, "points": [point.facts() for point in grown]},
        notes=NOTES,
        figures=[Figure("Growth", charts)],
        series=SERIES,
    )


def _row(point: Grown) -> tuple[str, ...]:
    milliseconds = [1e3 * seconds for seconds in (point.timing.best, point.memory, point.arithmetic)]
    per_row = 1e3 * milliseconds[0] / (point.load.requests * point.load.rows)
    ratio = milliseconds[0] / max(milliseconds[1:])
    return (
        f"{point.size:,}",
        *(f"{value:,.2f}" for value in milliseconds),
        f"{ratio:.2f}",
        f"{per_row:,.0f}",
    )


def _series(points: Sequence[Grown]) -> dict[str, list[tuple[float, float]]]:
    seconds = zip(
        SERIES,
        ([point.timing.best for point in points], [p.memory for p in points], [p.arithmetic for p in points]),
        strict=True,
    )
    return {
        name: [(point.size, 1e3 * value) for point, value in zip(points, values, strict=True)]
        for name, values in seconds
    }
