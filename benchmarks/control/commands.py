"""`python -m benchmarks` grid, auto-replay, changes and bad-drafters: the command lines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.bench.flags import HtmlFile, JsonFile, Model, Quantization, Threads, Workloads
from paceline.config import DEFAULT_MODEL
from paceline.errors import ConfigError
from paceline.options import check_integer
from paceline.terminal.flags import integers

if TYPE_CHECKING:
    from benchmarks.control.grid import GridOptions
    from paceline.bench.report.output import Report

WRITING = "writing"  # always included: the hardest to draft for
SMALL, WHOLE = (4, 64), (16, 128)  # prompts per cell, and tokens per answer


def grid_command(
    model: Model = DEFAULT_MODEL,
    workload: Workloads = None,
    concurrency: Annotated[
        str | None,
        typer.Option(help="Numbers of concurrent requests.", show_default="1,4,16; on a GPU 1,4,16,64"),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            help="Such as auto,suffix; or one JSON object. May be repeated. On a GPU each is JSON: a "
            "fixed setting, beside off and auto.",
            show_default="off, auto, and a sweep of methods and lengths",
        ),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help=f"{WHOLE[0]} prompts per cell and {WHOLE[1]} tokens, not {SMALL}.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option(help="Prompts per cell; at least the concurrency, if there are as many.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum tokens per answer.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy.", show_default="each prompt's own, or 0")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Number of runs per prompt.", show_default="1; on a GPU 4")
    ] = None,
    groups: Annotated[
        int, typer.Option(help="On a GPU: groups of prompts in each cell, one answered after the other.")
    ] = 1,
    learned: Annotated[
        bool, typer.Option("--learned", help="Let auto start with what earlier runs have learned.")
    ] = False,
    backend: Annotated[str, typer.Option(help="Backend of the model: cpu, torch or cuda.")] = "cpu",
    draft: Annotated[str, typer.Option(help="What auto is, on a GPU; such as auto,eagle3:PATH.")] = "auto",
    seconds: Annotated[
        float | None,
        typer.Option(help="On a GPU: start no cell after this many seconds.", show_default="all cells"),
    ] = None,
    order: Annotated[
        int | None,
        typer.Option(
            help="On a GPU: the seed of a random order of the cells.", show_default="workload by workload"
        ),
    ] = None,
    threads: Threads = None,
    quantization: Quantization = "auto",
    json_file: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """Is auto never slower than off, and close to the best fixed setting, in every workload and load?"""
    from benchmarks.control.grid import GridOptions
    from paceline.bench.report.output import Report
    from paceline.bench.run.speculation import parse_methods
    from paceline.bench.traffic.builtin_workloads import BUILT_IN

    report = Report(json_file, html)
    prompts, tokens = WHOLE if whole else SMALL
    on_device = backend == "cuda"
    check_integer(ConfigError, "--groups", groups, 1, None)
    if on_device and learned:
        raise ConfigError("on a GPU the grid begins with an empty memory: leave out --learned.")
    if on_device and not all(method.lstrip().startswith("{") for method in methods or ()):
        raise ConfigError(
            "on a GPU each of --methods is one setting that requests ask for: a JSON object such as "
            '\'{"method": "eagle3", "num_speculative_tokens": 3}\'.'
        )
    options = GridOptions(
        workloads=tuple(dict.fromkeys([*(workload or BUILT_IN), *(() if on_device else (WRITING,))])),
        concurrencies=tuple(
            integers("--concurrency", concurrency or ("1,4,16,64" if on_device else "1,4,16"))
        ),
        methods=parse_methods(methods) if methods else None,
        model=model,
        prompts=prompts if limit is None else limit,
        max_tokens=tokens if max_tokens is None else max_tokens,
        temperature=temperature,
        rounds=rounds or (4 if on_device else 1),
        groups=groups,
        learned=learned,
        backend=backend,
        temperatures=() if temperature is None else (temperature,),
        auto=draft,
        seconds=seconds,
        order=order,
        threads=threads,
        quantization=quantization,
    )
    _measure_grid(options, report)


def _measure_grid(options: GridOptions, report: Report) -> None:
    """Measure and report. Exit status 1 if outputs differ."""
    from benchmarks.control.device_grid import run_device_grid
    from benchmarks.control.grid import run_grid
    from benchmarks.control.grid_report import grid_result
    from paceline.bench.report.terminal import progress

    with progress(options.num_turns()) as on_turn:
        grid = (run_device_grid if options.backend == "cuda" else run_grid)(options, on_turn)
    report.show(grid_result(grid))
    if not grid.identical:
        raise typer.Exit(1)


def changes_command(
    model: Model = DEFAULT_MODEL,
    crowd: Annotated[int, typer.Option(help="Number of concurrent requests under high load.")] = 32,
    threads: Threads = None,
    quantization: Quantization = "auto",
    json_file: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """How fast auto reacts when repetitive text becomes random, or when load rises and falls."""
    from benchmarks.control.changes import run_changes
    from benchmarks.control.changes_report import changes_result
    from paceline.bench.report.output import Report
    from paceline.bench.report.terminal import progress

    report = Report(json_file, html)
    with progress(6) as on_turn:
        changes = run_changes(model, threads, quantization, crowd, on_turn)
    report.show(changes_result(changes))


def auto_replay_command(
    file: Annotated[Path, typer.Argument(help="The recorded answers; made first if there is no such file.")],
    model: Model = DEFAULT_MODEL,
    workload: Workloads = None,
    max_tokens: Annotated[int, typer.Option(help="Of a recorded answer.")] = 64,
    orders: Annotated[int, typer.Option(help="Number of random orders of the cells.")] = 3,
    threads: Threads = None,
    json_file: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """The grid of auto without a GPU: recorded answers, and the times of an H200's passes."""
    from benchmarks.control.replay.recording import read_recording, record
    from benchmarks.control.replay.report import replay_result
    from paceline.bench.report.output import Report
    from paceline.bench.report.terminal import progress
    from paceline.bench.traffic.builtin_workloads import BUILT_IN

    report = Report(json_file, html)
    check_integer(ConfigError, "--orders", orders, 1, None)
    if not file.exists():
        names = list(workload or BUILT_IN)
        with progress(2 * len(names)) as on_turn:
            record(file, model, names, max_tokens, threads, on_turn)
    recording = read_recording(file)
    with progress(orders * len(recording) * 4) as on_turn:
        result = replay_result(recording, orders, on_turn)
    report.show(result)


def bad_drafters_command(
    model: Model = DEFAULT_MODEL,
    concurrency: Annotated[str, typer.Option(help="Numbers of concurrent requests.")] = "1,4,16",
    limit: Annotated[int, typer.Option(help="Prompts of each built-in workload.")] = 16,
    json_file: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """auto with a drafter that is always wrong and with one that is slow, compared with off."""
    from benchmarks.control.bad_drafters import bad_drafters_result, run_bad_drafters
    from paceline.bench.report.output import Report

    report = Report(json_file, html)
    contest = run_bad_drafters(model, integers("--concurrency", concurrency), limit)
    report.show(bad_drafters_result(contest))
    if not contest.identical:
        raise typer.Exit(1)
