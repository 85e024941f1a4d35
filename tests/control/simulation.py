"""A world of known costs and chances, stepped as the engine steps: no clock, the same every time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.control.controller import Controller, Load, StepPlan
from paceline.control.cost import StepCosts
from paceline.core.stats import DraftCall, DraftStats, ShadowStats, StepStats
from paceline.core.trees import PLAIN, DraftPlan, DraftTrees

MEASURED = (1, 2, 4, 8, 9, 16, 17, 32, 64)


def cpu_seconds(rows: float) -> float:
    """Of a pass on two cores: rows in tiles of 4, and expensive above 8."""
    tiles = -(-rows // 4)
    return 0.004 + 0.0005 * tiles + 0.0004 * rows + 0.0004 * max(0.0, rows - 8)


def gpu_seconds(rows: float) -> float:
    """Of a pass that reads weights until 64 rows, and then computes."""
    return 0.004 + 0.00001 * rows + 0.00004 * max(0.0, rows - 64)


def mixture_seconds(rows: float) -> float:
    """Of a pass of a mixture of 64 experts, 8 for each row: it reads the experts that any row chose."""
    return 0.001 + 0.024 * (1 - (1 - 8 / 64) ** rows) + 0.00001 * rows


@dataclass
class SimulatedDrafter:
    """Right with chance `right(step)` at each depth, and says so unless it `says` another chance.

    It drafts at all with chance `finds(step)`.
    """

    right: Callable[[int], float]
    seconds_per_call: float = 0.00003
    seconds_per_level: float = 0.0
    finds: Callable[[int], float] = lambda step: 1.0
    says: Callable[[int], float] | None = None

    def said(self, step: int, nodes: int, least: float) -> list[float]:
        """Chances of the paths of a chain, down to the first that is too small."""
        each = (self.says or self.right)(step)
        chances = [each ** (depth + 1) for depth in range(nodes)]
        return [chance for chance in chances if math.isnan(chance) or chance >= least]


@dataclass(frozen=True)
class SimulatedSampling:
    greedy: bool = True


@dataclass
class SimulatedCounts:
    num_accepted_draft_tokens: int = 0


@dataclass(eq=False)
class SimulatedRequest:
    request_id: str
    max_output: int
    segment: str = ""
    child: int = 0
    plan: DraftPlan | None = None
    num_pending: int = 1
    num_output: int = 0
    num_computed: int = 100
    shadow_depth: int = 0
    failed_drafters: set[str] = field(default_factory=set)
    sampling: SimulatedSampling = SimulatedSampling()
    speculative: SimulatedCounts = field(default_factory=SimulatedCounts)

    @property
    def finished(self) -> bool:
        return self.num_output >= self.max_output


@dataclass(frozen=True)
class SimulatedPart:
    request: SimulatedRequest
    plan: DraftPlan  # by which it was drafted for
    num_tokens: int = 1


@dataclass
class Step:
    tokens: int
    seconds: float
    nodes: list[int]  # [requests] that were verified
    drafters: list[str]  # [requests] who drafted


@dataclass
class World:
    """Requests of 150 tokens, one after the other in each place, and drafters for them."""

    drafters: Mapping[str, SimulatedDrafter]
    pass_seconds: Callable[[float], float] = cpu_seconds
    concurrency: Callable[[int], int] = lambda step: 1
    noise: float = 0.05  # of times
    seed: int = 0
    max_output: int = 150
    on_device: bool = False  # passes are planned before the one before them is observed

    def costs(self) -> StepCosts:
        """What a measurement at the start would have found."""
        return StepCosts(MEASURED, [self.pass_seconds(rows) for rows in MEASURED])

    def run(self, controller: Controller, steps: int) -> list[Step]:
        rng = np.random.default_rng(self.seed)
        running: list[SimulatedRequest] = []
        arrived = 0
        done = []
        before: tuple[StepPlan, StepStats] | None = None
        for step in range(steps):
            running = [request for request in running if request.num_output < request.max_output]
            while len(running) < self.concurrency(step):
                running.append(SimulatedRequest(str(arrived), self.max_output))
                arrived += 1
            running = running[: self.concurrency(step)]
            planned = controller.plan(running, Load(len(running), 0, on_device=self.on_device))
            if self.on_device:
                stats, nodes, names = self._device_step(step, running, planned, rng)
                if before is not None:
                    controller.observe(*before)
                before = planned, stats
            else:
                stats, nodes, names = self._step(step, running, planned, controller, rng)
                controller.observe(planned, stats)
            done.append(Step(stats.new_tokens, stats.total_time, nodes, names))
        return done

    def _device_step(
        self, step: int, running: Sequence[SimulatedRequest], planned: StepPlan, rng: np.random.Generator
    ) -> tuple[StepStats, list[int], list[str]]:
        """All requests have the same plan, and every row of it is computed, drafted or not."""
        plan = planned.plans[0]
        length, parts = plan.levels, [part for part in (plan, plan.second()) if part.budget]
        drafts, tokens = [], 0
        for request in running:
            accepted = 0
            for part in parts:
                drafter = self.drafters[part.drafter or ""]
                if rng.random() < drafter.finds(step):
                    while accepted < part.levels and rng.random() < drafter.right(step):
                        accepted += 1
                    facts = (request.request_id, request.segment, part.drafter, part.levels, part.levels)
                    drafts.append(DraftStats(*facts, accepted, path=tuple(range(accepted))))
                    break
            request.num_output += 1 + accepted
            tokens += 1 + accepted
        shadow = None if planned.shadow is None else self._shadowed(step, running, planned.shadow, rng)
        rows = len(running) * (1 + length)
        seconds = self.pass_seconds(rows)
        seconds += sum([part.levels * self.drafters[part.drafter].seconds_per_level for part in parts])
        stats = StepStats(
            requests=len(running),
            overlapped=True,
            plan=plan,
            rows=rows,
            new_tokens=tokens,
            drafts=tuple(drafts),
            shadow=shadow,
            forward_time=seconds * float(rng.lognormal(0.0, self.noise)),
        )
        return stats, [length] * len(running), [plan.label] * len(running)

    def _shadowed(
        self, step: int, running: Sequence[SimulatedRequest], plan: DraftPlan, rng: np.random.Generator
    ) -> ShadowStats:
        """How shadow drafts fare in a plain pass, in which each request gains one token."""
        drafter, length = self.drafters[plan.drafter or ""], plan.levels
        tries, hits = [0] * length, [0] * length
        for request in running[:8]:
            depth = request.shadow_depth
            if depth == length:  # the token behind a draft that was right
                request.shadow_depth = 0
                continue
            found = depth > 0 or rng.random() < drafter.finds(step)
            right = bool(found and rng.random() < drafter.right(step))
            tries[depth] += 1
            hits[depth] += right
            request.shadow_depth = depth + 1 if right else 0
        return ShadowStats(plan.drafter or "", tuple(tries), tuple(hits))

    def _step(
        self,
        step: int,
        running: Sequence[SimulatedRequest],
        planned: StepPlan,
        controller: Controller,
        rng: np.random.Generator,
    ) -> tuple[StepStats, list[int], list[str]]:
        sizes: dict[str, list[int]] = {}  # of drafts, by who was asked for them
        levels: dict[str, int] = {}  # that were looked at
        said: list[list[float]] = []
        names: list[str] = []
        known: dict[tuple[str, int, float], list[float]] = {}  # what drafters say to requests that ask alike
        for request, plan in zip(running, planned.plans, strict=True):
            asked: DraftPlan | None = plan
            own: list[float] = []
            name = ""
            while asked is not None and asked.drafter is not None:
                name, drafter = asked.drafter, self.drafters[asked.drafter]
                most = min(asked.budget, request.max_output - request.num_output - 1)
                own, question = [], (name, most, asked.least_chance)
                if rng.random() < drafter.finds(step):
                    if question not in known:
                        known[question] = drafter.said(step, most, asked.least_chance)
                    own = known[question]
                sizes.setdefault(name, []).append(len(own))
                levels[name] = max(levels.get(name, 0), min(len(own) + 1, most))
                asked = asked.otherwise if sum(own) < asked.enough else None
            said.append(own)
            names.append(name if own else "")
        verified = [len(own) for own in said]
        if any(verified) and type(controller).trim is not Controller.trim:
            plans = [DraftPlan(name, 1) if name else PLAIN for name in names]
            trees = DraftTrees.chains([range(nodes) for nodes in verified], said)
            trees = controller.trim(planned, list(map(SimulatedPart, running, plans)), trees)
            verified = np.diff(trees.offsets).tolist()
        chances = {name: self.drafters[name].right(step) for name in sizes}
        drafts, tokens, rows = [], 0, len(running)
        for request, name, nodes in zip(running, names, verified, strict=True):
            accepted = 0
            if nodes:
                right = chances[name]
                while accepted < nodes and rng.random() < right:
                    accepted += 1
                rows += nodes
                facts = (request.request_id, request.segment, name, nodes, nodes, accepted)
                drafts.append(DraftStats(*facts, path=tuple(range(accepted))))
            request.num_output += 1 + accepted
            request.speculative.num_accepted_draft_tokens += accepted
            tokens += 1 + accepted
        calls = [
            DraftCall(
                name,
                len(own),
                levels[name],
                sum(own),
                (self.drafters[name].seconds_per_call + levels[name] * self.drafters[name].seconds_per_level)
                * float(rng.lognormal(0.0, self.noise)),
            )
            for name, own in sizes.items()
        ]
        stats = StepStats(
            requests=len(running),
            rows=rows,
            attended=100 * rows,
            new_tokens=tokens,
            drafts=tuple(drafts),
            asked=frozenset((own.request_id, own.child) for own in running),
            forward_time=self.pass_seconds(rows) * float(rng.lognormal(0.0, self.noise)),
            draft_time=sum(call.seconds for call in calls),
            draft_calls=tuple(calls),
        )
        return stats, verified, names


def rate(steps: Sequence[Step]) -> float:
    """Tokens per second."""
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


class Always(Controller):
    """The same plan for every request."""

    def __init__(self, drafter: str | None, budget: int) -> None:
        self._plan = DraftPlan(drafter, budget) if budget else PLAIN

    def plan(self, running: Sequence[object], load: Load) -> StepPlan:
        return StepPlan([self._plan] * len(running))
