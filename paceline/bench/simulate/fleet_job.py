"""`paceline simulate --replicas`: fleets of several sizes on a trace, and the smallest good one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from paceline.bench.report.result import Result
from paceline.bench.report.terminal import progress
from paceline.bench.run.figures import Objective, parse_objective, percentiles
from paceline.bench.run.speculation import OFF
from paceline.bench.simulate.capacity import GOOD_SHARE, smallest
from paceline.bench.simulate.costs import ServerCosts
from paceline.bench.simulate.flags import DRAFTS, FLEET, MACHINE, TRAFFIC
from paceline.bench.simulate.fleet import ROUTINGS, FleetRun, run_fleet
from paceline.bench.simulate.fleet_check import TOLERANCE, check_fleet
from paceline.bench.simulate.fleet_view import FleetRow, Found, fleet_check_result, fleet_result
from paceline.bench.simulate.job import (
    Guesses,
    check_guesses,
    find_world,
    given_drafters,
    refuse_given,
    without_advice,
)
from paceline.bench.simulate.prompts import FleetRequest, fleet_requests, parse_shared_prefixes
from paceline.bench.simulate.run import Method, World, parse_methods
from paceline.bench.simulate.view import Assumed
from paceline.bench.timing import OnTurn
from paceline.bench.traffic.traces import read_trace
from paceline.config import DEFAULT_MODEL
from paceline.draft.methods import AUTO
from paceline.errors import ConfigError
from paceline.options import check_choice, check_integer, check_number
from paceline.terminal.flags import Options

MAX_REPLICAS = 4096
NEEDS_TRACE = "--replicas needs the requests of a --trace: a .csv or a .jsonl file."
CHECK_TURNS = 4
SHARES = (50, 95, 99)  # percentiles
USED = ("slo", "threads", "max_num_batched_tokens")  # flags of TRAFFIC that a fleet takes


def simulate_fleet(
    model: str | None, guesses: Guesses, machine: Options, traffic: Options, drafts: Options, fleet: Options
) -> Result:
    """Fleets of the named machine on a trace. Everything is checked before a MODEL is measured."""
    low, high = parse_replicas(fleet["replicas"])
    if fleet["trace"] is None:
        raise ConfigError(NEEDS_TRACE)
    unused = tuple(flag for flag in TRAFFIC if flag.name not in USED)
    refuse_given(unused, traffic, "has no effect with --replicas: the --trace says when and how long.")
    if model is None and machine["gpu"] is None and machine["bandwidth"] is None:
        raise ConfigError("--replicas needs a machine: name a MODEL, which is measured here, or a --gpu.")
    check_guesses(model, guesses)
    requests = _requests(fleet)
    routings = _routings(fleet["routing"])
    objective = None if traffic["slo"] is None else parse_objective(traffic["slo"])
    drafters, acceptance = given_drafters(guesses.alpha, drafts)
    methods = parse_methods(drafts["methods"] or f"{OFF},{AUTO}", list(drafters))
    price = _price(machine, fleet)
    server = ServerCosts() if fleet["server"] is None else ServerCosts.parse(fleet["server"])
    name, world, _ = find_world(model, guesses, machine, traffic, drafters, methods, drafts["chances"])
    world = replace(world, server=server)
    if fleet["max_num_seqs"] is not None:
        world = replace(
            world, max_num_seqs=check_integer(ConfigError, "--max-num-seqs", fleet["max_num_seqs"], 1, 4096)
        )
    if fleet["replica_price"] is None and price is not None:
        price *= world.num_gpus
    assumed = Assumed(
        fmean(request.prompt_tokens for request in requests),
        fmean(request.answer_tokens for request in requests),
        acceptance,
    )
    search = FleetSearch(world, requests, objective, price)
    sizes = high - low + 1 if objective is None else 2 * (high - low + 1).bit_length() - 1
    with progress(sizes * len(methods) * len(routings)) as on_turn, without_advice():
        found = [
            search.find(method, routing, low, high, on_turn) for routing in routings for method in methods
        ]
    title = f"{name}, {fleet['trace'].name}"
    return fleet_result(title, assumed, search.rows, found, traffic["slo"], requests[-1].due)


def check_fleet_engine(
    model: str | None, machine: Options, traffic: Options, drafts: Options, fleet: Options
) -> tuple[Result, bool]:
    """The simulated fleet beside one of real engines, and whether it is within the tolerance."""
    low, high = parse_replicas(fleet["replicas"])
    if low != high or len(_routings(fleet["routing"])) > 1:
        raise ConfigError("--check compares one fleet: give one number of --replicas and one --routing.")
    if fleet["trace"] is None:
        raise ConfigError(NEEDS_TRACE)
    other = {name: fleet[name] for name in ("max_num_seqs", "server", "replica_price")}
    unused = tuple(flag for flag in FLEET if flag.name in other)
    for group, values in ((MACHINE, machine), (TRAFFIC, traffic), (DRAFTS, drafts), (unused, other)):
        refuse_given(group, values, "has no effect with --check: leave it out.")
    requests, name = _requests(fleet), model or DEFAULT_MODEL
    with progress(CHECK_TURNS) as on_turn:
        compared = check_fleet(name, low, fleet["routing"], requests, on_turn)
    good = all(abs(figure.ratio - 1) <= TOLERANCE for figure in compared)
    return fleet_check_result(f"{name}, {fleet['trace'].name}, {low} replicas", compared), good


@dataclass
class FleetSearch:
    """Fleets on the same requests, each simulated once."""

    world: World
    requests: Sequence[FleetRequest]
    objective: Objective | None
    price: float | None  # of one replica for one hour

    def __post_init__(self) -> None:
        self.rows: list[FleetRow] = []

    def find(self, method: Method, routing: str, low: int, high: int, on_turn: OnTurn) -> Found:
        """The smallest fleet that holds the objective; without one, all sizes are simulated."""
        rows: dict[int, FleetRow] = {}

        def holds(size: int) -> bool:
            if size not in rows:
                rows[size] = self._row(method, routing, size)
                on_turn(f"{size} replicas, {routing}: {method.label}")
            return (rows[size].good_share or 0.0) >= GOOD_SHARE

        found = None
        if self.objective is not None:
            found = smallest(holds, low, high)
        else:
            for size in range(low, high + 1):
                holds(size)
        self.rows += [rows[size] for size in sorted(rows)]
        return Found(method.label, routing, rows[found or max(rows)], found is not None)

    def _row(self, method: Method, routing: str, size: int) -> FleetRow:
        run = run_fleet(self.world, method, size, routing, self.requests)
        return fleet_row(run, method.label, routing, size, self.objective, self.price)


def fleet_row(
    run: FleetRun, method: str, routing: str, size: int, objective: Objective | None, price: float | None
) -> FleetRow:
    """The figures of a run."""
    answers = run.answers
    tokens = sum(answer.num_tokens for answer in answers)
    times = {
        "ttft_ms": [answer.ttft for answer in answers],
        "tpot_ms": [answer.tpot for answer in answers if answer.tpot is not None],
        "e2e_ms": [answer.e2e_seconds for answer in answers],
    }
    speed = tokens / run.seconds
    return FleetRow(
        replicas=size,
        routing=routing,
        method=method,
        requests=len(answers),
        seconds=run.seconds,
        tokens_per_second=speed,
        percentiles={
            name: percentiles([1e3 * value for value in values], SHARES) for name, values in times.items()
        },
        good_share=None if objective is None else fmean(objective.met_by(answer) for answer in answers),
        utilization=run.utilization,
        requests_per_replica=run.requests,
        hit_rate=run.hit_rate,
        preemptions=run.preemptions,
        cost_per_million_tokens=None if price is None else size * price / 3600 / speed * 1e6,
        decisions=run.reasons,
    )


def parse_replicas(text: str) -> tuple[int, int]:
    """The smallest and the largest fleet of a text such as 4 or 1..16."""
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text.strip())
    if match is None:
        raise ConfigError(f"--replicas must be a number or a range, such as 4 or 1..16; got {text!r}.")
    low, high = int(match[1]), int(match[2] or match[1])
    for number in (low, high):
        check_integer(ConfigError, "--replicas", number, 1, MAX_REPLICAS)
    if low > high:
        raise ConfigError(f"--replicas {text}: the range is reversed. Write {high}..{low}.")
    return low, high


def _requests(fleet: Options) -> list[FleetRequest]:
    limit = fleet["limit"]
    if limit is not None:
        check_integer(ConfigError, "--limit", limit, 1, None)
    arrivals = read_trace(fleet["trace"], fleet["time_scale"])[:limit]
    shared = None
    if fleet["shared_prefixes"] is not None:
        shared = parse_shared_prefixes(fleet["shared_prefixes"])
        if any(arrival.blocks for arrival in arrivals):
            raise ConfigError(
                "--shared-prefixes: this --trace tells by hash_ids what prompts share. Leave it out."
            )
    return fleet_requests(arrivals, shared)


def _routings(text: str) -> list[str]:
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        check_choice(ConfigError, "--routing", name, tuple(ROUTINGS))
    return names


def _price(machine: Options, fleet: Options) -> float | None:
    """The given price: of a replica, or else of one of its GPUs."""
    given = {"--gpu-price": machine["gpu_price"], "--replica-price": fleet["replica_price"]}
    for flag, value in given.items():
        if value is not None:
            check_number(ConfigError, flag, value, 0, 1e6)
    if None not in given.values():
        raise ConfigError("--replica-price is of all GPUs of a replica: leave --gpu-price out.")
    return next((value for value in given.values() if value is not None), None)
