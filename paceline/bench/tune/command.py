"""`paceline tune MODEL`: the drafting method with the most tokens per second on given traffic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.bench.flags import HtmlFile, JsonFile, Model, Quantization, Threads
from paceline.bench.traffic.flags import WORKLOAD, load_workloads
from paceline.config import DEFAULT_MODEL
from paceline.terminal.flags import Options, integers, with_flags


@with_flags(load=WORKLOAD)
def tune_command(
    load: Options,
    model: Model = DEFAULT_MODEL,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods to try, such as suffix,eagle3.",
            show_default="auto,ngram,suffix and the shipped head",
        ),
    ] = None,
    lengths: Annotated[str, typer.Option(help="Numbers of drafted tokens to try.")] = "2,4,8",
    branching: Annotated[
        str, typer.Option(help="Branchings to try: 1 is a chain, 4 a tree with up to 4 children per node.")
    ] = "1",
    concurrency: Annotated[int, typer.Option(help="Number of concurrent requests in your traffic.")] = 1,
    rounds: Annotated[int, typer.Option(help="Number of runs of each candidate per prompt.")] = 2,
    out: Annotated[
        Path | None,
        typer.Option(help="File to write the choice to, for --config of serve, chat and generate."),
    ] = None,
    threads: Threads = None,
    quantization: Quantization = "auto",
    json_file: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """Find the drafting method, length and shape with the most tokens per second on your prompts."""
    from paceline.bench.report.output import Report, check_writable
    from paceline.bench.report.terminal import progress
    from paceline.bench.run.contest import SpeculationOptions, contest_config, usual_methods
    from paceline.bench.run.speculation import OFF
    from paceline.bench.traffic.profiles import closed
    from paceline.bench.tune.search import candidates, tune
    from paceline.bench.tune.view import tune_result
    from paceline.build import load_model

    check_writable("--out", out)
    report = Report(json_file, html)
    shapes = integers("--lengths", lengths), integers("--branching", branching)
    configs = [] if methods is None else candidates(methods.split(","), *shapes)
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
    loaded = load_model(contest_config(options, OFF))
    if methods is None:
        configs = candidates([name for name in usual_methods(loaded) if name != OFF], *shapes)
    with progress(options.num_turns(len(configs) + 3) // 2) as on_turn:
        tuning = tune(options, configs, on_turn, loaded)
    report.show(tune_result(tuning))
    if out is not None:
        written = {"model": model, "speculative_config": tuning.chosen}
        out.write_text(json.dumps(written, indent=2) + "\n")
    if not tuning.identical:
        raise typer.Exit(1)
