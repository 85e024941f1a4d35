"""Results of the engine's measurements, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.engine.concurrency import Concurrency
from benchmarks.engine.drafting import DraftingCosts
from benchmarks.engine.heads import HeadComparison
from benchmarks.engine.phases import PhaseTimes
from benchmarks.engine.quantization import Comparison
from benchmarks.engine.rows import RowCosts
from benchmarks.engine.same_bytes import Sameness
from benchmarks.engine.sampling import TEMPERATURE, SamplingSpeed
from paceline.bench.report.result import Finding, Result, Table


def rows_result(costs: RowCosts, facts: Mapping[str, Any]) -> Result:
    """The cost of a pass by its rows. `facts`: model, context, rounds and more."""
    title = (
        f"{facts['model']}: one pass after {facts['context']} tokens, best and median of {facts['rounds']}, "
        "in turns"
    )
    rows = [
        (
            str(line["rows"]),
            f"{line['ms']:.2f}",
            f"{line['median_ms']:.2f}",
            f"{line['ratio']:.2f}",
            f"{line['median_ratio']:.2f}",
        )
        for line in costs.facts()
    ]
    columns = ("rows", "best ms", "median ms", "best / 1 row", "median / 1 row")
    return Result(title, [Table(title, columns, rows)], {**facts, "rows": costs.facts()})


def phases_result(times: PhaseTimes, facts: Mapping[str, Any]) -> Result:
    """Where the time of a prompt goes. `facts`: model, prompt, rounds and more."""
    passes = times.passes
    title = (
        f"{facts['model']}: a prompt of {facts['prompt']} tokens, best {1e3 * passes.best:.1f} ms, median "
        f"{1e3 * passes.median:.1f} ms of {facts['rounds']}"
    )
    rows = [
        (
            str(line["phase"]),
            f"{line['ms']:.1f}",
            f"{line['share']:.1%}",
            f"{line['waiting']:.1%}",
            f"{line['giga_products']:.1f}" if line["giga_products"] else "",
        )
        for line in times.facts()
    ]
    columns = ("phase", "ms", "share", "threads waiting", "G multiply-adds/s a thread")
    facts = {**facts, "best_ms": 1e3 * passes.best, "median_ms": 1e3 * passes.median, "phases": times.facts()}
    return Result(title, [Table(title, columns, rows)], facts)


def concurrency_result(measured: Concurrency, facts: Mapping[str, Any]) -> Result:
    """Total tokens per second by concurrency. `facts`: model, rounds and more."""
    title = (
        f"{facts['model']}: {measured.tokens} greedy tokens a request, prompts included, "
        f"best and median of {facts['rounds']}, in turns"
    )
    rows = [
        (
            str(count),
            f"{line['tokens_per_second']:,.1f}",
            f"{line['median_tokens_per_second']:,.1f}",
            f"{line['ratio']:.2f}",
            f"{line['median_ratio']:.2f}",
            f"{len(measured.differing[count])} differ" if measured.differing[count] else "identical",
        )
        for count, line in zip(measured.timings, measured.facts(), strict=True)
    ]
    columns = ("requests", "best tok/s", "median tok/s", "best / 1", "median / 1", "outputs as alone")
    text = (
        "Every request got, token for token, what it gets alone."
        if measured.identical
        else "Outputs depended on what else was running: this is a bug, please report it."
    )
    facts = {**facts, "identical_to_alone": measured.identical, "concurrency": measured.facts()}
    return Result(title, [Table(title, columns, rows)], facts, findings=[Finding(text, measured.identical)])


def drafting_result(costs: DraftingCosts) -> Result:
    """Microseconds per step, and memory of past responses."""
    title = "Drafting alone: propose and observe, one request, no model"
    rows = [
        (
            cost.method,
            f"{cost.context:,}",
            f"{cost.mean_us:.1f}",
            f"{cost.median_us:.1f}",
            f"{cost.worst_us:,.0f}",
            f"{cost.tokens_per_step:.1f}",
            f"{cost.first_us:,.0f}",
        )
        for cost in costs.steps
    ]
    columns = ("method", "context", "mean us", "median us", "worst us", "tokens/step", "first step us")
    note = (
        f"{costs.responses:,} past responses of {costs.response_tokens} tokens, which suffix looks through: "
        f"{costs.response_bytes / 1e6:,.0f} MB, {costs.response_us:.2f} us a token to take them in"
    )
    return Result(title, [Table(title, columns, rows)], costs.facts(), notes=[note])


def perplexity_result(model: str, context: int, comparison: Comparison) -> Result:
    """Both perplexities and their difference."""
    title = f"{model}: {comparison.measured.tokens} tokens of the fixed text"
    rows = [
        *(
            (measured.quantization, f"{measured.perplexity:.4f}")
            for measured in (comparison.measured, comparison.against)
        ),
        ("difference", f"{comparison.difference_percent:+.2f} %"),
    ]
    facts = {"model": model, "context": context, **comparison.facts()}
    return Result(title, [Table(title, ("quantization", "perplexity"), rows)], facts, timed=False)


def head_result(comparison: HeadComparison) -> Result:
    """Mean acceptance lengths of a head, here and in vLLM, and the acceptance of each drafted token."""
    options, vllm = comparison.options, f"vLLM {comparison.version}"
    chains = f"greedy, chains of {options.num_speculative_tokens}, {options.form} format"
    rows = [
        (
            row.workload,
            str(row.prompts),
            str(row.same_tokens),
            f"{row.ours.acceptance_length:.3f}",
            f"{row.peer.acceptance_length:.3f}",
            f"{row.ratio:.3f}",
        )
        for row in comparison.rows
    ]
    columns = ("workload", "prompts", "same\ntokens", "paceline", vllm.replace(" ", "\n"), "ratio")
    lengths = Table(f"Mean acceptance length, {chains}", columns, rows)
    positions = range(options.num_speculative_tokens or 0)
    shares = [
        (row.workload, engine, *(f"{100 * share:.1f}" for share in drafted.acceptance_per_position))
        for row in comparison.rows
        for engine, drafted in (("paceline", row.ours), (vllm, row.peer))
    ]
    accepted = Table(
        "Drafts accepted up to each token, %",
        ("workload", "engine", *(str(1 + at) for at in positions)),
        shares,
    )
    return Result(lengths.title, [lengths, accepted], comparison.facts(), timed=False)


def same_bytes_result(model: str, backend: str, lines: Sequence[Sameness]) -> Result:
    """How many answers differ, by draft, concurrency and temperature."""
    title = f"{model}: answers that differ from those of one request alone"
    rows = [
        (
            line.draft,
            str(line.at_once),
            f"{line.temperature:g}",
            str(line.answers),
            str(line.differing),
            f"{line.share:.1%}",
            "" if line.first is None else str(line.first),
        )
        for line in lines
    ]
    columns = ("draft", "at once", "temperature", "answers", "differ", "share", "first at token")
    facts = {"model": model, "backend": backend, "lines": [asdict(line) for line in lines]}
    return Result(title, [Table(title, columns, rows)], facts, timed=False)


def sampling_result(
    model: str, requests: int, tokens: int, rounds: int, lines: Sequence[SamplingSpeed]
) -> Result:
    """Tokens per second by sampling options and drafting method, on the device and through the host."""
    title = (
        f"{model}: {requests} requests of {tokens} tokens, T = {TEMPERATURE:g}, best of {rounds}, in turns"
    )
    rows = [
        (line.options, line.method, f"{line.device:,.0f}", f"{line.host:,.0f}", f"{line.ratio:.2f}")
        for line in lines
    ]
    columns = ("options of the requests", "draft", "device tok/s", "host tok/s", "device / host")
    differing = sum([line.differing for line in lines])
    text = (
        f"{differing} answers differ between device and host: this is a bug, please report it."
        if differing
        else "All tokens and log-probabilities are the same on the device and on the host."
    )
    facts = {"model": model, "requests": requests, "tokens": tokens, "rounds": rounds}
    return Result(
        title,
        [Table(title, columns, rows, text=("draft",))],
        {**facts, "lines": [asdict(line) for line in lines]},
        findings=[Finding(text, not differing)],
    )
