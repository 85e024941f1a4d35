"""Validation of the fleet simulation: the same requests through replicas that compute.

Each replica is a real engine of one thread. Its clock counts the CPU time of its own steps, so replicas that
take turns in this process run side by side in their own time, and time that other programs take does not
count (what they do to the caches does). Routing, scheduling and prefix caching are the same code in both
fleets; what is compared is what passes cost.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean, median

import numpy as np

from paceline.bench.loading import bench_config
from paceline.bench.run.engine_runner import Task
from paceline.bench.run.slices import Disturbances, FloatArray, alone
from paceline.bench.run.speculation import OFF
from paceline.bench.simulate.costs import CostModel
from paceline.bench.simulate.fleet import ROUTINGS, Fleet, FleetRun, Replica, check_lengths, run_fleet
from paceline.bench.simulate.measuring import PassMeter, TimedStep, measure_costs, watching
from paceline.bench.simulate.prompts import FleetRequest
from paceline.bench.simulate.run import Method, World
from paceline.bench.simulate.world import VirtualClock
from paceline.bench.timing import OnTurn
from paceline.build import LoadedModel, build_engine, load_model
from paceline.config import CacheOptions, EngineConfig, SchedulerOptions
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.stats import StepStats

TOLERANCE = 0.15  # relative error
PRICING_PROMPTS = 16  # other requests, to measure costs with
PRICING_TOKENS = 64  # of each
cpu_time = time.thread_time  # with one thread, the caller's thread computes


@dataclass(frozen=True)
class ComparedFleet:
    """One figure, measured in one or several runs and simulated."""

    figure: str
    runs: tuple[float, ...]
    simulated: float

    @property
    def measured(self) -> float:
        """The median of the runs."""
        return median(self.runs)

    @property
    def ratio(self) -> float:
        return self.simulated / self.measured if self.measured else 1.0

    @property
    def spread(self) -> tuple[float, float]:
        """The least and the most of the runs, relative to their median."""
        return min(self.runs) / (self.measured or 1.0), max(self.runs) / (self.measured or 1.0)

    @property
    def is_within_tolerance(self) -> bool:
        return abs(self.ratio - 1) <= TOLERANCE

    @property
    def is_steady(self) -> bool:
        """Whether the runs themselves are within the tolerance of their median."""
        return max(1 - self.spread[0], self.spread[1] - 1) <= TOLERANCE


def check_fleet(
    model_name: str,
    num_replicas: int,
    routing: str,
    requests: Sequence[FleetRequest],
    on_turn: OnTurn = lambda _: None,
) -> list[ComparedFleet]:
    """Plain decoding by a fleet of real engines, and by the simulated fleet with costs measured just before
    and just after it."""
    config = bench_config(model_name, "auto", 1, SchedulerOptions().max_num_seqs)
    model = load_model(config)
    world = replica_world(config, model)
    check_lengths(world, requests)
    costs = [plain_costs(config, model)]
    on_turn("costs")
    measured = real_fleet(config, model, num_replicas, routing, requests)
    on_turn(f"{num_replicas} real engines")
    costs.append(plain_costs(config, model))
    on_turn("costs")
    worlds = [replace(world, costs={OFF: each}) for each in costs]
    return compare([figures(measured)], worlds, num_replicas, routing, requests)


def replica_world(config: EngineConfig, model: LoadedModel) -> World:
    """A replica with the default settings of a server; its costs are not measured yet."""
    engine = build_engine(replace(config, cache=CacheOptions()), model).engine
    return World(
        {},
        {},
        max_num_batched_tokens=engine.limits.max_num_batched_tokens,
        server_kv_tokens=engine.kv.pages.num_pages * engine.kv.page_size,
        max_num_seqs=engine.limits.max_num_seqs,
        max_model_len=engine.limits.max_model_len,
    )


def compare(
    runs: Sequence[Mapping[str, float]],
    worlds: Sequence[World],
    num_replicas: int,
    routing: str,
    requests: Sequence[FleetRequest],
) -> list[ComparedFleet]:
    """The figures of the runs beside the mean of those simulated in each of the worlds."""
    simulated = [figures(run_fleet(world, Method(OFF), num_replicas, routing, requests)) for world in worlds]
    return [
        ComparedFleet(name, tuple(run[name] for run in runs), fmean(one[name] for one in simulated))
        for name in runs[0]
    ]


def real_fleet(
    config: EngineConfig,
    model: LoadedModel,
    num_replicas: int,
    routing: str,
    requests: Sequence[FleetRequest],
) -> FleetRun:
    """The requests through real engines around one model, each with a clock of its own CPU time."""
    replicas: list[Replica] = []
    for number in range(num_replicas):
        clock = ComputeClock()
        engine = build_engine(replace(config, cache=CacheOptions()), model, clock).engine
        replicas.append(RealReplica(f"{number:06}", engine, clock))
    num_pages = replicas[0].engine.kv.pages.num_pages
    run = Fleet(replicas, ROUTINGS[routing](num_pages), Counter()).run(requests)
    for replica in replicas:
        replica.engine.close()
    return run


class ComputeClock(VirtualClock):
    """A clock that also advances by the CPU time of what it counts."""

    def __init__(self) -> None:
        super().__init__()
        self._since: float | None = None  # CPU time at which counting began

    def __call__(self) -> float:
        return super().__call__() + (0.0 if self._since is None else cpu_time() - self._since)

    @contextmanager
    def counting(self) -> Iterator[None]:
        self._since = cpu_time()
        try:
            yield
        finally:
            now, self._since = self(), None
            self.advance(now - self())


class RealReplica(Replica):
    """A replica whose steps take their CPU time."""

    def step(self, crowded: bool) -> list[Request]:
        assert isinstance(self.clock, ComputeClock)
        with self.clock.counting():
            return super().step(crowded)


class _NoDisturbances(Disturbances):
    """CPU time has none."""

    def in_step(self, stats: StepStats, waits: FloatArray) -> float:
        return 0.0


def plain_costs(config: EngineConfig, model: LoadedModel) -> CostModel:
    """Costs of plain decoding, in CPU time."""
    chance = np.random.default_rng(0)
    ids = chance.integers(4, size=(PRICING_PROMPTS, PRICING_TOKENS)).tolist()
    params = SamplingParams(temperature=0, max_tokens=4 * PRICING_TOKENS, ignore_eos=True)
    tasks = [Task(str(number), "", prompt, params) for number, prompt in enumerate(ids)]
    steps: list[TimedStep] = []
    engine = build_engine(config, model, cpu_time).engine
    alone(watching(engine, tasks, _NoDisturbances(), steps, cpu_time))
    meter = PassMeter(model.backend, model.config.max_position, cpu_time)
    alone(meter.slices())
    return measure_costs(meter.costs(), {OFF: steps}, [])[OFF]


def figures(run: FleetRun) -> dict[str, float]:
    """What is compared."""
    first = [1e3 * answer.ttft for answer in run.answers]
    each = [1e3 * answer.tpot for answer in run.answers if answer.tpot is not None]
    busy = {"busy (%)": 100 * run.utilization} if run.busy_seconds else {}
    return {
        "first token, mean (ms)": fmean(first),
        "first token, p50 (ms)": float(np.percentile(first, 50)),
        "first token, p95 (ms)": float(np.percentile(first, 95)),
        "per token, mean (ms)": fmean(each),
        "per token, p50 (ms)": float(np.percentile(each, 50)),
        "per token, p95 (ms)": float(np.percentile(each, 95)),
        "tokens per second": sum(answer.num_tokens for answer in run.answers) / run.seconds,
        **busy,
        "prefix cache hits (%)": 100 * run.hit_rate,
    }
