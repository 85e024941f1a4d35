"""The commands of `paceline bench`; the main one, `paceline bench MODEL`, is in main_command.py."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from paceline.bench.changes_command import changes_command
from paceline.bench.gpu_command import gpu_command
from paceline.bench.grid_command import grid_command
from paceline.bench.main_command import RUN, MainCommandGroup, run_command
from paceline.bench.reporting import (
    JsonFile,
    Model,
    Quantization,
    Report,
    Threads,
    Workloads,
    integers,
)
from paceline.bench.same_bytes_command import same_bytes_command
from paceline.config import DEFAULT_MODEL

app = typer.Typer(
    help="Measure speed and quality on this machine: `paceline bench MODEL`, or a command.",
    epilog=f"`paceline bench MODEL ...` is `paceline bench {RUN} MODEL ...`. A model that has the name of a "
    "command is written as a path: ./rows.",
    cls=MainCommandGroup,
    no_args_is_help=True,
)
app.command(RUN)(run_command)
app.command("grid")(grid_command)
app.command("changes")(changes_command)
app.command("speculation", help=f"The same as {RUN}.")(run_command)
app.command("gpu")(gpu_command)
app.command("same-bytes")(same_bytes_command)


@app.command("decode")
def decode_command(
    model: Model = DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(help="Tokens to decode, after the first.")] = 128,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the prompt to decode from.")] = 16,
    prefill: Annotated[int, typer.Option(help="Tokens of the prompt to prefill.")] = 512,
    rounds: Annotated[int, typer.Option(help="How often each contestant has its turn.")] = 5,
    threads: Threads = None,
    quantization: Quantization = "auto",
    peer: Annotated[str, typer.Option(help="Whom to compare with: llama.cpp or none.")] = "llama.cpp",
    peer_python: Annotated[
        str, typer.Option(help="The interpreter that has llama_cpp.", show_default="this one")
    ] = sys.executable,
    json_file: JsonFile = None,
) -> None:
    """Plain greedy decoding and prefill at batch 1, in turns with llama.cpp on the same file."""
    from paceline.bench.decode import DecodeOptions, decode_facts, measure_decode
    from paceline.bench.tables import decode_notes, decode_table, progress

    report = Report(json_file)
    options = DecodeOptions(
        model, tokens, prompt_tokens, prefill, rounds, threads, quantization, peer, peer_python
    )
    with progress(rounds) as on_turn:
        contest = measure_decode(options, on_turn)
    report.show([decode_table(contest)], decode_notes(contest), decode_facts(contest))


@app.command("rows")
def rows_command(
    model: Model = DEFAULT_MODEL,
    rows: Annotated[str, typer.Option(help="Numbers of rows.")] = "1,2,3,4,5,6,7,8,12,16,24,32,48,64",
    context: Annotated[int, typer.Option(help="Tokens committed before.")] = 64,
    rounds: Annotated[int, typer.Option(help="How often each number of rows has its turn.")] = 20,
    threads: Threads = None,
    quantization: Quantization = "auto",
    json_file: JsonFile = None,
) -> None:
    """The cost of one pass over n rows, compared with one row."""
    from paceline.bench.loading import load_backend_for_bench, settings
    from paceline.bench.perplexity import text_ids
    from paceline.bench.rows import measure_rows
    from paceline.bench.tables import progress, rows_table

    report = Report(json_file)
    counts = sorted({1, *integers("--rows", rows)})
    loaded = load_backend_for_bench(model, quantization, threads, max_rows=counts[-1])
    ids = text_ids(loaded.tokenizer)
    with progress(rounds * len(counts)) as on_turn:
        costs = measure_rows(loaded.backend, ids, loaded.max_position, counts, context, rounds, on_turn)
    facts = {"model": model, **asdict(settings(loaded.backend)), "context": context, "rounds": rounds}
    report.show([rows_table(model, costs, context, rounds)], [], {**facts, "rows": costs.facts()})


@app.command("concurrency")
def concurrency_command(
    model: Model = DEFAULT_MODEL,
    concurrency: Annotated[str, typer.Option(help="Numbers of requests at once.")] = "1,4,16",
    tokens: Annotated[int, typer.Option(help="Tokens of each output.")] = 128,
    rounds: Annotated[int, typer.Option(help="How often each number of requests has its turn.")] = 3,
    threads: Threads = None,
    quantization: Quantization = "auto",
    json_file: JsonFile = None,
) -> None:
    """Total speed of n requests at once, and whether each gets what it gets alone."""
    from paceline.bench.concurrency import measure_concurrency
    from paceline.bench.loading import load_engine_for_bench, settings
    from paceline.bench.perplexity import text_ids
    from paceline.bench.tables import concurrency_notes, concurrency_table, progress

    report = Report(json_file)
    counts = sorted({1, *integers("--concurrency", concurrency)})
    loaded = load_engine_for_bench(model, quantization, threads, max_num_seqs=counts[-1])
    with progress(counts[-1] + rounds * len(counts)) as on_turn:
        result = measure_concurrency(
            loaded.engine, text_ids(loaded.tokenizer), counts, tokens, rounds, on_turn
        )
    facts = {"model": model, **asdict(settings(loaded.engine.backend)), "tokens": tokens, "rounds": rounds}
    facts |= {"identical_to_alone": result.identical, "concurrency": result.facts()}
    report.show([concurrency_table(model, result, rounds)], concurrency_notes(result), facts)
    if not result.identical:
        raise typer.Exit(1)


@app.command("head")
def head_command(
    model: Annotated[str, typer.Argument(help="The target: a folder of safetensors.")],
    head: Annotated[str, typer.Argument(help="The EAGLE-3 head: a folder or a hub id.")],
    workload: Workloads = None,
    limit: Annotated[int, typer.Option(help="Take the first prompts of each workload only.")] = 10,
    max_tokens: Annotated[int, typer.Option(help="Cut answers that may be longer.")] = 128,
    num_speculative_tokens: Annotated[int, typer.Option(help="Tokens of a draft.")] = 5,
    form: Annotated[
        str, typer.Option("--format", help="How the head is written for vLLM: sglang or speculators.")
    ] = "sglang",
    threads: Annotated[int, typer.Option(help="Threads of each.")] = 1,
    peer_python: Annotated[
        str, typer.Option(help="The interpreter that has vllm.", show_default="this one")
    ] = sys.executable,
    json_file: JsonFile = None,
) -> None:
    """A draft head here and in vLLM: its mean acceptance length on the same target and prompts, greedy."""
    from paceline.bench.heads import HeadOptions, compare_head, head_table
    from paceline.bench.tables import progress
    from paceline.bench.workloads import load_workload

    report = Report(json_file)
    workloads = tuple(load_workload(name, limit, max_tokens) for name in workload or ["code-edit"])
    options = HeadOptions(model, head, workloads, num_speculative_tokens, form, threads, peer_python)
    with progress(options.num_turns) as on_turn:
        comparison = compare_head(options, on_turn)
    notes = ["These are counts, not times: the machine need not be quiet for them."]
    report.show([head_table(comparison)], notes, comparison.facts())


@app.command("drafting")
def drafting_command(
    context: Annotated[int, typer.Option(help="Tokens of the request that is drafted for.")] = 8000,
    responses: Annotated[int, typer.Option(help="Past responses that suffix remembers.")] = 10_000,
    response_tokens: Annotated[int, typer.Option(help="Tokens of each of them.")] = 256,
    json_file: JsonFile = None,
) -> None:
    """What drafting itself costs: microseconds a step at a long context, and memory of past responses."""
    from paceline.bench.drafting import measure_drafting
    from paceline.bench.tables import drafting_notes, drafting_table, progress

    report = Report(json_file)
    with progress(3) as on_turn:
        costs = measure_drafting(context, responses, response_tokens, on_turn)
    report.show([drafting_table(costs)], drafting_notes(costs), costs.facts())


@app.command("perplexity")
def perplexity_command(
    model: Model = DEFAULT_MODEL,
    against: Annotated[
        str, typer.Option(help="What to compare with: a quantization (none is float32), or torch.")
    ] = "none",
    context: Annotated[int, typer.Option(help="Tokens of a window.")] = 512,
    threads: Threads = None,
    quantization: Quantization = "auto",
    json_file: JsonFile = None,
) -> None:
    """Perplexity of a fixed text with quantized weights, and how much worse it is than with float32."""
    from paceline.bench.quantization import compare_quantizations
    from paceline.bench.tables import perplexity_table, progress

    report = Report(json_file)
    with progress(2) as on_turn:
        comparison = compare_quantizations(model, quantization, against, threads, context, on_turn)
    facts = {"model": model, "context": context, **comparison.facts()}
    report.show([perplexity_table(model, comparison)], [], facts)


@app.command("load")
def load_command(
    model: Model = DEFAULT_MODEL,
    url: Annotated[
        str | None, typer.Option(help="A server that runs already, instead of one started for this.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="The key that this server wants.")] = None,
    duration: Annotated[
        str | None, typer.Option(help="Soak: mixed traffic for so long, such as 30m, instead of rounds.")
    ] = None,
    clients: Annotated[
        int | None, typer.Option(help="Clients at once; default 200, with --duration 50.")
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests of a round, all clients together.")] = 400,
    rounds: Annotated[int, typer.Option(help="How often all of it is done.")] = 2,
    cut: Annotated[float, typer.Option(help="Share of requests whose client leaves at some point.")] = 0.2,
    bad: Annotated[float, typer.Option(help="Share of requests that are nonsense.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Decides who leaves, where, and who talks nonsense.")] = 0,
    workload: Workloads = None,
    limit: Annotated[int | None, typer.Option(help="Take the first prompts of each workload only.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Cut answers that may be longer.")] = 64,
    draft: Annotated[str, typer.Option(help="What drafts in a server started for this.")] = "suffix",
    threads: Threads = None,
    quantization: Quantization = "auto",
    json_file: JsonFile = None,
) -> None:
    """Many clients, some of whom leave or talk nonsense: are all other answers there, and right?"""
    import asyncio
    from contextlib import nullcontext
    from dataclasses import replace

    from paceline.bench.client import Server
    from paceline.bench.load import LoadOptions, run_load
    from paceline.bench.load_tables import load_facts, load_notes, load_table
    from paceline.bench.server_process import ServerProcess, serve_flags
    from paceline.bench.soak import SAMPLES, SoakOptions, run_soak, seconds_of
    from paceline.bench.soak_tables import soak_facts, soak_notes, soak_table
    from paceline.bench.tables import progress
    from paceline.bench.workloads import load_workload

    report = Report(json_file)
    soaking = None
    if duration is not None:
        soaking = SoakOptions(seconds_of(duration), clients or 50, cut, bad, seed)
    options = LoadOptions(clients or 200, requests, rounds, cut, bad, seed)
    names = workload or ["code-edit", "summarize", "extract"]
    prompts = [one for name in names for one in load_workload(name, limit, max_tokens).prompts]
    flags = serve_flags(threads, quantization, ["--draft", draft])
    keys = [api_key]
    if soaking is not None and url is None:  # tenants of a server of our own have keys of their own
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
    if soaking is not None:
        report.show([soak_table(soak)], soak_notes(soak), soak_facts(soak))
    else:
        report.show([load_table(load)], load_notes(load), load_facts(load))
    if not (load.good if soaking is None else soak.good):
        raise typer.Exit(1)


@app.command("overhead")
def overhead_command(
    model: Model = DEFAULT_MODEL,
    concurrency: Annotated[int, typer.Option(help="Streaming clients at once.")] = 16,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 128,
    rounds: Annotated[int, typer.Option(help="How often both have their turn.")] = 5,
    draft: Annotated[str, typer.Option(help="What drafts, in both.")] = "off",
    threads: Threads = None,
    quantization: Quantization = "auto",
    json_file: JsonFile = None,
) -> None:
    """Throughput of the whole server as a share of the offline engine's, in turns, with the same texts."""
    from paceline.bench.concurrency import short_prompts
    from paceline.bench.loading import bench_config, settings
    from paceline.bench.overhead import measure_overhead
    from paceline.bench.perplexity import text_ids
    from paceline.bench.server_process import ServerProcess, serve_flags
    from paceline.bench.tables import overhead_table, progress
    from paceline.build import build_engine

    report = Report(json_file)
    config = bench_config(model, quantization, threads, concurrency, draft)
    scheduler = config.scheduler
    flags = ["--no-enable-prefix-caching", "--draft", draft, "--max-num-seqs", str(scheduler.max_num_seqs)]
    flags += ["--max-num-batched-tokens", str(scheduler.max_num_batched_tokens)]
    with ServerProcess(model, *serve_flags(threads, quantization, flags)) as process:
        loaded = build_engine(config)
        prompts = short_prompts(text_ids(loaded.tokenizer), concurrency)
        with progress(2 * rounds) as on_turn:
            result = measure_overhead(process.server, loaded.engine, prompts, tokens, rounds, on_turn)
    facts = {"model": model, **asdict(settings(loaded.engine.backend)), "concurrency": concurrency}
    facts |= {"tokens_each": tokens, "rounds": rounds, "draft": draft, **result.facts()}
    report.show([overhead_table(model, result, concurrency, rounds)], [], facts)
