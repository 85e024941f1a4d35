"""`paceline simulate`: the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.bench.flags import HtmlFile
from paceline.terminal.flags import Flag, Group, Options, with_flags

MACHINE: Group = (
    Flag("gpu", str | None, None, "A GPU to simulate: h200, h100, a100, l40s, l4, rtx4090, rtx3090."),
    Flag("bandwidth", float | None, None, "Bytes per second, instead of the data sheet's."),
    Flag("flops", float | None, None, "Operations per second, instead of the data sheet's."),
    Flag("memory", float | None, None, "Bytes of memory, instead of the data sheet's."),
    Flag("overhead", float | None, None, "Seconds per step besides the pass. Default: 0.001."),
    Flag("params", float | None, None, "Parameters of the model. Default: 8e9."),
    Flag("bits", float | None, None, "Bits per weight. Default: 16."),
    Flag("layers", int | None, None, "Layers of the model. Default: as usual for its size."),
    Flag("kv_bytes_per_token", float | None, None, "KV cache bytes per token. Default: by the layers."),
    Flag(
        "draft_params",
        float | None,
        None,
        "Parameters of the draft head. Default: 0.04 of the model's. 0: free.",
    ),
)
TRAFFIC: Group = (
    Flag("concurrency", str | None, None, "Numbers of concurrent requests. Default: 1,4,16,64,256."),
    Flag("input_tokens", int, 512, "Tokens per prompt."),
    Flag("output_tokens", int, 128, "Tokens per answer."),
    Flag(
        "workload", str | None, None, "Workload to take lengths from, as of `paceline bench`. Needs a MODEL."
    ),
    Flag("threads", int | None, None, "Threads of a measured MODEL. Default: one per core."),
    Flag("max_num_batched_tokens", int | None, None, "Rows per pass. Default: 512, with a GPU 2048."),
)
DRAFTS: Group = (
    Flag(
        "acceptance", str | None, None, "Instead of --alpha: fractions accepted at depth 1, 2, ...: 0.6,0.4."
    ),
    Flag("from_file", Path | None, None, "Acceptance from a file of `paceline bench --json FILE`.", "--from"),
    Flag("methods", str | None, None, "Such as off,auto,chain:5. Default: off, auto and a chain of --gamma."),
    Flag("chances", bool, True, "Drafters report their confidence.", "--chances/--no-chances"),
)


@with_flags(machine=MACHINE, traffic=TRAFFIC, drafts=DRAFTS)
def simulate_command(
    machine: Options,
    traffic: Options,
    drafts: Options,
    model: Annotated[
        str | None, typer.Argument(help="A model to measure prices with on this machine, instead of a --gpu.")
    ] = None,
    alpha: Annotated[float, typer.Option(help="Probability that a drafted token is accepted.")] = 0.7,
    gamma: Annotated[int, typer.Option(help="Number of drafted tokens, from 1 to 64.")] = 5,
    draft_cost: Annotated[
        float | None,
        typer.Option(help="Cost of drafting a token, in one-row passes of the target. Default: 0.1."),
    ] = None,
    row_cost: Annotated[
        float | None, typer.Option(help="Cost of verifying a token, in the same unit. Default: 0.05.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run the MODEL too, and compare the simulation with it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: HtmlFile = None,
) -> None:
    """Compute what drafting would gain: by arithmetic, or by the engine on a MODEL's or a GPU's prices."""
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
