"""`paceline simulate`: the command line."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from paceline.bench.flags import HtmlFile
from paceline.bench.simulate.flags import DRAFTS, FLEET, MACHINE, TRAFFIC
from paceline.terminal.flags import Options, with_flags

ARITHMETIC = "Arithmetic (without a GPU or MODEL)"


@with_flags(machine=MACHINE, traffic=TRAFFIC, drafts=DRAFTS, fleet=FLEET)
def simulate_command(
    machine: Options,
    traffic: Options,
    drafts: Options,
    fleet: Options,
    model: Annotated[
        str | None, typer.Argument(help="A model to measure on this machine, instead of a --gpu.")
    ] = None,
    alpha: Annotated[float, typer.Option(help="Probability that a drafted token is accepted.")] = 0.7,
    gamma: Annotated[int, typer.Option(help="Number of drafted tokens per step, from 1 to 64.")] = 5,
    draft_cost: Annotated[
        float | None,
        typer.Option(
            help="Cost of drafting a token, in one-row passes of the target. Default: 0.1.",
            rich_help_panel=ARITHMETIC,
        ),
    ] = None,
    row_cost: Annotated[
        float | None,
        typer.Option(
            help="Cost of verifying a token, in the same unit. Default: 0.05.", rich_help_panel=ARITHMETIC
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Also run the MODEL, and compare the simulation with it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: HtmlFile = None,
) -> None:
    """Simulate what drafting would gain: on a --gpu with a --model, on this machine with a MODEL, or with
    neither by arithmetic; and how many --replicas a --trace needs."""
    from paceline.bench.report.output import check_writable
    from paceline.bench.report.page import html_page
    from paceline.bench.report.terminal import print_result
    from paceline.bench.simulate.fleet_job import check_fleet_engine, simulate_fleet
    from paceline.bench.simulate.job import (
        Guesses,
        check_engine,
        refuse_given,
        simulate_arithmetic,
        simulate_engine,
    )

    check_writable("--html", html)
    guesses = Guesses(alpha, gamma, draft_cost, row_cost)
    good = True
    if fleet["replicas"] is None:
        refuse_given(FLEET, fleet, "is of a fleet: add --replicas, such as 1..8, or leave it out.")
    if check and fleet["replicas"] is not None:
        result, good = check_fleet_engine(model, machine, traffic, drafts, fleet)
    elif check:
        result, good = check_engine(model, machine, traffic, drafts)
    elif fleet["replicas"] is not None:
        result = simulate_fleet(model, guesses, machine, traffic, drafts, fleet)
    elif model is None and machine["gpu"] is None and machine["bandwidth"] is None:
        result = simulate_arithmetic(guesses, (machine, traffic, drafts))
    else:
        result = simulate_engine(model, guesses, machine, traffic, drafts)
    if as_json:
        typer.echo(json.dumps(result.facts, indent=2))
    else:
        print_result(result)
    if html is not None:
        html.write_text(html_page(result), encoding="utf-8")
    if not good:
        raise typer.Exit(1)
