"""`paceline simulate`: its flags, and what they choose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.bench.flags import HtmlFile
from paceline.terminal.flags import Flag, Group, Options, with_flags

MACHINE: Group = (
    Flag("gpu", str | None, None, "A GPU to simulate: h200, h100, a100, l40s, l4, rtx4090, rtx3090."),
    Flag("bandwidth", float | None, None, "Its bytes a second, instead of the data sheet's."),
    Flag("flops", float | None, None, "Its operations a second, in the same way."),
    Flag("memory", float | None, None, "Its bytes of memory, in the same way."),
    Flag("overhead", float | None, None, "Seconds of a step beside the pass; 0.001 if left out."),
    Flag("params", float | None, None, "Parameters of the model on it; 8e9 if left out."),
    Flag("bits", float | None, None, "Of a weight; 16 if left out."),
    Flag("layers", int | None, None, "Of the model; as usual for its size if left out."),
    Flag("kv_bytes_per_token", float | None, None, "Keys and values of a token; by its layers if left out."),
    Flag("draft_params", float | None, None, "Of the draft head; 0.04 of the model's if left out. 0: free."),
)
TRAFFIC: Group = (
    Flag("concurrency", str | None, None, "Numbers of requests at once; 1,4,16,64,256 if left out."),
    Flag("input_tokens", int, 512, "Of a prompt."),
    Flag("output_tokens", int, 128, "Of an answer."),
    Flag("workload", str | None, None, "Prompts to take lengths from: see `paceline bench`. Needs a MODEL."),
    Flag("threads", int | None, None, "Of a MODEL that is measured; one for each core if left out."),
    Flag("max_num_batched_tokens", int | None, None, "Rows of a pass; 512, with a GPU 2048, if left out."),
)
DRAFTS: Group = (
    Flag("acceptance", str | None, None, "Instead of --alpha: shares right to depth 1, 2...: 0.6,0.4."),
    Flag("from_file", Path | None, None, "Or what `paceline bench --json FILE` found.", "--from"),
    Flag("methods", str | None, None, "Such as off,auto,chain:5; off, auto and one of --gamma if left out."),
    Flag("chances", bool, True, "Drafters say how sure they are.", "--chances/--no-chances"),
)


@with_flags(machine=MACHINE, traffic=TRAFFIC, drafts=DRAFTS)
def simulate_command(
    machine: Options,
    traffic: Options,
    drafts: Options,
    model: Annotated[
        str | None, typer.Argument(help="A model to measure prices with, here; instead of a --gpu.")
    ] = None,
    alpha: Annotated[float, typer.Option(help="Chance that a drafted token is right.")] = 0.7,
    gamma: Annotated[int, typer.Option(help="Drafted tokens, from 1 to 64.")] = 5,
    draft_cost: Annotated[
        float | None,
        typer.Option(help="Of drafting a token, in passes of the target over one row; 0.1 if left out."),
    ] = None,
    row_cost: Annotated[
        float | None, typer.Option(help="Of verifying one, in the same; 0.05 if left out.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run the MODEL too, and hold the simulation against it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: HtmlFile = None,
) -> None:
    """Work out what drafting would give: of chains alone, or by the engine on a MODEL's or a GPU's prices."""
    from paceline.bench.report.output import check_writable
    from paceline.bench.report.page import html_page
    from paceline.bench.report.terminal import print_result
    from paceline.bench.simulate.command import Guesses, check_engine, simulate_arithmetic, simulate_engine

    check_writable("--html", html)
    guesses = Guesses(alpha, gamma, draft_cost, row_cost)
    good = True
    if check:
        result, good = check_engine(model, machine, traffic, drafts)
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
