"""`python -m benchmarks` load and overhead: the command lines."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from paceline.bench.flags import JsonFile, Model, Quantization, Threads, Workloads
from paceline.config import DEFAULT_MODEL


def load_command(
    model: Model = DEFAULT_MODEL,
    url: Annotated[
        str | None, typer.Option(help="A running server, instead of one started for this.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="API key of this server.")] = None,
    duration: Annotated[
        str | None, typer.Option(help="Soak: mixed traffic for this long, such as 30m, instead of rounds.")
    ] = None,
    clients: Annotated[
        int | None, typer.Option(help="Number of concurrent clients. Default: 200, with --duration 50.")
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests per round, over all clients.")] = 400,
    rounds: Annotated[int, typer.Option(help="Number of rounds.")] = 2,
    cut: Annotated[
        float, typer.Option(help="Fraction of requests whose client disconnects at some point.")
    ] = 0.2,
    bad: Annotated[float, typer.Option(help="Fraction of requests that are invalid.")] = 0.1,
    seed: Annotated[
        int, typer.Option(help="Decides which clients disconnect, where, and which requests are invalid.")
    ] = 0,
    workload: Workloads = None,
    limit: Annotated[int | None, typer.Option(help="Use only this many prompts of each workload.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens per answer.")] = 64,
    draft: Annotated[str, typer.Option(help="Drafting method of a server started for this.")] = "suffix",
    threads: Threads = None,
    quantization: Quantization = "auto",
    json_file: JsonFile = None,
) -> None:
    """Many clients, some of which disconnect or send invalid requests: are all other answers right?"""
    import asyncio
    from contextlib import nullcontext
    from dataclasses import replace

    from benchmarks.server.load import LoadOptions, run_load
    from benchmarks.server.load_report import load_result
    from benchmarks.server.process import ServerProcess, serve_flags
    from benchmarks.server.soak import SAMPLES, SoakOptions, run_soak, seconds_of
    from benchmarks.server.soak_report import soak_result
    from paceline.bench.report.output import Report
    from paceline.bench.report.terminal import progress
    from paceline.bench.servers.client import Server
    from paceline.bench.traffic.workloads import load_workload

    report = Report(json_file)
    soaking = None
    if duration is not None:
        soaking = SoakOptions(seconds_of(duration), clients or 50, cut=cut, bad=bad, seed=seed)
    options = LoadOptions(clients or 200, requests, rounds, cut=cut, bad=bad, seed=seed)
    names = workload or ["code-edit", "summarize", "extract"]
    prompts = [prompt for name in names for prompt in load_workload(name, limit, max_tokens).prompts]
    flags = serve_flags(threads, quantization, ["--draft", draft])
    keys = [api_key]
    if soaking is not None and url is None:  # tenants of our own server have their own keys
        keys = [api_key or "soak-0", "soak-1", "soak-2"]
        flags += [word for key in keys[1:] for word in ("--api-key", str(key))]
    started = ServerProcess(model, *flags, api_key=keys[0]) if url is None else None
    turns = SAMPLES if soaking is not None else len(prompts) + rounds * requests
    with started or nullcontext(), progress(turns) as on_turn:
        server = started.server if started else Server.at(url or "", api_key)
        if soaking is not None:
            servers = [replace(server, api_key=key) for key in keys]
            process_id = started.process.pid if started else None
            soak = asyncio.run(run_soak(servers, prompts, soaking, process_id, on_turn))
        else:
            load = asyncio.run(run_load(server, prompts, options, on_turn))
    report.show(load_result(load) if soaking is None else soak_result(soak))
    if not (load.good if soaking is None else soak.good):
        raise typer.Exit(1)


def overhead_command(
    model: Model = DEFAULT_MODEL,
    concurrency: Annotated[int, typer.Option(help="Number of concurrent streaming clients.")] = 16,
    tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = 128,
    rounds: Annotated[int, typer.Option(help="Number of runs of each.")] = 5,
    draft: Annotated[str, typer.Option(help="Drafting method of both.")] = "off",
    threads: Threads = None,
    quantization: Quantization = "auto",
    json_file: JsonFile = None,
) -> None:
    """Throughput of the server relative to the offline engine, alternately, with the same texts."""
    from benchmarks.engine.concurrency import short_prompts
    from benchmarks.server.overhead import measure_overhead, overhead_result
    from benchmarks.server.process import ServerProcess, serve_flags
    from paceline.bench.loading import bench_config, settings
    from paceline.bench.report.output import Report
    from paceline.bench.report.terminal import progress
    from paceline.bench.text import text_ids
    from paceline.build import build_engine

    report = Report(json_file)
    config = bench_config(model, quantization, threads, concurrency, draft)
    scheduler = config.scheduler
    flags = ["--no-enable-prefix-caching", "--draft", draft, "--max-num-seqs", str(scheduler.max_num_seqs)]
    flags += ["--max-num-batched-tokens", str(config.max_num_batched_tokens)]
    with ServerProcess(model, *serve_flags(threads, quantization, flags)) as process:
        loaded = build_engine(config)
        prompts = short_prompts(text_ids(loaded.tokenizer), concurrency)
        with progress(2 * rounds) as on_turn:
            result = measure_overhead(process.server, loaded.engine, prompts, tokens, rounds, on_turn)
    facts = {"model": model, **asdict(settings(loaded.engine.backend)), "concurrency": concurrency}
    facts |= {"tokens_each": tokens, "rounds": rounds, "draft": draft}
    report.show(overhead_result(result, facts))


def fleet_command(
    trace: Annotated[Path, typer.Argument(help="Requests to replay, as of `paceline simulate --trace`.")],
    model: Annotated[str, typer.Option(help="Model to serve.")] = DEFAULT_MODEL,
    replicas: Annotated[int, typer.Option(help="Number of replicas, one thread each.")] = 2,
    limit: Annotated[int, typer.Option(help="Take only this many requests.")] = 40,
    time_scale: Annotated[float, typer.Option(help="Factor on the times of the trace.")] = 1.0,
    length_scale: Annotated[
        float, typer.Option(help="Factor on the tokens of prompts and answers.", min=0.01, max=1.0)
    ] = 1.0,
    shared_prefixes: Annotated[str, typer.Option(help="Prefixes of prompts of a .csv.")] = "6x128",
) -> None:
    """Replicas (the extra `ray`) beside the simulation of that fleet."""
    from benchmarks.server.fleet import measure_fleet, scaled
    from paceline.bench.report.terminal import print_result
    from paceline.bench.simulate.fleet_view import fleet_check_result
    from paceline.bench.simulate.prompts import fleet_requests, parse_shared_prefixes
    from paceline.bench.traffic.traces import read_trace

    arrivals = [scaled(arrival, length_scale) for arrival in read_trace(trace, time_scale)[:limit]]
    shared = None if any(arrival.blocks for arrival in arrivals) else parse_shared_prefixes(shared_prefixes)
    compared, worlds = measure_fleet(model, replicas, fleet_requests(arrivals, shared))
    for name, world in zip(("before", "after"), worlds, strict=True):
        typer.echo(
            f"with the costs measured {name}: --server {world.server} (milliseconds); beside a busy "
            f"replica prompts take {world.contention.prompts:.2f} and decoding "
            f"{world.contention.decoding:.2f} times as long"
        )
    print_result(fleet_check_result(f"{model}, {trace.name}, {replicas} replicas", compared))
