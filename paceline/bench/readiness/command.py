"""`paceline readiness MODEL`: what to check before speculation is switched on."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.bench.flags import HtmlFile, JsonFile, Model
from paceline.bench.run.command import HERE
from paceline.bench.traffic.flags import WORKLOAD, load_workloads
from paceline.config import DEFAULT_MODEL
from paceline.errors import ConfigError, HeadMismatchError
from paceline.terminal.flags import Options, with_flags, without


@with_flags(load=WORKLOAD, here=without(HERE, "warm", "against", "peer_python"))
def readiness_command(
    load: Options,
    here: Options,
    model: Model = DEFAULT_MODEL,
    concurrency: Annotated[
        int, typer.Option(help="Number of concurrent requests in your traffic; twice it is tested too.")
    ] = 4,
    draft: Annotated[
        str, typer.Option("--draft", help="What to switch on: auto, suffix, eagle3:PATH, or JSON.")
    ] = "auto",
    rounds: Annotated[int, typer.Option(help="Number of runs per prompt.")] = 2,
    json_file: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """Compare speculation with plain decoding on your traffic, and give a verdict (pass, warn, fail) for
    everything to check before it is switched on. Exit status 1 if a check fails."""
    from paceline.bench.readiness.checks import Check, Verdict, checks
    from paceline.bench.readiness.measure import Measured, measure
    from paceline.bench.readiness.view import readiness_result
    from paceline.bench.report.output import Report
    from paceline.bench.report.terminal import progress
    from paceline.bench.run.contest import SpeculationOptions
    from paceline.bench.run.speculation import OFF, parse_methods
    from paceline.bench.traffic.profiles import closed
    from paceline.bench.traffic.workloads import Workload

    report = Report(json_file, html)
    methods = parse_methods([draft])
    if len(methods) != 2:
        raise ConfigError(f"--draft must name one way to draft, such as auto or suffix; got {draft!r}.")
    prompts = [prompt for workload in load_workloads(load) for prompt in workload.prompts]
    options = SpeculationOptions(
        workloads=(Workload("traffic", tuple(prompts)),),
        methods=methods,
        model=model,
        rounds=rounds,
        profiles=(closed(concurrency), closed(2 * concurrency)),
        temperature=load["temperature"],
        constrain=load["constrain"],
        threads=here["threads"],
        quantization=here["quantization"],
        backend=here["backend"],
        device=here["device"],
    )
    (method,) = (label for label in methods if label != OFF)
    measured: Measured | None = None
    try:
        with progress(2 * options.num_turns(len(methods))) as on_turn:
            measured = measure(options, method, load["workload"] is not None, on_turn)
        checked = checks(measured)
    except HeadMismatchError as refused:
        checked = [Check("head fits the target", Verdict.FAIL, "no", str(refused))]
    report.show(readiness_result(model, draft, checked, measured))
    if any(check.verdict is Verdict.FAIL for check in checked):
        raise typer.Exit(1)
