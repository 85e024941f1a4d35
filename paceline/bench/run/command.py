"""`paceline bench run` and `paceline bench serve`: the command lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.bench.flags import HtmlFile, JsonFile
from paceline.bench.traffic.flags import ARRIVALS, WORKLOAD, arrival_profiles, load_workloads
from paceline.config import DEFAULT_MODEL
from paceline.errors import ConfigError
from paceline.terminal.flags import Flag, Group, Options, by_topic, with_flags

if TYPE_CHECKING:
    from paceline.bench.run.contest import Contest, SpeculationOptions

USUAL_METHODS = 5  # approximate, for a progress bar

ASKED: Group = (
    Flag(
        "metrics",
        list[str] | None,
        None,
        "Address of a server's metrics: URL or LABEL=URL. Default: /metrics.",
    ),
    Flag("api_key", str | None, None, "API key of the servers."),
)
SERVERS: Group = (
    Flag(
        "endpoint",
        list[str] | None,
        None,
        "Server to measure instead of an engine in this process: URL or LABEL=URL. May be repeated.",
    ),
    *ASKED,
)
HERE: Group = (
    Flag("backend", str, "cpu", "Backend of the model: cpu, torch or cuda."),
    Flag("device", str, "", "Device, such as cuda. Default: the backend's own."),
    Flag("threads", int | None, None, "Number of threads. Default: one per core."),
    Flag(
        "quantization",
        str,
        "auto",
        "Format of weights: auto, int8, int4, none, native (cpu, cuda) or fp8 (torch, cuda).",
    ),
    Flag("warm", bool, False, "Also measure a second pass over the workload, with warm drafters.", "--warm"),
    Flag(
        "against",
        str,
        "",
        "Other engines to compare with, each with its own prompt lookup: transformers, llama.cpp, vllm.",
    ),
    Flag(
        "peer_python",
        list[str] | None,
        None,
        "Python interpreter that has an engine of --against: NAME=PATH. May be repeated.",
    ),
)
ASKED = by_topic(ASKED, {"Servers": "metrics api_key"})
SERVERS = by_topic(SERVERS, {"Servers": "metrics api_key"})
HERE = by_topic(
    HERE,
    {"Engine in this process": "backend device threads quantization warm", "Peers": "against peer_python"},
)
Rounds = Annotated[
    int | None,
    typer.Option(help="Number of runs per prompt.", show_default="3; 1 for servers"),
]
Objective = Annotated[
    str | None,
    typer.Option("--slo", help="Latency objective in milliseconds, such as ttft=500,tpot=50,e2e=9000."),
]


@with_flags(load=WORKLOAD, arrivals=ARRIVALS, servers=SERVERS, here=HERE)
def run_command(
    load: Options,
    arrivals: Options,
    servers: Options,
    here: Options,
    model: Annotated[
        str | None,
        typer.Argument(
            help="An alias, a .gguf file, a folder or a hub id; with --endpoint, its name on the server.",
            show_default=f"{DEFAULT_MODEL}, or the server's first",
        ),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            help="Methods to compare, such as off,ngram,suffix, or a JSON object. May be repeated.",
            show_default="off,auto,ngram,suffix and the shipped head",
        ),
    ] = None,
    rounds: Rounds = None,
    slo: Objective = None,
    json_file: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """Compare drafting methods, or servers, on your prompts, and check that no token differs."""
    _refuse_unused(servers["endpoint"] is not None, servers, here)
    _run(load, arrivals, servers, here, model, methods, rounds, slo, json_file, html)


@with_flags(load=WORKLOAD, arrivals=ARRIVALS, asked=ASKED)
def serve_command(
    load: Options,
    arrivals: Options,
    asked: Options,
    url: Annotated[list[str], typer.Argument(help="Running servers: URL, or LABEL=URL to compare several.")],
    model: Annotated[
        str | None, typer.Option(help="Name of the model on the server.", show_default="its first")
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(help="Drafting methods to request (paceline servers only). May be repeated."),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            help="Models and routes of one server to compare, the reference first: large,small,careful."
        ),
    ] = None,
    rounds: Rounds = None,
    slo: Objective = None,
    json_file: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """Measure running OpenAI-compatible servers from the client's side."""
    from paceline.bench.servers.contest import parse_addresses

    parse_addresses("URL", url)  # so that errors name this command's argument
    if model is not None and models is not None:
        raise ConfigError("--model and --models are both given: leave one out.")
    names = tuple(name.strip() for name in (models or "").split(",") if name.strip())
    here = {flag.name: flag.default for flag in HERE}
    servers = {**asked, "endpoint": url}
    _run(load, arrivals, servers, here, model, methods, rounds, slo, json_file, html, names)


def _run(
    load: Options,
    arrivals: Options,
    servers: Options,
    here: Mapping[str, Any],
    model: str | None,
    methods: list[str] | None,
    rounds: int | None,
    slo: str | None,
    json_file: Path | None,
    html: Path | None,
    models: tuple[str, ...] = (),
) -> None:
    """Measure and report. Exit status 1 if outputs differ or violate their schema."""
    from paceline.bench.peers.lookup import parse_peers
    from paceline.bench.report.output import Report
    from paceline.bench.run.contest import SpeculationOptions
    from paceline.bench.run.figures import parse_objective
    from paceline.bench.run.speculation import parse_methods
    from paceline.bench.run.view import contest_result

    report = Report(json_file, html)
    workloads = load_workloads(load)
    usual_rounds = 3 if servers["endpoint"] is None else 1
    options = SpeculationOptions(
        workloads=workloads,
        methods=parse_methods(methods) if methods else {},
        model=model or DEFAULT_MODEL,
        rounds=usual_rounds if rounds is None else rounds,
        profiles=arrival_profiles(arrivals, max(workload.num_requests for workload in workloads)),
        warm=here["warm"],
        temperature=load["temperature"],
        constrain=load["constrain"],
        threads=here["threads"],
        quantization=here["quantization"],
        backend=here["backend"],
        device=here["device"],
        peers=parse_peers([name for name in here["against"].split(",") if name], here["peer_python"] or []),
        objective=None if slo is None else parse_objective(slo),
        models=models,
    )
    contest = _measure(options, servers, model)
    report.show(contest_result(contest))
    if not contest.identical or not contest.valid:
        raise typer.Exit(1)


def _measure(options: SpeculationOptions, servers: Options, model: str | None) -> Contest:
    """Measure with engines here, or on the named servers."""
    from paceline.bench.report.terminal import progress
    from paceline.bench.run.contest import run_contest
    from paceline.bench.servers.contest import parse_addresses, run_served

    if servers["endpoint"] is None:
        with progress(options.num_turns(len(options.methods) or USUAL_METHODS)) as on_turn:
            return run_contest(options, on_turn)
    addresses = parse_addresses("--endpoint", servers["endpoint"])
    metrics = parse_addresses("--metrics", servers["metrics"] or [])
    with progress(options.num_turns(len(options.methods or options.models) or len(addresses))) as on_turn:
        return run_served(options, addresses, metrics, servers["api_key"], model, on_turn)


def _refuse_unused(away: bool, servers: Options, here: Options) -> None:
    """Raise ConfigError for flags that would have no effect."""

    def given(flags: Group, values: dict[str, Any]) -> list[str]:
        return ["--" + flag.name.replace("_", "-") for flag in flags if values[flag.name] != flag.default]

    if away and (unused := given(HERE, here)):
        raise ConfigError(f"{unused[0]} is of engines in this process: leave it out with --endpoint.")
    if not away and (unused := given(SERVERS, servers)):
        raise ConfigError(f"{unused[0]} is of servers: name one by --endpoint, or leave it out.")
