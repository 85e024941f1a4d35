"""`paceline bench grid`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.bench.reporting import (
    HtmlFile,
    JsonFile,
    Model,
    Quantization,
    Report,
    Threads,
    Workloads,
    check_writable,
    integers,
)
from paceline.config import DEFAULT_MODEL

WRITING = "writing"  # always among the workloads: what is hardest to draft for
SMALL, WHOLE = (4, 64), (16, 128)  # prompts of a cell, and tokens of an answer


def grid_command(
    model: Model = DEFAULT_MODEL,
    workload: Workloads = None,
    concurrency: Annotated[str, typer.Option(help="Numbers of requests at once.")] = "1,4,16",
    methods: Annotated[
        list[str] | None,
        typer.Option(
            help="Such as auto,suffix; or one JSON object. May be repeated.",
            show_default="off, auto, and a sweep of methods and lengths",
        ),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help=f"{WHOLE[0]} prompts a cell and {WHOLE[1]} tokens, not {SMALL}.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option(help="Prompts of a cell; never less than run at once, if there are so many.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Cut answers that may be longer.")] = None,
    rounds: Annotated[int, typer.Option(help="How often all of it is done.")] = 1,
    learned: Annotated[
        bool, typer.Option("--learned", help="Let auto begin with what earlier runs have learned.")
    ] = False,
    threads: Threads = None,
    quantization: Quantization = "auto",
    json_file: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """Is auto never slower than off, and near the best fixed setting, on all workloads at all loads?"""
    from paceline.bench.builtin_workloads import BUILT_IN
    from paceline.bench.grid import GridOptions, run_grid
    from paceline.bench.grid_tables import grid_page, show_grid
    from paceline.bench.speculation import parse_methods
    from paceline.bench.tables import progress

    check_writable("--html", html)
    report = Report(json_file)
    prompts, tokens = WHOLE if whole else SMALL
    options = GridOptions(
        workloads=tuple(dict.fromkeys([*(workload or BUILT_IN), WRITING])),
        concurrencies=tuple(integers("--concurrency", concurrency)),
        methods=parse_methods(methods) if methods else None,
        model=model,
        prompts=prompts if limit is None else limit,
        max_tokens=tokens if max_tokens is None else max_tokens,
        rounds=rounds,
        learned=learned,
        threads=threads,
        quantization=quantization,
    )
    with progress(options.num_turns()) as on_turn:
        grid = run_grid(options, on_turn)
    report.show(*show_grid(grid), grid.facts())
    if html is not None:
        Path(html).write_text(grid_page(grid, report.machine), encoding="utf-8")
    if not grid.identical:
        raise typer.Exit(1)
