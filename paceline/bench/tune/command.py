"""`paceline tune MODEL`: the drafting method with the most tokens per second on given traffic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.bench.flags import (
    RUN,
    HtmlFile,
    JsonFile,
    MainCommandGroup,
    Model,
    Quantization,
    Threads,
    integers,
)
from paceline.bench.traffic.flags import WORKLOAD, load_workloads
from paceline.config import DEFAULT_MODEL
from paceline.terminal.flags import Options, with_flags

app = typer.Typer(
    help="Find the drafting that gives the most tokens per second on your traffic: `paceline tune MODEL`.",
    cls=MainCommandGroup,
    no_args_is_help=True,
)


@app.command(RUN)
@with_flags(load=WORKLOAD)
def tune_command(
    load: Options,
    model: Model = DEFAULT_MODEL,
    methods: Annotated[
        str, typer.Option(help="Methods to try, separated by commas, such as ngram,suffix,eagle3.")
    ] = "ngram,suffix",
    lengths: Annotated[str, typer.Option(help="Numbers of drafted tokens to try.")] = "2,4,8",
    branching: Annotated[
        str, typer.Option(help="Branchings to try: 1 is a chain, 4 a tree with 4 children per node.")
    ] = "1",
    concurrency: Annotated[int, typer.Option(help="Number of concurrent requests, as in your traffic.")] = 1,
    rounds: Annotated[int, typer.Option(help="Number of runs of each candidate per prompt.")] = 2,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the choice to this file, as --config of serve, chat and generate takes it."),
    ] = None,
    threads: Threads = None,
    quantization: Quantization = "auto",
    json_file: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """Try methods, lengths and shapes on workloads; report the best one and its expected gain."""
    from paceline.bench.report.output import Report, check_writable
    from paceline.bench.report.terminal import progress
    from paceline.bench.run.contest import SpeculationOptions
    from paceline.bench.run.speculation import OFF
    from paceline.bench.traffic.profiles import closed
    from paceline.bench.tune.search import candidates, tune
    from paceline.bench.tune.view import tune_result

    check_writable("--out", out)
    report = Report(json_file, html)
    configs = candidates(
        methods.split(","), integers("--lengths", lengths), integers("--branching", branching)
    )
    options = SpeculationOptions(
        workloads=load_workloads(load),
        methods={OFF: OFF},
        model=model,
        rounds=rounds,
        profiles=(closed(concurrency),),
        temperature=load["temperature"],
        constrain=load["constrain"],
        threads=threads,
        quantization=quantization,
    )
    with progress(options.num_turns(len(configs) + 3) // 2) as on_turn:
        tuning = tune(options, configs, on_turn)
    report.show(tune_result(tuning))
    if out is not None:
        written = {"model": model, "speculative_config": tuning.chosen}
        out.write_text(json.dumps(written, indent=2) + "\n")
    if not tuning.identical:
        raise typer.Exit(1)
