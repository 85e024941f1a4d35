"""Simulated requests through the real engine, at several concurrencies and with several methods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.bench.run.engine_runner import EngineRunner, Task
from paceline.bench.run.figures import Objective
from paceline.bench.run.rows import Row, rows
from paceline.bench.run.speculation import COLD, OFF, Key, Runs
from paceline.bench.run.turns import Turn
from paceline.bench.simulate.costs import Contention, CostModel, ServerCosts, start_costs
from paceline.bench.simulate.world import (
    PAGE_SIZE,
    VOCABULARY,
    Acceptance,
    CountingTokenizer,
    SimulatedBackend,
    SimulatedDrafter,
    VirtualClock,
)
from paceline.bench.timing import OnTurn
from paceline.bench.traffic.profiles import Profile, poisson
from paceline.control.auto import AutoController
from paceline.control.controller import Controller, FixedController
from paceline.control.decision import Decision
from paceline.core.params import SamplingParams
from paceline.core.trees import PLAIN, DraftPlan
from paceline.draft.methods import AUTO
from paceline.engine.admission import Limits
from paceline.engine.engine import Engine, target_cache
from paceline.errors import ConfigError
from paceline.options import check_integer

MIN_REQUESTS = 32  # per setting: percentiles of fewer are meaningless
WAVES = 2  # requests per setting, in units of the concurrency
OPEN_REQUESTS = 128  # that arrive at a rate
LEARNING = 8  # minimum requests that a controller sees before the measured ones
DEPTH = 7  # maximum draft length of a method without a number


@dataclass(frozen=True)
class Length:
    """Tokens of one request's prompt and answer."""

    prompt: int
    answer: int


@dataclass(frozen=True)
class Method:
    """A drafting method."""

    label: str
    drafter: str | None = None  # None: off, or the controller's choice
    tokens: int = 0


@dataclass(frozen=True)
class World:
    """What is simulated: a machine, its drafters, and the size of a batch."""

    costs: Mapping[str, CostModel]  # by method: what is loaded beside the target costs a little in every step
    drafters: Mapping[str, Sequence[Acceptance]]  # per drafter, the acceptances that requests use in turn
    max_num_batched_tokens: int
    kv_tokens: int | None = None  # KV cache tokens that fit into memory; None: enough for all
    server_kv_tokens: int | None = None  # KV cache tokens of a replica of a fleet; None: enough for all
    max_num_seqs: int = 256  # requests per pass of a replica
    contention: Contention = field(default_factory=Contention)  # none: each replica has its own machine
    server: ServerCosts = field(default_factory=ServerCosts)  # around each replica of a fleet
    max_model_len: int | None = None  # tokens of a request; None: any number
    tells_chances: bool = True
    num_gpus: int = 1  # what is paid for


@dataclass
class Simulation:
    """Rows as of `paceline bench`, and the controller's reasons."""

    rows: list[Row] = field(default_factory=list)
    decisions: list[dict[str, int]] = field(default_factory=list)  # per row: steps by reason

    def extend(self, other: Simulation) -> None:
        """Add the rows of another simulation."""
        self.rows += other.rows
        self.decisions += other.decisions

    def facts(self) -> list[dict[str, Any]]:
        """The rows for JSON."""
        return [
            asdict(row) | {"decisions": reasons}
            for row, reasons in zip(self.rows, self.decisions, strict=True)
        ]


def parse_methods(given: str, drafters: Sequence[str]) -> list[Method]:
    """The methods of a list such as off,auto,chain:5; plain decoding first, as the reference."""
    methods = {OFF: Method(OFF)}
    for label in (part.strip() for part in given.split(",")):
        name, _, tokens = label.rpartition(":")
        if label in (OFF, AUTO):
            methods[label] = Method(label)
        elif label in drafters:
            methods[label] = Method(label, label, DEPTH)
        elif name in drafters and tokens.isdecimal():
            methods[label] = Method(label, name, check_integer(ConfigError, label, int(tokens), 1, 1024))
        else:
            forms = ", ".join(f"{drafter}:5" for drafter in drafters)
            raise ConfigError(
                f"--methods: {label!r} is none. Use off, auto, or a drafter and a length: {forms}."
            )
    return list(methods.values())


def simulate(
    world: World,
    methods: Sequence[Method],
    lengths: Sequence[Length],
    profiles: Sequence[Profile],
    on_turn: OnTurn = lambda _: None,
    objective: Objective | None = None,
) -> Simulation:
    """The result of each method at each concurrency or arrival rate. Requests use `lengths` in turn."""
    result = Simulation()
    for profile in profiles:
        count = len(profile.due) or max(MIN_REQUESTS, WAVES * (profile.concurrency or 1))
        tasks = [_task(number, lengths[number % len(lengths)]) for number in range(count)]
        turns: dict[Key, list[list[Turn]]] = {}
        reasons: dict[str, Counter[str]] = {}
        for method in methods:
            reasons[method.label] = Counter()
            turn = simulated_turn(world, method, tasks, profile, reasons[method.label])
            turns[COLD, method.label] = [[turn]]
            on_turn(f"{profile.label}: {method.label}")
        for row in rows("simulated", Runs([tasks], profile, turns), objective):
            result.rows.append(row)
            result.decisions.append(dict(reasons[row.method]))
    return result


def arrivals(rate: float) -> Profile:
    """Requests that arrive independently, `rate` per second on average."""
    return poisson(rate, 0, OPEN_REQUESTS)


def simulated_turn(
    world: World, method: Method, tasks: Sequence[Task], profile: Profile, reasons: Counter[str]
) -> Turn:
    """The turn of one method; the controller's reasons are counted in `reasons`."""
    at_once = profile.concurrency or len(tasks)
    runner = _runner(world, method, tasks, at_once, reasons)
    if method.label == AUTO:  # like a server that has run for a while: its controller knows its drafters
        runner.run(tasks[: max(profile.concurrency or LEARNING, LEARNING)], profile)
        reasons.clear()
    return runner.run(tasks, profile)


def _task(number: int, length: Length) -> Task:
    params = SamplingParams(temperature=0, max_tokens=length.answer, ignore_eos=True, seed=number)
    return Task(str(number), "all", [0] * length.prompt, params)


def _runner(
    world: World,
    method: Method,
    tasks: Sequence[Task],
    concurrency: int,
    reasons: Counter[str],
) -> EngineRunner:
    """A new engine at time 0."""
    clock = VirtualClock()
    max_rows = max(world.max_num_batched_tokens, concurrency)
    longest = max(len(task.token_ids) + (task.params.max_tokens or 1) for task in tasks)
    num_pages = concurrency * (-(-longest // PAGE_SIZE) + 1 + max_rows // PAGE_SIZE)
    if world.kv_tokens is not None:
        num_pages = min(num_pages, world.kv_tokens // PAGE_SIZE)
    limits = Limits(VOCABULARY, longest + 1, max_num_seqs=concurrency, max_num_batched_tokens=max_rows)
    engine = simulated_engine(world, method, clock, limits, num_pages, reasons)
    return EngineRunner(engine, clock=clock)


def simulated_engine(
    world: World,
    method: Method,
    clock: VirtualClock,
    limits: Limits,
    num_pages: int,
    reasons: Counter[str],
    enable_prefix_caching: bool = False,
) -> Engine:
    """An engine whose passes and drafts only advance the clock; the controller's reasons are counted."""
    longest = limits.max_model_len - 1
    if num_pages <= -(-longest // PAGE_SIZE):
        raise ConfigError(
            f"a request of {longest} tokens does not fit: there is room for the keys and values of "
            f"{num_pages * PAGE_SIZE}. Make it shorter, or use fewer --bits, a larger --gpu or more of them."
        )
    costs, max_rows = world.costs[method.label], limits.max_num_batched_tokens
    drafters = {
        name: SimulatedDrafter(name, acceptances, costs, clock, world.tells_chances)
        for name, acceptances in world.drafters.items()
    }
    backend = SimulatedBackend(costs, clock, max_rows)
    return Engine(
        backend,
        CountingTokenizer(),
        limits,
        target_cache(backend, limits, num_pages, enable_prefix_caching),
        controller=_controller(world, method, costs, max_rows, reasons),
        drafters=drafters,
        clock=clock,
    )


def _controller(
    world: World, method: Method, costs: CostModel, max_rows: int, reasons: Counter[str]
) -> Controller:
    """The real controller, or a fixed plan."""
    if method.label != AUTO:
        return FixedController(DraftPlan(method.drafter, method.tokens) if method.drafter else PLAIN)
    plans = {
        name: DraftPlan(name, min(DEPTH, max(len(acceptance.accepted) for acceptance in acceptances)))
        for name, acceptances in world.drafters.items()
    }

    def count(decision: Decision) -> None:
        reasons[decision.reason] += 1

    return AutoController(plans, start_costs(costs, max_rows), log=count)
