"""Simulations of `paceline simulate`: arithmetic, the engine on a priced machine, or beside the real one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean

from paceline.bench.flags import numbers
from paceline.bench.report.result import Result
from paceline.bench.report.terminal import progress
from paceline.bench.run.figures import parse_objective
from paceline.bench.run.speculation import OFF
from paceline.bench.simulate.arithmetic import MAX_DRAFT_TOKENS, arithmetic
from paceline.bench.simulate.capacity import LOAD_STEPS, SEARCH_TURNS, capacities, saturation
from paceline.bench.simulate.check import TOLERANCE, check
from paceline.bench.simulate.flags import DRAFTS, MACHINE, TRAFFIC
from paceline.bench.simulate.run import Length, Method, World, arrivals, parse_methods, simulate
from paceline.bench.simulate.sources import Drafters, of_alpha, of_bench, of_depths
from paceline.bench.simulate.view import Assumed, arithmetic_result, check_result, simulated_result
from paceline.bench.simulate.worlds import given_world, measured_world
from paceline.bench.traffic.profiles import closed
from paceline.config import DEFAULT_MODEL
from paceline.draft.methods import AUTO
from paceline.errors import ConfigError
from paceline.options import check_integer, check_number
from paceline.terminal.flags import Group, Options, integers

DRAFT_COST, ROW_COST = 0.1, 0.05  # in one-row passes of the target
COURSES = 9  # of a check at each concurrency, roughly: for the progress bar
MEASURED = "is of a simulated --gpu: leave it out, or leave out the MODEL, which is measured here."
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
        refuse_given(group, values, "needs a machine: name a MODEL, which is measured here, or a --gpu.")
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
    """Each method at each concurrency and arrival rate, by the engine on the named machine."""
    check_guesses(model, guesses)
    drafters, acceptance = given_drafters(guesses.alpha, drafts)
    usual = ",".join([OFF, AUTO, *(f"{name}:{guesses.gamma}" for name in drafters)])
    methods = parse_methods(drafts["methods"] or usual, list(drafters))
    profiles = [closed(number) for number in integers("--concurrency", traffic["concurrency"] or SIMULATED)]
    rates = None if traffic["rate"] in (None, AUTO) else numbers("--rate", traffic["rate"])
    objective = None if traffic["slo"] is None else parse_objective(traffic["slo"])
    if machine["gpu_price"] is not None:
        check_number(ConfigError, "--gpu-price", machine["gpu_price"], 0, 1e6)
    name, world, lengths = find_world(model, guesses, machine, traffic, drafters, methods, drafts["chances"])
    assumed = Assumed(
        fmean(length.prompt for length in lengths), fmean(length.answer for length in lengths), acceptance
    )
    num_rates = 0 if traffic["rate"] is None else len(rates or LOAD_STEPS)
    turns = len(profiles) + num_rates + SEARCH_TURNS * (objective is not None)
    with progress(turns * len(methods)) as on_turn, without_advice():
        simulation = simulate(world, methods, lengths, profiles, on_turn, objective)
        saturated = saturation(simulation, assumed.output_tokens)
        if num_rates:
            steps = rates or [share * saturated for share in LOAD_STEPS]
            opened = [arrivals(float(f"{rate:.3g}")) for rate in steps]
            simulation.extend(simulate(world, methods, lengths, opened, on_turn, objective))
        found = []
        if objective is not None:
            found = capacities(world, methods, lengths, objective, saturated, on_turn)
    hourly = None if machine["gpu_price"] is None else world.num_gpus * machine["gpu_price"]
    return simulated_result(name, assumed, simulation, found, hourly, traffic["slo"])


def check_guesses(model: str | None, guesses: Guesses) -> None:
    """Raise ConfigError for guesses that a machine with costs does not need."""
    check_integer(ConfigError, "gamma", guesses.gamma, 1, MAX_DRAFT_TOKENS)
    if guesses.row_cost is not None or (model is None and guesses.draft_cost is not None):
        raise ConfigError("--row-cost and --draft-cost are for a machine without costs: leave them out.")


def find_world(
    model: str | None,
    guesses: Guesses,
    machine: Options,
    traffic: Options,
    drafters: Drafters,
    methods: Sequence[Method],
    chances: bool,
) -> tuple[str, World, list[Length]]:
    """The machine that the flags name, measured here if it is a MODEL, its name, and lengths of requests."""
    if model is None:
        name = " on ".join(part for part in (machine["preset"], machine["gpu"] or "a given machine") if part)
        return name, *given_world(machine, traffic, drafters, methods, chances)
    refuse_given(MACHINE, machine, MEASURED)
    cost = DRAFT_COST if guesses.draft_cost is None else guesses.draft_cost
    return model, *measured_world(model, cost, traffic, drafters, methods, chances)


def check_engine(
    model: str | None, machine: Options, traffic: Options, drafts: Options
) -> tuple[Result, bool]:
    """The simulation beside the real engine, and whether it is within the tolerance."""
    at_once = integers("--concurrency", traffic["concurrency"] or CHECKED)
    other = traffic | {"concurrency": None, "threads": None}
    for group, values in zip((MACHINE, TRAFFIC, DRAFTS), (machine, other, drafts), strict=True):
        refuse_given(group, values, "has no effect with --check: leave it out.")
    with progress(COURSES * len(at_once)) as on_turn, without_advice():
        results = check(model or DEFAULT_MODEL, at_once, traffic["threads"], on_turn)
    good = all(abs(result.ratio - 1) <= TOLERANCE for result in results)
    return check_result(model or DEFAULT_MODEL, results), good


@contextmanager
def without_advice() -> Iterator[None]:
    """A context without the controller's advice about segments, which simulated traffic does not need."""
    logger = logging.getLogger("paceline.control.segments")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def given_drafters(alpha: float, drafts: Options) -> tuple[Drafters, str]:
    """Acceptance of drafts, from the one source that is given, and that source in words."""
    if drafts["from_file"] is not None and drafts["acceptance"] is not None:
        raise ConfigError("--from and --acceptance both say how drafts fare: give one of them.")
    if drafts["from_file"] is not None:
        return of_bench(drafts["from_file"]), f"acceptance of {drafts['from_file'].name} (--from)"
    if drafts["acceptance"] is not None:
        return of_depths(drafts["acceptance"]), f"acceptance by depth {drafts['acceptance']} (--acceptance)"
    return of_alpha(alpha), f"acceptance {alpha:g} per token (--alpha)"


def refuse_given(group: Group, values: Options, why: str) -> None:
    """Raise ConfigError for flags that would have no effect."""
    for flag in group:
        if values[flag.name] != flag.default:
            spelling = (flag.spelling or "--" + flag.name.replace("_", "-")).split("/")[-1]
            raise ConfigError(f"{spelling} {why}")
