"""`python -m benchmarks gpu`: the command line and its table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.gpu.peers import peers_note
from paceline.bench.flags import JsonFile
from paceline.bench.report.result import Result, Table
from paceline.errors import ConfigError
from paceline.extras import needs_extra
from paceline.terminal.flags import integers

if TYPE_CHECKING:
    from benchmarks.gpu.engine import Served
    from benchmarks.gpu.plan import Measured
    from benchmarks.gpu.power import Power

DEFAULT_SHAPES = "llama-3.2-1b,qwen2.5-1.5b,llama-3.1-8b"
DEFAULT_METHODS = "plain,eagle3,tree,dspark,model,ngram"
QUANTIZATIONS = ("none", "fp8", "int8", "int4", "mxfp4")
WORDS = {
    "plain": "plain",
    "eagle3": "EAGLE-3 head, chain of 5",
    "tree": "EAGLE-3 head, tree of 32",
    "dspark": "DSpark head of 5 layers, block of 7",
    "model": "draft of llama-3.2-1b, chain of 5",
    "ngram": "chain of 5, looked up",
}


def gpu_command(
    shapes: Annotated[
        str, typer.Option(help="Model shapes, with random weights: those of benchmarks/gpu/plan.py.")
    ] = DEFAULT_SHAPES,
    methods: Annotated[
        str, typer.Option(help="Decoding methods. All except plain are measured with llama-3.1-8b only.")
    ] = DEFAULT_METHODS,
    requests: Annotated[
        str | None, typer.Option(help="Numbers of concurrent requests.", show_default="those of the bars")
    ] = None,
    input_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 128,
    common_tokens: Annotated[
        int, typer.Option(help="Tokens of a prefix that all prompts share, stored once.")
    ] = 0,
    output_tokens: Annotated[
        int, typer.Option(help="Number of steps, which is the number of tokens of plain decoding.")
    ] = 256,
    quantization: Annotated[
        str, typer.Option(help="Quantization of the weights: none, fp8, int8, int4 or mxfp4.")
    ] = "none",
    without: Annotated[
        str,
        typer.Option(
            help="Kernels to leave out, comma-separated: every setting is measured with and without them, "
            "twice each by turns, and the better run counts. decode_attention, fused_layer, logits and "
            "persistent: Triton's kernels run instead; shared_prefix: each request reads its own prefix; "
            "late_merge: attention to latents merges its partial results itself."
        ),
    ] = "",
    json_file: JsonFile = None,
) -> None:
    """Greedy decoding on a CUDA device, plain and speculative, compared with plain torch and with vLLM."""
    with needs_extra("gpu", "`python -m benchmarks gpu`"):
        from benchmarks.gpu.measure import measure_gpu
        from benchmarks.gpu.plan import Setting, planned
    from paceline.bench.report.output import Report
    from paceline.bench.report.terminal import progress

    report = Report(json_file)
    names, ways = ([name.strip() for name in given.split(",")] for given in (shapes, methods))
    if quantization not in QUANTIZATIONS:
        raise ConfigError(f"--quantization is one of {', '.join(QUANTIZATIONS)}, not {quantization!r}.")
    left_out = tuple(name.strip() for name in without.split(",") if name.strip())
    setting = Setting(input_tokens, output_tokens, quantization, left_out, common_tokens)
    plan = planned(names, ways, None if requests is None else integers("--requests", requests))
    with progress(len(plan)) as on_turn:

        def on_line(line: Measured) -> None:
            text = f"{line.shape}, {line.method}, {line.requests}: {line.milliseconds:.2f} ms"
            on_turn(text)
            typer.echo(text, err=True)  # so that it stays visible if a later line fails

        lines = measure_gpu(plan, setting, on_line)
    report.show(gpu_result(lines))


NOTES = (
    "A step gives one token of every request, and with a draft one more for each that was accepted. Random "
    "weights accept next to nothing, but a step takes as long whatever is accepted.",
    "Floor: to read the weights of a step once, at the bandwidth of a reduction in this run. Bar of a tree: "
    "1.1 times the chain.",
    "W, MHz: what the card drew, and the clock of its multiprocessors, on average. With a star its power "
    "limit lowered the clock most of the time: another card of the same kind may be quicker, or slower.",
)
HELD_BACK = 0.5  # fraction of the time from which a line is marked as throttled


def gpu_result(lines: Sequence[Measured]) -> Result:
    """Milliseconds per step, by shape, method and number of requests."""
    title = "Decoding on the GPU, random weights, greedy"
    compares = any(line.without is not None for line in lines)
    columns = ["shape", "method", "requests", "ms/step", *(["without"] if compares else [])]
    columns += ["steps x requests/s", "torch", "vLLM", "floor", "bar", "W", "MHz", ""]
    rows = [
        (
            line.shape,
            WORDS[line.method],
            str(line.requests),
            f"{line.milliseconds:.3f}",
            *([] if line.without is None else [f"{line.without:.3f}"]),
            f"{1e3 * line.requests / line.milliseconds:,.0f}",
            *("" if ms is None else f"{ms:.2f}" for ms in (line.torch, line.vllm, line.floor, line.bar)),
            *_power(line.power),
            line.verdict,
        )
        for line in lines
    ]
    facts = {"lines": [asdict(line) for line in lines]}
    return Result(title, [Table(title, columns, rows, text=("method",))], facts, notes=(*NOTES, peers_note()))


def _power(power: Power | None) -> tuple[str, str]:
    """Watts and megahertz, if the driver reports them."""
    if power is None:
        return "", ""
    return f"{power.watts:.0f}", f"{power.megahertz:,.0f}" + "*" * (power.held_back > HELD_BACK)


def gpu_engine_command(
    shapes: Annotated[
        str, typer.Option(help="Model shapes, with random weights.")
    ] = "llama-3.1-8b,qwen2.5-1.5b",
    prompts: Annotated[
        str, typer.Option(help="Bursts to prefill: requests x tokens of each prompt, comma-separated.")
    ] = "1x2048,1x8192,64x128,256x128",
    decodes: Annotated[
        str, typer.Option(help="Bursts that also decode --output-tokens; empty: none.")
    ] = "128x128,256x128",
    output_tokens: Annotated[int, typer.Option(help="Tokens of each answer of --decodes.")] = 256,
    rows: Annotated[int, typer.Option(help="Rows of a pass, at most: max_num_batched_tokens.")] = 2048,
    runs: Annotated[int, typer.Option(help="Timed runs, of which the median counts.")] = 3,
    json_file: JsonFile = None,
) -> None:
    """Whole requests through the engine on a CUDA device: prefill and decoding, with random weights."""
    with needs_extra("gpu", "`python -m benchmarks gpu-engine`"):
        from benchmarks.gpu.engine import measure_engine, parse_burst
    from paceline.bench.report.output import Report

    report = Report(json_file)
    bursts = [parse_burst(own, 1) for own in prompts.split(",") if own.strip()]
    bursts += [parse_burst(own, output_tokens) for own in decodes.split(",") if own.strip()]
    lines: list[Served] = []
    for shape in shapes.split(","):
        lines += measure_engine(shape.strip(), bursts, rows, runs, lambda line: typer.echo(line, err=True))
    report.show(engine_result(lines))


def engine_result(lines: Sequence[Served]) -> Result:
    """Milliseconds to the first tokens and per token, by shape and burst."""
    title = "Requests through the engine, random weights, greedy"
    columns = ["shape", "requests", "prompt", "output", "rows", "first tokens, ms", "prompt tokens/s"]
    columns += ["ms/token", "after the first"]
    rows = [
        (
            line.shape,
            *(str(own) for own in (line.burst.requests, line.burst.prompt_tokens, line.burst.output_tokens)),
            str(line.rows),
            f"{line.first_token:.1f}",
            f"{1e3 * line.burst.requests * line.burst.prompt_tokens / line.first_token:,.0f}",
            f"{line.step:.2f}",
            "" if line.decode_step is None else f"{line.decode_step:.2f}",
        )
        for line in lines
    ]
    notes = (
        "All requests of a line arrive at once. First tokens: until the last request has its first token. "
        "ms/token: all tokens of the burst, prefill included, divided by the tokens of one answer.",
    )
    return Result(
        title, [Table(title, columns, rows)], {"lines": [asdict(line) for line in lines]}, notes=notes
    )
