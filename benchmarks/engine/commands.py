"""`python -m benchmarks` rows, phases, concurrency, head, drafting, perplexity, same-bytes and sampling."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer

from paceline.bench.flags import JsonFile, Model, Quantization, Threads, Workloads
from paceline.config import DEFAULT_MODEL
from paceline.errors import ConfigError
from paceline.machine import find_gpu
from paceline.options import check_integer
from paceline.terminal.flags import integers

TEMPERATURES = (0.0, 1.0)  # of same-bytes


def rows_command(
    model: Model = DEFAULT_MODEL,
    rows: Annotated[str, typer.Option(help="Numbers of rows.")] = "1,2,3,4,5,6,7,8,12,16,24,32,48,64",
    context: Annotated[int, typer.Option(help="Committed tokens before the rows.")] = 64,
    rounds: Annotated[int, typer.Option(help="Number of runs per number of rows.")] = 20,
    cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="Count CPU seconds, for busy machines; needs --threads 1.")
    ] = False,
    threads: Threads = None,
    quantization: Quantization = "auto",
    json_file: JsonFile = None,
) -> None:
    """The cost of one pass over n rows, compared with one row."""
    from benchmarks.engine.rows import measure_rows
    from benchmarks.engine.views import rows_result
    from benchmarks.loading import load_backend_for_bench
    from paceline.bench.loading import settings
    from paceline.bench.report.output import Report
    from paceline.bench.report.terminal import progress
    from paceline.bench.text import text_ids

    report = Report(json_file)
    counts = sorted({1, *integers("--rows", rows)})
    if cpu_time and threads != 1:  # several threads spin while they wait for each other
        raise ConfigError("--cpu-time counts what one thread computes; add --threads 1.")
    clock = time.process_time if cpu_time else time.perf_counter
    loaded = load_backend_for_bench(model, quantization, threads, max_rows=counts[-1])
    ids = text_ids(loaded.tokenizer)
    with progress(rounds * len(counts)) as on_turn:
        costs = measure_rows(
            loaded.backend, ids, loaded.max_position, counts, context, rounds, on_turn, clock
        )
    facts = {"model": model, **asdict(settings(loaded.backend)), "context": context, "rounds": rounds}
    facts["clock"] = clock.__name__
    report.show(rows_result(costs, facts))


def phases_command(
    model: Model = DEFAULT_MODEL,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt, which one pass reads.")] = 512,
    rounds: Annotated[int, typer.Option(help="Number of passes.")] = 5,
    threads: Threads = None,
    quantization: Quantization = "auto",
    json_file: JsonFile = None,
) -> None:
    """Where the time of a prompt goes on the cpu backend: milliseconds of each phase of the layers."""
    from benchmarks.engine.phases import measure_phases
    from benchmarks.engine.views import phases_result
    from benchmarks.loading import load_backend_for_bench
    from paceline.bench.loading import settings
    from paceline.bench.report.output import Report
    from paceline.bench.report.terminal import progress
    from paceline.bench.text import text_ids

    report = Report(json_file)
    loaded = load_backend_for_bench(model, quantization, threads, max_rows=prompt)
    with progress(rounds) as on_turn:
        times = measure_phases(loaded.backend, text_ids(loaded.tokenizer), prompt, rounds, on_turn)
    facts = {"model": model, **asdict(settings(loaded.backend)), "prompt": prompt, "rounds": rounds}
    report.show(phases_result(times, facts))


def concurrency_command(
    model: Model = DEFAULT_MODEL,
    concurrency: Annotated[str, typer.Option(help="Numbers of concurrent requests.")] = "1,4,16",
    tokens: Annotated[int, typer.Option(help="Tokens per output.")] = 128,
    rounds: Annotated[int, typer.Option(help="Number of runs per concurrency.")] = 3,
    threads: Threads = None,
    quantization: Quantization = "auto",
    json_file: JsonFile = None,
) -> None:
    """Throughput of n concurrent requests, and whether each gets what it gets alone."""
    from benchmarks.engine.concurrency import measure_concurrency
    from benchmarks.engine.views import concurrency_result
    from benchmarks.loading import load_engine_for_bench
    from paceline.bench.loading import settings
    from paceline.bench.report.output import Report
    from paceline.bench.report.terminal import progress
    from paceline.bench.text import text_ids

    report = Report(json_file)
    counts = sorted({1, *integers("--concurrency", concurrency)})
    loaded = load_engine_for_bench(model, quantization, threads, max_num_seqs=counts[-1])
    with progress(counts[-1] + rounds * len(counts)) as on_turn:
        result = measure_concurrency(
            loaded.engine, text_ids(loaded.tokenizer), counts, tokens, rounds, on_turn
        )
    facts = {"model": model, **asdict(settings(loaded.engine.backend)), "tokens": tokens, "rounds": rounds}
    report.show(concurrency_result(result, facts))
    if not result.identical:
        raise typer.Exit(1)


def head_command(
    model: Annotated[str, typer.Argument(help="The target: a folder of safetensors.")],
    head: Annotated[str, typer.Argument(help="An EAGLE-3, P-EAGLE or parallel head: a folder or a hub id.")],
    workload: Workloads = None,
    limit: Annotated[int, typer.Option(help="Use only this many prompts of each workload.")] = 10,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens per answer.")] = 128,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(help="Tokens per draft. Default: 5, or the whole block of a parallel head.")
    ] = None,
    form: Annotated[
        str, typer.Option("--format", help="Format of the head for vLLM: sglang or speculators.")
    ] = "sglang",
    backend: Annotated[
        str, typer.Option(help="Of paceline, in float32: torch, or cpu without quantization.")
    ] = "torch",
    threads: Annotated[int, typer.Option(help="Threads of each engine.")] = 1,
    peer_python: Annotated[
        str, typer.Option(help="Python interpreter that has vllm.", show_default="this one")
    ] = sys.executable,
    json_file: JsonFile = None,
) -> None:
    """Acceptance of a draft head here and in vLLM, on the same target and prompts, greedy."""
    from benchmarks.engine.heads import HeadOptions, compare_head
    from benchmarks.engine.views import head_result
    from paceline.bench.report.output import Report
    from paceline.bench.report.terminal import progress
    from paceline.bench.traffic.workloads import load_workload

    report = Report(json_file)
    workloads = tuple(load_workload(name, limit, max_tokens) for name in workload or ["code-edit"])
    options = HeadOptions(model, head, workloads, num_speculative_tokens, form, backend, threads, peer_python)
    with progress(options.num_turns) as on_turn:
        comparison = compare_head(options, on_turn)
    report.show(head_result(comparison))


def drafting_command(
    context: Annotated[int, typer.Option(help="Context length of the request.")] = 8000,
    responses: Annotated[int, typer.Option(help="Number of past responses that suffix stores.")] = 10_000,
    response_tokens: Annotated[int, typer.Option(help="Tokens per response.")] = 256,
    json_file: JsonFile = None,
) -> None:
    """The cost of drafting itself: microseconds per step at a long context, and memory of past responses."""
    from benchmarks.engine.drafting import measure_drafting
    from benchmarks.engine.views import drafting_result
    from paceline.bench.report.output import Report
    from paceline.bench.report.terminal import progress

    report = Report(json_file)
    with progress(3) as on_turn:
        costs = measure_drafting(context, responses, response_tokens, on_turn)
    report.show(drafting_result(costs))


def perplexity_command(
    model: Model = DEFAULT_MODEL,
    against: Annotated[
        str, typer.Option(help="Reference: a quantization (none is float32), or torch.")
    ] = "none",
    context: Annotated[int, typer.Option(help="Tokens per window.")] = 512,
    threads: Threads = None,
    quantization: Quantization = "auto",
    json_file: JsonFile = None,
) -> None:
    """Perplexity of a fixed text with quantized weights, compared with float32."""
    from benchmarks.engine.quantization import compare_quantizations
    from benchmarks.engine.views import perplexity_result
    from paceline.bench.report.output import Report
    from paceline.bench.report.terminal import progress

    report = Report(json_file)
    with progress(2) as on_turn:
        comparison = compare_quantizations(model, quantization, against, threads, context, on_turn)
    report.show(perplexity_result(model, context, comparison))


def same_bytes_command(
    model: Model = DEFAULT_MODEL,
    workload: Workloads = None,
    limit: Annotated[int, typer.Option(help="Use only this many prompts of each workload.")] = 40,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens per answer.")] = 96,
    methods: Annotated[
        str, typer.Option(help="Drafting method besides off, or a JSON object as speculative_config.")
    ] = "eagle3",
    concurrency: Annotated[str, typer.Option(help="Numbers of concurrent requests.")] = "16,64",
    backend: Annotated[str, typer.Option(help="Backend of the model: cpu, torch or cuda.")] = "cuda",
    quantization: Annotated[str, typer.Option(help="Quantization of the weights.")] = "auto",
    prefix_caching: Annotated[
        bool, typer.Option(help="Enable prefix caching, so that requests share prefixes.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Fraction of answers that differ from one request at a time without drafting, greedy and sampled."""
    from benchmarks.engine.same_bytes import compare_bytes
    from benchmarks.engine.views import same_bytes_result
    from paceline.bench.report.output import Report
    from paceline.bench.report.terminal import progress
    from paceline.bench.traffic.workloads import load_workload

    report = Report(json_file)
    names = workload or ["chat"]
    prompts = [prompt for name in names for prompt in load_workload(name, limit, max_tokens).prompts]
    counts = sorted({1, *integers("--concurrency", concurrency)})
    with progress(2 * len(counts) * len(TEMPERATURES)) as on_turn:
        lines = compare_bytes(
            model,
            prompts,
            [methods],
            counts,
            TEMPERATURES,
            backend,
            quantization,
            lambda line: on_turn(f"{line.draft}, {line.at_once} at once: {line.differing} differ"),
            prefix_caching,
        )
    report.show(same_bytes_result(model, backend, lines))
    if any(line.differing for line in lines):
        raise typer.Exit(1)


def sampling_command(
    model: Model = DEFAULT_MODEL,
    methods: Annotated[
        str, typer.Option(help="Drafting methods, comma-separated, each beside the same one on the host.")
    ] = "off,suffix",
    concurrency: Annotated[int, typer.Option(help="Number of concurrent requests.")] = 16,
    tokens: Annotated[int, typer.Option(help="Tokens per output.")] = 64,
    rounds: Annotated[int, typer.Option(help="Number of runs of each line; the best counts.")] = 3,
    quantization: Quantization = "auto",
    json_file: JsonFile = None,
) -> None:
    """Throughput with sampling options on the GPU, compared with the same options on the host."""
    from benchmarks.engine.concurrency import short_prompts
    from benchmarks.engine.sampling import build_pair, measure_sampling, options_for
    from benchmarks.engine.views import sampling_result
    from paceline.bench.loading import bench_config
    from paceline.bench.report.output import Report
    from paceline.bench.report.terminal import progress
    from paceline.bench.text import text_ids
    from paceline.build import build_engine, load_model

    if gpu := find_gpu().missing:
        raise ConfigError(
            f"`python -m benchmarks sampling` needs a CUDA GPU, but {gpu}. On the CPU every token is sampled "
            "by the host, so there is nothing to compare."
        )
    for name, number in (("--concurrency", concurrency), ("--tokens", tokens), ("--rounds", rounds)):
        check_integer(ConfigError, name, number, 1, None)
    report = Report(json_file)
    names = [name.strip() for name in methods.split(",")]
    configs = {
        name: bench_config(model, quantization, None, concurrency, speculative_config=name, backend="cuda")
        for name in names
    }
    loaded = load_model(configs[names[0]])
    prompts = short_prompts(text_ids(loaded.tokenizer), concurrency)
    pairs = {
        name: build_pair(loaded.backend, partial(build_engine, config, loaded))
        for name, config in configs.items()
    }
    with progress(len(options_for(concurrency)) * len(names)) as on_turn:
        lines = measure_sampling(pairs, prompts, tokens, rounds, on_turn)
    report.show(sampling_result(model, concurrency, tokens, rounds, lines))
    if any(line.differing for line in lines):
        raise typer.Exit(1)
