"""`paceline bench MODEL`: what drafting methods, or servers, give on workloads."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from paceline.bench.reporting import HtmlFile, JsonFile, Report, check_writable, integers
from paceline.config import DEFAULT_MODEL
from paceline.errors import ConfigError
from paceline.terminal.flags import Flag, Group, Options, with_flags

if TYPE_CHECKING:
    from paceline.bench.contest import Contest, SpeculationOptions
    from paceline.bench.profiles import Profile
    from paceline.bench.workloads import Workload

RUN = "run"
USUAL_METHODS = 5  # about, for a progress bar
SHORT_LIMIT = 4  # prompts of each built-in workload, if none is named

WORKLOAD: Group = (
    Flag(
        "workload",
        list[str] | None,
        None,
        "A file of JSON lines, or code-edit, summarize, extract, chat, writing. May be repeated. "
        f"If left out: {SHORT_LIMIT} prompts of each of these.",
    ),
    Flag("limit", int | None, None, "Take the first prompts of each workload only."),
    Flag("max_tokens", int | None, None, "Cut answers that may be longer."),
    Flag("temperature", float | None, None, "0 is greedy. If left out: each prompt's own, 0 unless it says."),
    Flag(
        "constrain",
        bool,
        True,
        "Answer in the form that a prompt's response_format asks for.",
        "--constrain/--no-constrain",
    ),
)
ARRIVALS: Group = (
    Flag("concurrency", str | None, None, "Numbers of requests at once, such as 1,8; 1 if left out."),
    Flag("rate", list[float] | None, None, "Requests a second that come by chance. May be repeated."),
    Flag("trace", list[Path] | None, None, "A CSV file of arrivals to replay. May be repeated."),
    Flag("time_scale", float, 1.0, "Of traces: 0.1 lets requests come ten times as fast."),
    Flag("seed", int, 0, "Decides when requests come by --rate."),
)
SERVERS: Group = (
    Flag(
        "endpoint",
        list[str] | None,
        None,
        "A server to measure instead of an engine here: URL, or LABEL=URL. May be repeated.",
    ),
    Flag("metrics", list[str] | None, None, "Its page of metrics, if not URL/metrics: URL, or LABEL=URL."),
    Flag("api_key", str | None, None, "The key that servers want."),
)
HERE: Group = (
    Flag("backend", str, "cpu", "What runs the model here: cpu, torch, cuda."),
    Flag("device", str, "", "Where, such as cuda; the backend's own if left out."),
    Flag("threads", int | None, None, "Threads; one for each core if not given."),
    Flag("quantization", str, "auto", "How weights are kept: auto, native, int8, none; on cuda fp8, int4."),
    Flag("warm", bool, False, "Also measure a second pass, caches full.", "--warm"),
    Flag("against", str, "", "Peers with prompt lookup of their own: transformers, llama.cpp, vllm."),
    Flag(
        "peer_python",
        list[str] | None,
        None,
        "Where a peer is installed: NAME=INTERPRETER. May be repeated.",
    ),
)


class MainCommandGroup(TyperGroup):
    """A group whose first word may be a model instead of a command: then it runs the main command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        word = args[0] if args else ""
        if word and word not in self.commands and word not in ctx.help_option_names:
            near = get_close_matches(word, self.commands, n=1, cutoff=0.8)
            if near and not Path(word).exists():
                ctx.fail(f"There is neither a command nor a model {word!r}. Did you mean {near[0]!r}?")
            args = [RUN, *args]
        return super().parse_args(ctx, args)


@with_flags(load=WORKLOAD, arrivals=ARRIVALS, servers=SERVERS, here=HERE)
def run_command(
    load: Options,
    arrivals: Options,
    servers: Options,
    here: Options,
    model: Annotated[
        str | None,
        typer.Argument(
            help="An alias, a .gguf file, a folder or a hub id; with --endpoint, what the server calls it.",
            show_default=f"{DEFAULT_MODEL}, or the server's first",
        ),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            help="Such as off,ngram,suffix; or one JSON object. May be repeated.",
            show_default="off,auto,ngram,suffix and the head that is shipped for the model",
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(help="How often each has its turn on a prompt.", show_default="3; 1 with --endpoint"),
    ] = None,
    slo: Annotated[
        str | None, typer.Option(help="Milliseconds that a good request keeps: ttft=500,tpot=50,e2e=9000.")
    ] = None,
    json_file: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """What drafting methods, or servers, give on workloads, in turns, and whether any token differs."""
    from paceline.bench.contest import SpeculationOptions
    from paceline.bench.figures import parse_objective
    from paceline.bench.html_report import html_report
    from paceline.bench.peers import parse_peers
    from paceline.bench.speculation import parse_methods
    from paceline.bench.speculation_tables import show_contest

    check_writable("--html", html)
    report = Report(json_file)
    away = servers["endpoint"] is not None
    _refuse_unused(away, servers, here)
    workloads = load_workloads(load)
    options = SpeculationOptions(
        workloads=workloads,
        methods=parse_methods(methods) if methods else {},
        model=model or DEFAULT_MODEL,
        rounds=(1 if away else 3) if rounds is None else rounds,
        profiles=_profiles(arrivals, max(len(workload.prompts) for workload in workloads)),
        warm=here["warm"],
        temperature=load["temperature"],
        constrain=load["constrain"],
        threads=here["threads"],
        quantization=here["quantization"],
        backend=here["backend"],
        device=here["device"],
        peers=parse_peers([name for name in here["against"].split(",") if name], here["peer_python"] or []),
        objective=None if slo is None else parse_objective(slo),
    )
    contest = _measure(options, servers, model)
    report.show(*show_contest(contest), contest.facts())
    if html is not None:
        html.write_text(html_report(contest, report.machine), encoding="utf-8")
    if not contest.identical or not contest.valid:
        raise typer.Exit(1)


def _measure(options: SpeculationOptions, servers: Options, model: str | None) -> Contest:
    """By engines here, or by the servers that are named."""
    from paceline.bench.contest import run_contest
    from paceline.bench.served_contest import parse_addresses, run_served
    from paceline.bench.tables import progress

    if servers["endpoint"] is None:
        with progress(options.num_turns(len(options.methods) or USUAL_METHODS)) as on_turn:
            return run_contest(options, on_turn)
    addresses = parse_addresses("--endpoint", servers["endpoint"])
    metrics = parse_addresses("--metrics", servers["metrics"] or [])
    with progress(options.num_turns(len(options.methods) or len(addresses))) as on_turn:
        return run_served(options, addresses, metrics, servers["api_key"], model, on_turn)


def load_workloads(load: Options) -> tuple[Workload, ...]:
    """What the flags of WORKLOAD ask for."""
    from paceline.bench.builtin_workloads import BUILT_IN
    from paceline.bench.workloads import load_workload

    names: Sequence[str] = list(BUILT_IN) if load["workload"] is None else load["workload"]
    limit = SHORT_LIMIT if load["workload"] is None and load["limit"] is None else load["limit"]
    return tuple(load_workload(name, limit, load["max_tokens"]) for name in names)


def _profiles(arrivals: Options, num_requests: int) -> tuple[Profile, ...]:
    """All ways in which requests come, those at once first."""
    from paceline.bench.profiles import closed, poisson, replay

    rates, traces = arrivals["rate"] or [], arrivals["trace"] or []
    at_once = arrivals["concurrency"] or (None if rates or traces else "1")
    if arrivals["time_scale"] != 1 and not traces:
        raise ConfigError("--time-scale is of traces: name one by --trace, or leave it out.")
    return (
        *(closed(number) for number in (integers("--concurrency", at_once) if at_once else [])),
        *(poisson(rate, arrivals["seed"], num_requests) for rate in rates),
        *(replay(path, arrivals["time_scale"]) for path in traces),
    )


def _refuse_unused(away: bool, servers: Options, here: Options) -> None:
    """Refuse what would have no effect."""

    def given(flags: Group, values: dict[str, Any]) -> list[str]:
        return ["--" + flag.name.replace("_", "-") for flag in flags if values[flag.name] != flag.default]

    if away and (unused := given(HERE, here)):
        raise ConfigError(f"{unused[0]} is of engines in this process: leave it out with --endpoint.")
    if not away and (unused := given(SERVERS, servers)):
        raise ConfigError(f"{unused[0]} is of servers: name one by --endpoint, or leave it out.")
