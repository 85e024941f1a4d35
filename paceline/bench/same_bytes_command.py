"""The command `paceline bench same-bytes`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from paceline.bench.reporting import JsonFile, Model, Report, Workloads, integers
from paceline.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from paceline.bench.same_bytes import Sameness

TEMPERATURES = (0.0, 1.0)


def same_bytes_command(
    model: Model = DEFAULT_MODEL,
    workload: Workloads = None,
    limit: Annotated[int, typer.Option(help="Take the first prompts of each workload only.")] = 40,
    max_tokens: Annotated[int, typer.Option(help="Cut answers that may be longer.")] = 96,
    methods: Annotated[
        str, typer.Option(help="What drafts beside off: a method, or a JSON object as speculative_config.")
    ] = "eagle3",
    concurrency: Annotated[str, typer.Option(help="Numbers of requests at once.")] = "16,64",
    backend: Annotated[str, typer.Option(help="Where the model runs: cpu, torch or cuda.")] = "cuda",
    quantization: Annotated[str, typer.Option(help="Of the weights, as the backend takes it.")] = "auto",
    prefix_caching: Annotated[
        bool, typer.Option(help="Find prefixes of prompts again, which requests then share.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Share of answers that are not those of one request at a time without a draft, greedy and sampled."""
    from paceline.bench.same_bytes import compare_bytes
    from paceline.bench.tables import progress
    from paceline.bench.workloads import load_workload

    report = Report(json_file)
    names = workload or ["chat"]
    prompts = [one for name in names for one in load_workload(name, limit, max_tokens).prompts]
    counts = sorted({1, *integers("--concurrency", concurrency)})
    with progress(2 * len(counts) * len(TEMPERATURES)) as on_turn:
        lines = compare_bytes(
            model,
            prompts,
            [methods],
            counts,
            TEMPERATURES,
            backend,
            quantization,
            lambda line: on_turn(f"{line.draft}, {line.at_once} at once: {line.differing} differ"),
            prefix_caching,
        )
    facts = {"model": model, "backend": backend, "lines": [asdict(line) for line in lines]}
    report.show([same_bytes_table(model, lines)], [], facts)
    if any(line.differing for line in lines):
        raise typer.Exit(1)


def same_bytes_table(model: str, lines: Sequence[Sameness]) -> Table:
    """How many answers differ, by draft, requests at once and temperature."""
    table = Table(title=f"{model}: answers that differ from those of one request alone", title_justify="left")
    table.add_column("draft")
    for heading in ("at once", "temperature", "answers", "differ", "share", "first at token"):
        table.add_column(heading, justify="right")
    for line in lines:
        table.add_row(
            line.draft,
            str(line.at_once),
            f"{line.temperature:g}",
            str(line.answers),
            str(line.differing),
            f"{line.share:.1%}",
            "" if line.first is None else str(line.first),
        )
    return table
