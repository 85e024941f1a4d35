"""Results as tables, and progress while they are measured. All on the terminal; JSON is made elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from paceline.bench.concurrency import Concurrency
from paceline.bench.decode import Contest, Result
from paceline.bench.drafting import DraftingCosts
from paceline.bench.overhead import Overhead
from paceline.bench.quantization import Comparison
from paceline.bench.rows import RowCosts
from paceline.bench.timing import OnTurn

QUIET_LOAD = 0.5  # average number of running threads in the last minute


@contextmanager
def progress(total: int) -> Iterator[OnTurn]:
    """A progress bar on standard error, to be told after each of `total` turns what was done."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("warming up", total=total)
        yield lambda text: bar.update(task, advance=1, description=text)


def machine_notes(machine: Mapping[str, Any], threads: object, quantization: object) -> list[str]:
    """The machine in one line, and a warning if something else was running on it."""
    line = (
        f"{machine['cpu']} ({machine['isa']}), {machine['usable_cores']} of {machine['cores']} cores usable, "
        + (f"{threads} threads, quantization {quantization}, " if threads else "")
        + f"load {machine['load_average']}"
    )
    if machine["load_average"] <= QUIET_LOAD:
        return [line]
    # engines that divide work evenly and meet at barriers suffer more than ours, so ratios lie too
    return [line, "The machine was not quiet: neither times nor ratios can be trusted. Measure again."]


def decode_table(contest: Contest) -> Table:
    """Both contestants' speeds, and how many times faster paceline is."""
    options, peer = contest.options, contest.peer
    table = Table(
        title=f"{options.model}: greedy, batch 1, best and median of {options.rounds}, in turns",
        title_justify="left",
    )
    table.add_column("tokens per second")
    for heading in ("paceline", *([f"{options.peer} {peer.facts['version']}", "ratio"] if peer else [])):
        table.add_column(heading, justify="right")

    def add(what: str, tokens: int, decode: bool, best: bool) -> None:
        def seconds(result: Result) -> float:
            timing = result.decode if decode else result.prefill
            return timing.best if best else timing.median

        cells = [f"{tokens / seconds(result):,.1f}" for result in (contest.paceline, peer) if result]
        ratio = contest.ratio(seconds)
        table.add_row(what, *cells, *([] if ratio is None else [f"{ratio:.2f}"]))

    add(f"decode {options.tokens}, best", options.tokens, decode=True, best=True)
    add(f"decode {options.tokens}, median", options.tokens, decode=True, best=False)
    add(f"prefill {options.prefill}, best", options.prefill, decode=False, best=True)
    add(f"prefill {options.prefill}, median", options.prefill, decode=False, best=False)
    return table


def decode_notes(contest: Contest) -> list[str]:
    """What else was found, a line each."""
    ours, options, fresh = contest.paceline, contest.options, contest.fresh_start
    notes = [
        f"time per token: best {1e3 * ours.decode.best / options.tokens:.2f} ms, "
        f"median {1e3 * ours.decode.median / options.tokens:.2f} ms",
        f"overhead per step, outside the pass: best {1e3 * ours.overhead.best:.3f} ms, "
        f"median {1e3 * ours.overhead.median:.3f} ms",
        f"from process start to first token: {fresh.seconds:.2f} s (compile cache warm)",
        f"peak memory: {fresh.peak_memory_bytes / 1e6:,.0f} MB",
    ]
    if contest.peer is not None:
        notes.append(
            f"both chose the same first {contest.agreeing_tokens} of {len(ours.token_ids)} tokens "
            "(their roundings differ)"
        )
    if contest.peer_handicap is not None:
        notes.append(f"{options.peer} ran under a handicap: {contest.peer_handicap}")
    if contest.peer_error is not None:
        notes.append(f"no numbers of {options.peer}: {contest.peer_error}")
    return notes


def rows_table(model: str, costs: RowCosts, context: int, rounds: int) -> Table:
    """The cost of a pass by its rows."""
    table = Table(
        title=f"{model}: one pass after {context} tokens, best and median of {rounds}, in turns",
        title_justify="left",
    )
    for heading in ("rows", "best ms", "median ms", "best / 1 row", "median / 1 row"):
        table.add_column(heading, justify="right")
    for line in costs.facts():
        table.add_row(
            str(line["rows"]),
            f"{line['ms']:.2f}",
            f"{line['median_ms']:.2f}",
            f"{line['ratio']:.2f}",
            f"{line['median_ratio']:.2f}",
        )
    return table


def concurrency_table(model: str, result: Concurrency, rounds: int) -> Table:
    """Total tokens per second by how many requests run at once."""
    table = Table(
        title=f"{model}: {result.tokens} greedy tokens a request, prompts included, "
        f"best and median of {rounds}, in turns",
        title_justify="left",
    )
    for heading in ("requests", "best tok/s", "median tok/s", "best / 1", "median / 1", "outputs as alone"):
        table.add_column(heading, justify="right")
    for count, line in zip(result.timings, result.facts(), strict=True):
        differing = result.differing[count]
        table.add_row(
            str(count),
            f"{line['tokens_per_second']:,.1f}",
            f"{line['median_tokens_per_second']:,.1f}",
            f"{line['ratio']:.2f}",
            f"{line['median_ratio']:.2f}",
            "identical" if not differing else f"{len(differing)} differ",
        )
    return table


def concurrency_notes(result: Concurrency) -> list[str]:
    """Whether requests disturbed each other, in words."""
    if result.identical:
        return ["Every request got, token for token, what it gets alone."]
    return ["Outputs depended on what else was running: this is a bug, please report it."]


def overhead_table(model: str, result: Overhead, concurrency: int, rounds: int) -> Table:
    """Both throughputs, and the server's share."""
    table = Table(
        title=f"{model}: {concurrency} requests at once, best and median of {rounds}, in turns",
        title_justify="left",
    )
    for heading in ("tokens per second", "server", "offline engine", "server / offline"):
        table.add_column(heading, justify="right")
    facts = result.facts()
    for name, prefix in (("best", ""), ("median", "median_")):
        speeds = (facts[f"{prefix}{side}_tokens_per_second"] for side in ("server", "offline"))
        table.add_row(name, *(f"{speed:,.0f}" for speed in speeds), f"{facts[prefix + 'ratio']:.3f}")
    return table


def perplexity_table(model: str, comparison: Comparison) -> Table:
    """Both perplexities and their difference."""
    title = f"{model}: {comparison.measured.tokens} tokens of the fixed text"
    table = Table("quantization", title=title, title_justify="left")
    table.add_column("perplexity", justify="right")
    for one in (comparison.measured, comparison.against):
        table.add_row(one.quantization, f"{one.perplexity:.4f}")
    table.add_row("difference", f"{comparison.difference_percent:+.2f} %")
    return table


def drafting_table(costs: DraftingCosts) -> Table:
    """Microseconds of a step, and memory of past responses."""
    table = Table(title="Drafting alone: propose and observe, one request, no model", title_justify="left")
    table.add_column("method")
    for heading in ("context", "mean us", "median us", "worst us", "tokens/step", "first step us"):
        table.add_column(heading, justify="right")
    for cost in costs.steps:
        table.add_row(
            cost.method,
            f"{cost.context:,}",
            f"{cost.mean_us:.1f}",
            f"{cost.median_us:.1f}",
            f"{cost.worst_us:,.0f}",
            f"{cost.tokens_per_step:.1f}",
            f"{cost.first_us:,.0f}",
        )
    return table


def drafting_notes(costs: DraftingCosts) -> list[str]:
    """What past responses cost, in words."""
    return [
        f"{costs.responses:,} past responses of {costs.response_tokens} tokens, which suffix looks through: "
        f"{costs.response_bytes / 1e6:,.0f} MB, {costs.response_us:.2f} us a token to take them in"
    ]
