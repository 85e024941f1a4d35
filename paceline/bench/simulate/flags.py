"""`paceline simulate`: the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.bench.flags import HtmlFile
from paceline.terminal.flags import PROMPT_FILE, Flag, Group, Options, by_topic, topic, with_flags

ARITHMETIC = "Arithmetic (without a GPU or MODEL)"
MACHINE: Group = (
    Flag(
        "gpu",
        str | None,
        None,
        "GPU to simulate: b200, h200, h100, a100, mi300x, l40s, l4, rtx4090 or rtx3090; several as in 4xh100 "
        "(tensor parallel).",
    ),
    Flag(
        "preset",
        str | None,
        None,
        "Model to simulate on the GPU, such as llama-3.1-70b or qwen3-30b-a3b. An unknown name lists all.",
        "--model",
    ),
    Flag("gpu_price", float | None, None, "Price of one GPU for one hour, for the cost of a million tokens."),
    Flag("params", float | None, None, "Parameters of a model without a preset. Default: 8e9."),
    Flag("bits", float | None, None, "Bits per weight. Default: the preset's, or 16."),
    Flag("layers", int | None, None, "Layers of a model without a preset. Default: usual for its size."),
    Flag(
        "kv_bytes_per_token",
        float | None,
        None,
        "KV cache bytes per token. Default: the preset's, or 8 heads of 128 per layer in 16 bits.",
    ),
    Flag(
        "draft_params",
        float | None,
        None,
        "Parameters of the draft head; 0 for look-ups, which are free. Default: an EAGLE-3 head for the "
        "preset, or 0.04 of --params.",
    ),
    Flag("bandwidth", float | None, None, "Memory bandwidth in bytes per second. Default: the data sheet's."),
    Flag("flops", float | None, None, "Dense bf16 operations per second. Default: the data sheet's."),
    Flag("memory", float | None, None, "Memory of one GPU in bytes. Default: the data sheet's."),
    Flag("overhead", float | None, None, "Seconds per step besides the pass. Default: 0.001."),
)
TRAFFIC: Group = (
    Flag("concurrency", str | None, None, "Numbers of concurrent requests. Default: 1,4,16,64,256."),
    Flag(
        "rate",
        str | None,
        None,
        "Requests per second (Poisson arrivals), such as 2,4,8; auto: from 25 to 110 % of saturation.",
    ),
    Flag(
        "slo",
        str | None,
        None,
        "Latency objective in milliseconds, such as ttft=500,tpot=50: find the highest request rate, or the "
        "smallest fleet, at which 90 % of requests meet it.",
    ),
    Flag("input_tokens", int, 512, "Tokens per prompt."),
    Flag("output_tokens", int, 128, "Tokens per answer."),
    Flag(
        "workload",
        str | None,
        None,
        "Prompts to take the lengths from, as of `paceline bench`. Needs a measured MODEL.",
        " ".join(PROMPT_FILE),
    ),
    Flag("threads", int | None, None, "CPU threads of a measured MODEL. Default: one per core."),
    Flag(
        "max_num_batched_tokens",
        int | None,
        None,
        "Maximum tokens in one pass. Default: 2048 with a --gpu, 512 with a MODEL.",
    ),
)
DRAFTS: Group = topic(
    "Drafts",
    Flag(
        "acceptance",
        str | None,
        None,
        "Instead of --alpha: fractions of drafts accepted down to depth 1, 2, ..., such as 0.6,0.4.",
    ),
    Flag("from_file", Path | None, None, "Take acceptance from a file of `paceline bench --json`.", "--from"),
    Flag(
        "methods",
        str | None,
        None,
        "Methods to compare, such as off,auto,chain:5. Default: off, auto and a chain of --gamma.",
    ),
    Flag("chances", bool, True, "Drafters report their confidence.", "--chances/--no-chances"),
)

FLEET: Group = topic(
    "Fleet",
    Flag(
        "replicas",
        str | None,
        None,
        "Simulate a fleet of this many replicas, or of a range such as 1..16: --slo finds the smallest.",
    ),
    Flag(
        "trace",
        Path | None,
        None,
        "Requests of the fleet: a .csv with TIMESTAMP, ContextTokens and GeneratedTokens, or a .jsonl with "
        "timestamp, input_length, output_length and hash_ids.",
    ),
    Flag("time_scale", float, 1.0, "Factor on the times of --trace: 0.1 replays ten times as fast."),
    Flag("limit", int | None, None, "Take only this many requests of --trace."),
    Flag(
        "shared_prefixes",
        str | None,
        None,
        "Prefixes that prompts of a .csv begin with, such as 32x1024: 32 of 1,024 tokens. Default: none.",
    ),
    Flag(
        "routing",
        str,
        "prefix",
        "Routing policies to compare: prefix, least-loaded, random; pooled is one replica as large as all.",
    ),
    Flag("max_num_seqs", int | None, None, "Requests per pass of a replica. Default: 256, with a MODEL 16."),
    Flag(
        "server",
        str | None,
        None,
        "Milliseconds that the server of a replica adds to its engine, per request, prompt_token, step "
        "(pass) and token, such as request=15,step=0.5. Default: none.",
    ),
    Flag("replica_price", float | None, None, "Price of one replica for one hour. Default: by --gpu-price."),
)

MACHINE = by_topic(
    MACHINE,
    {
        "Model": "params bits layers kv_bytes_per_token draft_params",
        "GPU": "bandwidth flops memory overhead",
    },
)
TRAFFIC = by_topic(TRAFFIC, {"Traffic": "input_tokens output_tokens workload threads max_num_batched_tokens"})


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
    from paceline.bench.simulate.command import (
        Guesses,
        check_engine,
        refuse_given,
        simulate_arithmetic,
        simulate_engine,
    )
    from paceline.bench.simulate.fleet_command import check_fleet_engine, simulate_fleet

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
