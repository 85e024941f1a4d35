"""`python -m benchmarks replicas`: the command lines. All need the extra `ray`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from paceline.bench.flags import Model
from paceline.config import DEFAULT_MODEL
from paceline.terminal.help import App

if TYPE_CHECKING:
    from benchmarks.server.replica_faults import Round

Clients = Annotated[int, typer.Option(help="Number of concurrent clients.")]
Tokens = Annotated[int, typer.Option(help="Tokens per answer.")]
Turns = Annotated[int, typer.Option(help="Turns of each server.")]

app = App(help="Two replicas: what they survive and what they cost.", no_args_is_help=True)


@app.command("harm", hidden=True)  # the former name, in lab notes
@app.command("faults")
def faults_command(
    model: Model = DEFAULT_MODEL,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            "--fault",
            "--harm",
            help="kill, hang (SIGSTOP), restart (all replicas, in turn), none. Default: kill.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Times of each.")] = 10,
    clients: Clients = 50,
    max_tokens: Tokens = 64,
    progress: Annotated[
        float, typer.Option(help="Inject it when the furthest answer has this share of its tokens.")
    ] = 0.5,
) -> None:
    """Inject faults into replicas while clients stream. Answers are compared with those of one process."""
    from benchmarks.server.replica_faults import measure_faults
    from benchmarks.server.replicas import FAULTS
    from paceline.errors import ConfigError

    wanted = fault or ["kill"]
    if unknown := set(wanted) - FAULTS.keys():
        raise ConfigError(f"--fault is one of {', '.join(FAULTS)}, got {', '.join(unknown)}.")
    bad = late = 0
    for one in measure_faults(model, wanted, rounds, clients, max_tokens, progress):
        bad += one.failed + one.differing
        late += one.late
        typer.echo(_round(one))
    typer.echo(f"rounds in which an answer paused longer than a new request would have waited: {late}")
    if bad:
        raise typer.Exit(1)


def _round(one: Round) -> str:
    from benchmarks.server.replica_speed import milliseconds

    pauses = one.pauses or [0.0]
    return (
        f"{one.fault:8} {one.requests} requests, {one.failed} failed, {one.differing} differ, "
        f"{one.resumed} resumed, {one.seconds:.1f} s; pause: p50 {milliseconds(pauses, 0.5):.0f} ms, max "
        f"{milliseconds(pauses, 1):.0f} ms; noticed after {1e3 * one.noticed:.0f} ms, then a new request "
        f"took {1e3 * max(one.new):.0f} ms to its first text"
    )


@app.command("ingress")
def ingress_command(
    model: Model = DEFAULT_MODEL,
    turns: Turns = 5,
    requests: Annotated[int, typer.Option(help="Requests per turn.")] = 96,
) -> None:
    """What the ingress adds to a first token, for 1 and for 16 clients."""
    from benchmarks.server.replica_speed import measure_ingress, milliseconds

    for clients in (1, 16):
        sides = measure_ingress(model, turns, clients, requests)
        shares = (0.5, 0.9, 0.99)
        found = [[milliseconds(side.first_texts, share) for share in shares] for side in sides]
        for side, values in zip(sides, found, strict=True):
            typer.echo(f"{clients:2} clients, {side.name:31} {_percentiles(values)}")
        added = [two - one for one, two in zip(*found, strict=True)]
        typer.echo(f"{clients:2} clients, {'added':31} {_percentiles(added)}")


def _percentiles(values: list[float]) -> str:
    return ", ".join(
        f"{name} {value:.1f} ms" for name, value in zip(("p50", "p90", "p99"), values, strict=True)
    )


@app.command("throughput")
def throughput_command(
    model: Model = DEFAULT_MODEL, turns: Turns = 4, clients: Clients = 16, max_tokens: Tokens = 64
) -> None:
    """Two replicas of one thread beside one process of two threads."""
    from statistics import fmean

    from benchmarks.server.replica_speed import measure_throughput

    sides = measure_throughput(model, turns, clients, max_tokens)
    for side in sides:
        speeds = " ".join(f"{speed:.0f}" for speed in side.tokens_per_second)
        cpu = " ".join(f"{speed:.0f}" for speed in side.tokens_per_cpu_second)
        typer.echo(f"{side.name:27} tokens/s {speeds}; per CPU second {cpu}")
    one, two = sides
    ratio = fmean(two.tokens_per_second) / fmean(one.tokens_per_second)
    cpu_ratio = fmean(two.tokens_per_cpu_second) / fmean(one.tokens_per_cpu_second)
    typer.echo(
        f"replicas / one process: {ratio:.2f} of the tokens per second, {cpu_ratio:.2f} per CPU second"
    )


@app.command("hits")
def hits_command(
    model: Model = DEFAULT_MODEL,
    prefixes: Annotated[int, typer.Option(help="Number of different prefixes.")] = 12,
    prefix_tokens: Annotated[int, typer.Option(help="Tokens of each.")] = 192,
    requests: Annotated[int, typer.Option(help="Number of requests.")] = 120,
    clients: Clients = 4,
) -> None:
    """Prefix cache hits on two replicas, beside one process and beside random routing."""
    from benchmarks.server.replica_speed import SharedPrefixes, measure_hits

    trace = SharedPrefixes(prefixes, prefix_tokens, requests, clients)
    for name, rate in measure_hits(model, trace).items():
        typer.echo(f"{name:30} {100 * rate:.1f} % of prompt tokens were cached")
