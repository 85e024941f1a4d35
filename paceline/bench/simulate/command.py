"""`paceline simulate`: arithmetic, the engine on a priced machine, or a check against the real engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.bench.flags import integers
from paceline.bench.report.result import Result
from paceline.bench.report.terminal import progress
from paceline.bench.run.speculation import OFF
from paceline.bench.simulate.arithmetic import MAX_DRAFT_TOKENS, arithmetic
from paceline.bench.simulate.check import TOLERANCE, check
from paceline.bench.simulate.flags import DRAFTS, MACHINE, TRAFFIC
from paceline.bench.simulate.run import parse_methods, simulate
from paceline.bench.simulate.sources import Drafters, of_alpha, of_bench, of_depths
from paceline.bench.simulate.view import arithmetic_result, check_result, simulated_result
from paceline.bench.simulate.worlds import given_world, measured_world
from paceline.config import DEFAULT_MODEL
from paceline.draft.methods import AUTO
from paceline.errors import ConfigError
from paceline.options import check_integer
from paceline.terminal.flags import Group, Options

DRAFT_COST, ROW_COST = 0.1, 0.05  # in one-row passes of the target
COURSES = 9  # of a check at each concurrency, roughly: for the progress bar
SIMULATED, CHECKED = "1,4,16,64,256", "1,4,16"  # concurrencies


@dataclass(frozen=True)
class Guesses:
    """The inputs of the arithmetic. None: not given."""

    alpha: float
    gamma: int
    draft_cost: float | None
    row_cost: float | None


def simulate_arithmetic(guesses: Guesses, engine: Sequence[Options]) -> Result:
    """The computed gain of chains. Flags that only the engine's simulation uses are refused."""
    for group, values in zip((MACHINE, TRAFFIC, DRAFTS), engine, strict=True):
        _refuse_given(group, values, "needs a machine: name a MODEL, which is measured here, or a --gpu.")
    computed = arithmetic(
        guesses.alpha,
        guesses.gamma,
        DRAFT_COST if guesses.draft_cost is None else guesses.draft_cost,
        ROW_COST if guesses.row_cost is None else guesses.row_cost,
    )
    return arithmetic_result(computed)


def simulate_engine(
    model: str | None,
    guesses: Guesses,
    machine: Options,
    traffic: Options,
    drafts: Options,
) -> Result:
    """The result of each method at each concurrency, by the engine on the named machine."""
    check_integer(ConfigError, "gamma", guesses.gamma, 1, MAX_DRAFT_TOKENS)
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
        return simulated_result(name, simulate(world, methods, lengths, concurrency, on_turn))


def check_engine(
    model: str | None, machine: Options, traffic: Options, drafts: Options
) -> tuple[Result, bool]:
    """The simulation beside the real engine, and whether it is within the tolerance."""
    at_once = integers("--concurrency", traffic["concurrency"] or CHECKED)
    other = traffic | {"concurrency": None, "threads": None}
    for group, values in zip((MACHINE, TRAFFIC, DRAFTS), (machine, other, drafts), strict=True):
        _refuse_given(group, values, "has no effect with --check: leave it out.")
    with progress(COURSES * len(at_once)) as on_turn, _without_advice():
        results = check(model or DEFAULT_MODEL, at_once, traffic["threads"], on_turn)
    good = all(abs(result.ratio - 1) <= TOLERANCE for result in results)
    return check_result(model or DEFAULT_MODEL, results), good


@contextmanager
def _without_advice() -> Iterator[None]:
    """A context without the controller's advice about segments, which simulated traffic does not need."""
    logger = logging.getLogger("paceline.control.segments")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _drafters(alpha: float, drafts: Options) -> Drafters:
    """Acceptance of drafts, from the one source that is given."""
    if drafts["from_file"] is not None and drafts["acceptance"] is not None:
        raise ConfigError("--from and --acceptance both say how drafts fare: give one of them.")
    if drafts["from_file"] is not None:
        return of_bench(drafts["from_file"])
    return of_alpha(alpha) if drafts["acceptance"] is None else of_depths(drafts["acceptance"])


def _refuse_given(group: Group, values: Options, why: str) -> None:
    """Raise ConfigError for flags that would have no effect."""
    for flag in group:
        if values[flag.name] != flag.default:
            spelling = (flag.spelling or "--" + flag.name.replace("_", "-")).split("/")[-1]
            raise ConfigError(f"{spelling} {why}")
