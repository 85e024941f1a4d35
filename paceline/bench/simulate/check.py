"""Validation of the simulation: the same requests measured by the real engine and simulated.

The simulation takes from the real runs what it cannot know: the length of each answer and the acceptance
of each drafter in it. Costs come from other prompts, measured in the same seconds. Nothing is taken from
the runs of `auto`: its drafters have the acceptance measured where each was used alone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from paceline.bench.loading import bench_config
from paceline.bench.run.contest import usual_methods
from paceline.bench.run.engine_runner import EngineRunner, Task
from paceline.bench.run.rows import rows
from paceline.bench.run.slices import Disturbances, in_slices
from paceline.bench.run.speculation import COLD, OFF, ONE_BY_ONE, Key, Runs
from paceline.bench.run.turns import Answer, Slices, Turn
from paceline.bench.simulate.costs import CostModel
from paceline.bench.simulate.measuring import PassMeter, TimedStep, measure_costs, watching
from paceline.bench.simulate.run import Method, World, simulated_turn
from paceline.bench.simulate.world import Acceptance
from paceline.bench.timing import OnTurn
from paceline.bench.traffic.builtin_workloads import BUILT_IN
from paceline.bench.traffic.profiles import Profile, closed
from paceline.bench.traffic.workloads import load_workload
from paceline.build import LoadedModel, build_engine, load_model
from paceline.config import EngineConfig
from paceline.core.params import SamplingParams
from paceline.draft.methods import AUTO
from paceline.draft.speculative_config import parse_speculative_config
from paceline.engine.engine import Engine

TOLERANCE = 0.1  # relative error
MIN_TASKS = 6  # requests per setting, or the concurrency if that is more
PRICING_TASKS = 10  # other requests, to measure costs with
REPEATS = 4  # simulations per setting, each with its own noise
ANSWER = 96  # maximum tokens per answer


@dataclass(frozen=True)
class Compared:
    """One setting, measured and simulated."""

    concurrency: int
    method: str
    measured: float  # tokens per second
    simulated: float
    measured_length: float  # tokens per pass after the first
    simulated_length: float

    @property
    def ratio(self) -> float:
        return self.simulated / self.measured


def check(
    model_name: str,
    concurrency: Sequence[int],
    threads: int | None = None,
    on_turn: OnTurn = lambda _: None,
) -> list[Compared]:
    """Plain decoding, each drafter alone and `auto`, at each concurrency."""
    config_of = partial(bench_config, model_name, "auto", threads, max(concurrency))
    model = load_model(config_of(OFF))
    drafters = [name for name in usual_methods(model) if name not in (OFF, AUTO, "ngram")]
    configs = {OFF: OFF, **{name: name for name in drafters}, AUTO: ",".join([AUTO, *drafters])}
    makers = {label: partial(_engine, config_of(config), model) for label, config in configs.items()}
    compared, pricing_tasks = _tasks(model)
    meter = PassMeter(model.backend, model.config.max_position)
    results: list[Compared] = []
    for profile in map(closed, concurrency):
        tasks = compared[: max(MIN_TASKS, profile.concurrency or 1)]
        real, costs = _measure(makers, meter, tasks, pricing_tasks, profile, on_turn)
        results += _compare(makers, real, costs, config_of(OFF).max_num_batched_tokens, tasks)
    return results


def _measure(
    makers: Mapping[str, Callable[[], Engine]],
    meter: PassMeter,
    tasks: Sequence[Task],
    pricing_tasks: Sequence[Task],
    profile: Profile,
    on_turn: OnTurn,
) -> tuple[Runs, Mapping[str, CostModel]]:
    """All methods' turns and the costs of their steps, interleaved in slices so that noise affects both."""
    watched: dict[str, list[TimedStep]] = {label: [] for label in makers}
    disturbances = Disturbances()
    courses: dict[str, Slices] = {"passes": meter.slices()}
    for label, make in makers.items():
        first = EngineRunner(make())
        first.run(pricing_tasks[:1], ONE_BY_ONE)  # compile everything, and let `auto` learn its drafters
        first.close()
        courses[label] = EngineRunner(make(), disturbances).slices(tasks, profile)
        courses[f"costs of {label}"] = watching(
            make(), pricing_tasks, disturbances, watched[label], again=lambda: not all(turns.values())
        )
    turns: dict[Key, list[list[Turn]]] = {(COLD, label): [] for label in makers}
    for label, turn in in_slices(courses, random.Random(0)):
        on_turn(f"{profile.label}: {label}")
        if label in makers:
            turns[COLD, label] = [[turn]]
    return Runs([tasks], profile, turns), measure_costs(meter.costs(), watched, _alone(makers))


def _compare(
    makers: Mapping[str, Callable[[], Engine]],
    real: Runs,
    costs: Mapping[str, CostModel],
    max_num_batched_tokens: int,
    tasks: Sequence[Task],
) -> list[Compared]:
    """The simulated results beside the measured ones."""
    profile = real.profile
    drafters = {name: _acceptances(real, name) for name in _alone(makers)}
    answers = _answers(real, OFF)
    world = World(costs, drafters, max_num_batched_tokens)
    methods = [
        Method(label, label, parse_speculative_config(label).default_plan.budget)
        if label in drafters
        else Method(label)
        for label in makers
    ]
    results = []
    for method, row in zip(methods, rows("check", real), strict=True):
        turns = []
        for repeat in range(REPEATS):
            again = [
                replace(task, token_ids=[0] * len(task.token_ids), params=_params(number, answer.num_tokens))
                for number, (task, answer) in enumerate(zip(tasks, answers, strict=True), repeat * len(tasks))
            ]
            turns.append(simulated_turn(world, method, again, profile, Counter()))
        simulated = [answer for turn in turns for answer in turn.answers]
        tokens = sum(answer.num_tokens for answer in simulated)
        passes = sum(len(answer.gains) - 1 for answer in simulated)
        results.append(
            Compared(
                concurrency=profile.concurrency or 1,
                method=method.label,
                measured=row.tokens_per_second,
                simulated=tokens / sum(turn.seconds for turn in turns),
                measured_length=row.tokens_per_pass or 1.0,
                simulated_length=(tokens - len(simulated)) / passes,
            )
        )
    return results


def _alone(methods: Iterable[str]) -> list[str]:
    """The methods with exactly one drafter."""
    return [name for name in methods if name not in (OFF, AUTO)]


def acceptance_of(answer: Answer) -> Acceptance | None:
    """The acceptance of an answer with a draft in every pass; None if nothing was drafted."""
    counts, asked = answer.speculative, len(answer.gains) - 1
    if asked < 1 or not counts.drafts_per_position:
        return None
    accepted = [count / asked for count in counts.accepted_per_position]
    drafted = [min(1.0, count / asked) for count in counts.drafts_per_position]
    return Acceptance(tuple(accepted), tuple(map(max, drafted, accepted)))


def _acceptances(runs: Runs, method: str) -> list[Acceptance]:
    """Of each request, in order."""
    return [acceptance_of(answer) or Acceptance((0.0,), (0.0,)) for answer in _answers(runs, method)]


def _answers(runs: Runs, method: str) -> list[Answer]:
    """Of the first round, in the order of the tasks."""
    return [answer for turn in runs.turns[COLD, method][0] for answer in turn.answers]


def _tasks(model: LoadedModel) -> tuple[list[Task], list[Task]]:
    """Prompts of all built-in workloads, interleaved, as one segment: to compare, and to measure costs."""
    workloads = [load_workload(name, None, ANSWER).prompts for name in BUILT_IN]
    prompts = [prompt for some in zip(*workloads, strict=False) for prompt in some]
    tasks = [
        Task(prompt.id, "check", prompt.token_ids(model.tokenizer), _params(number, ANSWER, False))
        for number, prompt in enumerate(prompts)
    ]
    return tasks[:-PRICING_TASKS], tasks[-PRICING_TASKS:]


def _params(number: int, tokens: int, ignore_eos: bool = True) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=ignore_eos, seed=number)


def _engine(config: EngineConfig, model: LoadedModel) -> Engine:
    return build_engine(config, model).engine
