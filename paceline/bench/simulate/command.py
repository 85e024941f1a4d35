"""`paceline simulate`: arithmetic, the engine on a priced machine, or that held against the real engine."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import typer
from rich.table import Table

from paceline.bench.reporting import integers, report_console
from paceline.bench.simulate.check import TOLERANCE, Compared, check
from paceline.bench.simulate.flags import DRAFTS, MACHINE, TRAFFIC
from paceline.bench.simulate.run import Result, parse_methods, simulate
from paceline.bench.simulate.sources import Drafters, of_alpha, of_bench, of_depths
from paceline.bench.simulate.worlds import given_world, measured_world
from paceline.bench.speculation import OFF
from paceline.bench.tables import progress
from paceline.bench.wording import shown, three
from paceline.config import DEFAULT_MODEL
from paceline.control.arithmetic import MOST, arithmetic, arithmetic_table
from paceline.draft.methods import AUTO
from paceline.errors import ConfigError
from paceline.options import check_integer
from paceline.terminal.flags import Group, Options

DRAFT_COST, ROW_COST = 0.1, 0.05  # in passes of the target over one row
COURSES = 9  # of a check at each concurrency, about: for a progress bar
SIMULATED, CHECKED = "1,4,16,64,256", "1,4,16"  # requests at once


@dataclass(frozen=True)
class Guesses:
    """What the arithmetic is made from. None: not said."""

    alpha: float
    gamma: int
    draft_cost: float | None
    row_cost: float | None


def simulate_arithmetic(guesses: Guesses, engine: Sequence[Options], as_json: bool) -> None:
    """What chains would give, worked out; flags of the `engine`'s simulation are refused."""
    for group, values in zip((MACHINE, TRAFFIC, DRAFTS), engine, strict=True):
        _refuse_given(group, values, "needs a machine: name a MODEL, which is measured here, or a --gpu.")
    found = arithmetic(
        guesses.alpha,
        guesses.gamma,
        DRAFT_COST if guesses.draft_cost is None else guesses.draft_cost,
        ROW_COST if guesses.row_cost is None else guesses.row_cost,
    )
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
    else:
        report_console().print(arithmetic_table(found))


def simulate_engine(
    model: str | None,
    guesses: Guesses,
    machine: Options,
    traffic: Options,
    drafts: Options,
    as_json: bool,
) -> None:
    """What each method gives at each concurrency, by the engine on the machine that is named."""
    check_integer(ConfigError, "gamma", guesses.gamma, 1, MOST)
    if guesses.row_cost is not None or (model is None and guesses.draft_cost is not None):
        raise ConfigError("--row-cost and --draft-cost are for a machine without prices: leave them out.")
    drafters = _drafters(guesses.alpha, drafts)
    usual = ",".join([OFF, AUTO, *(f"{name}:{guesses.gamma}" for name in drafters)])
    methods = parse_methods(drafts["methods"] or usual, list(drafters))
    concurrency = integers("--concurrency", traffic["concurrency"] or SIMULATED)
    if model is None:
        name = str(machine["gpu"] or "given machine")
        world, lengths = given_world(machine, traffic, drafters, methods, drafts["chances"])
    else:
        _refuse_given(MACHINE, machine, "is of a --gpu: leave it out, or leave out the MODEL.")
        name = model
        cost = DRAFT_COST if guesses.draft_cost is None else guesses.draft_cost
        world, lengths = measured_world(model, cost, traffic, drafters, methods, drafts["chances"])
    with progress(len(concurrency) * len(methods)) as on_turn, _without_advice():
        result = simulate(world, methods, lengths, concurrency, on_turn)
    if as_json:
        typer.echo(json.dumps({"machine": name, "simulated": True, "rows": result.facts()}, indent=2))
    else:
        report_console().print(result_table(name, result))


def check_engine(
    model: str | None, machine: Options, traffic: Options, drafts: Options, as_json: bool
) -> bool:
    """Whether the simulation meets the real engine; prints both."""
    at_once = integers("--concurrency", traffic["concurrency"] or CHECKED)
    other = traffic | {"concurrency": None, "threads": None}
    for group, values in zip((MACHINE, TRAFFIC, DRAFTS), (machine, other, drafts), strict=True):
        _refuse_given(group, values, "has no effect with --check: leave it out.")
    with progress(COURSES * len(at_once)) as on_turn, _without_advice():
        found = check(model or DEFAULT_MODEL, at_once, traffic["threads"], on_turn)
    if as_json:
        rows = [asdict(one) | {"ratio": one.ratio} for one in found]
        typer.echo(json.dumps({"model": model or DEFAULT_MODEL, "rows": rows}, indent=2))
    else:
        report_console().print(check_table(model or DEFAULT_MODEL, found))
    return all(abs(one.ratio - 1) <= TOLERANCE for one in found)


@contextmanager
def _without_advice() -> Iterator[None]:
    """Simulated traffic needs no advice about its segments."""
    logger = logging.getLogger("paceline.control.segments")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _drafters(alpha: float, drafts: Options) -> Drafters:
    """How drafts fare, by the one source that is named."""
    if drafts["from_file"] is not None and drafts["acceptance"] is not None:
        raise ConfigError("--from and --acceptance both say how drafts fare: give one of them.")
    if drafts["from_file"] is not None:
        return of_bench(drafts["from_file"])
    return of_alpha(alpha) if drafts["acceptance"] is None else of_depths(drafts["acceptance"])


def _refuse_given(group: Group, values: Options, why: str) -> None:
    """Refuse what would have no effect."""
    for flag in group:
        if values[flag.name] != flag.default:
            spelling = (flag.spelling or "--" + flag.name.replace("_", "-")).split("/")[-1]
            raise ConfigError(f"{spelling} {why}")


def result_table(name: str, result: Result) -> Table:
    """What each method gives at each concurrency; times are p50 / p90 / p99."""
    table = Table(title=f"{name}, simulated; milliseconds: p50 / p90 / p99", title_justify="left")
    table.add_column("at once", justify="right")
    table.add_column("method")
    for heading in ("tok/s", "speedup", "first token", "per token", "whole answer", "tokens/pass", "drafted"):
        table.add_column(heading, justify="right")
    table.add_column("steps by reason")
    for row, reasons in zip(result.rows, result.decisions, strict=True):
        times = row.percentiles
        table.add_row(
            str(row.concurrency),
            row.method,
            f"{row.tokens_per_second:,.0f}",
            shown(row.speedup_vs_off, ".2f"),
            three(times["ttft_ms"]),
            three(times["tpot_ms"]),
            three(times["e2e_ms"]),
            shown(row.tokens_per_pass, ".2f"),
            shown(row.drafted_share and row.draft_tokens_per_step, ".1f"),
            ", ".join(f"{count} {reason}" for reason, count in reasons.items()),
        )
    return table


def check_table(name: str, found: Sequence[Compared]) -> Table:
    """Both throughputs, and how near they are."""
    worst = max(abs(one.ratio - 1) for one in found)
    within = sum(abs(one.ratio - 1) <= TOLERANCE for one in found)
    table = Table(
        title=f"{name}: {within} of {len(found)} settings within {TOLERANCE:.0%}, the worst {worst:.0%} off",
        title_justify="left",
    )
    table.add_column("at once", justify="right")
    table.add_column("method")
    for heading in ("measured tok/s", "simulated tok/s", "ratio", "tokens/pass", "simulated"):
        table.add_column(heading, justify="right")
    for one in found:
        table.add_row(
            str(one.concurrency),
            one.method,
            f"{one.measured:,.1f}",
            f"{one.simulated:,.1f}",
            f"{one.ratio:.3f}",
            f"{one.measured_length:.2f}",
            f"{one.simulated_length:.2f}",
        )
    return table
