"""The grid of `auto` on recorded answers: the real engine and controller, with the times of an H200's passes.

What a draft brings at a position of an answer was recorded (recording.py), what a lookup finds follows from
the text. The order of the cells and their prompts are random: several orders say how much of a figure is
luck.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import numpy as np

from benchmarks.control.replay.device import (
    END,
    TOKEN,
    Machine,
    SimulatedDevice,
    seconds_of,
    simulated_engine,
)
from benchmarks.control.replay.recording import HEAD, RecordedAnswer, Recording
from paceline.backends.async_decoding import DecodeOutput, DeviceDraft, SlotInits
from paceline.bench.timing import OnTurn
from paceline.control.auto import AutoController
from paceline.control.config import CONFIG
from paceline.control.controller import Controller, FixedController, Load, StepPlan
from paceline.control.cost import StepCosts
from paceline.control.planner.arms import device_arms, prior_acceptance
from paceline.control.planner.device import DevicePlanner
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.tree_shapes import ROOT, static_shape
from paceline.core.trees import DraftPlan
from paceline.draft.lookup.ngram_index import copy_longest
from paceline.draft.lookup.occurrences import Occurrences
from paceline.engine.executors.device_plans import MAX_TREE_ROWS

CONCURRENCIES = (1, 4, 16, 64)
GROUPS = {1: 4, 4: 4, 16: 2, 64: 1}  # of prompts in a cell, by concurrency
ROUNDS = 3
LONGEST = {"ngram": 15, HEAD: 7}  # tokens
# Milliseconds of a pass of SmolLM2-135M with its head on an H200, by requests
# (docs/lab/2026-11-19-auto-on-gpu.md, "What a lookup is worth beside a head")
CHAIN_MS = {  # by drafted tokens, and levels of these that the head drafts
    (0, 0): {1: 0.648, 2: 0.66, 4: 0.665, 8: 0.705, 16: 0.634, 32: 0.71, 64: 0.947},
    (2, 2): {1: 0.737, 2: 0.757, 4: 0.75, 8: 0.8, 16: 0.838, 32: 1.022, 64: 1.405},
    (3, 3): {1: 0.78, 2: 0.795, 4: 0.82, 8: 0.84, 16: 0.935, 32: 1.09, 64: 1.566},
    (5, 5): {1: 0.863, 2: 0.862, 4: 0.91, 8: 0.95, 16: 1.11, 32: 1.328, 64: 2.137},
    (7, 7): {1: 0.946, 2: 0.959, 4: 0.959, 8: 1.106, 16: 1.232, 32: 1.534, 64: 2.137},
    (15, 3): {1: 0.813, 2: 0.837, 4: 0.972, 8: 1.094, 16: 1.377, 32: 1.93, 64: 3.0},  # 64: extrapolated
}
TREE_MS = {  # by nodes
    7: {1: 0.831, 2: 0.828, 4: 0.89, 8: 1.128, 16: 1.26},
    15: {1: 0.877, 2: 0.92, 4: 1.163, 8: 1.28},  # of 5 levels
}
LEVEL_MS = 0.037  # of each level that the head drafts
LOOKUP_MS = 0.003  # of a lookup


# what the device waits for the host, in seconds
SWITCH, CHOICE, END_OF_REQUESTS = 0.4e-3, 0.15e-3, 0.3e-3


def h200_pass(requests: int, draft: DeviceDraft | None) -> float:
    """Seconds of a pass of SmolLM2-135M with its head."""
    if draft is None:
        return CHAIN_MS[0, 0][requests] / 1e3
    levels = 0 if draft.from_texts else draft.network_length or draft.length
    if draft.nodes:
        ms = TREE_MS[draft.nodes][requests] - LEVEL_MS * (5 - levels if draft.nodes == 15 else 0)
    else:  # as many rows, and more levels or fewer
        tokens, known = next(key for key in CHAIN_MS if key[0] >= draft.length)
        ms = CHAIN_MS[tokens, known][requests] + LEVEL_MS * (levels - known)
    return (ms + (LOOKUP_MS if draft.look_up is not None else 0.0)) / 1e3


@dataclass(frozen=True, eq=False)
class Answer:
    """A recorded answer, and what drafts would bring at each of its positions."""

    recorded: RecordedAnswer

    @cache  # noqa: B019  # as many as there are answers
    def looked_up(self, shortest: int, longest: int) -> list[tuple[int, int]]:
        """[tokens] How many tokens a lookup finds, and how many of these are right."""
        prompt, tokens = self.recorded.prompt, self.recorded.tokens
        index = Occurrences(range(shortest, longest + 1), len(prompt) + len(tokens))
        index.append(prompt)
        found, chain = [], np.empty(LONGEST["ngram"], np.int32)
        for position, token in enumerate(tokens):
            size = copy_longest(index.table, index.levels, index.oldest, index.end, chain)
            right = 0
            while right < min(size, len(tokens) - position) and chain[right] == tokens[position + right]:
                right += 1
            found.append((size, right))
            index.append([token])
        return found

    @cache  # noqa: B019
    def by_tree(self, nodes: int, branching: int, levels: int) -> list[list[int]]:
        """[tokens] The nodes of a head's tree whose tokens are right."""
        shape = static_shape(nodes, branching, levels)
        return [_accepted(shape, ranks) for ranks in self.recorded.ranks]

    def accepted(self, position: int, draft: DeviceDraft) -> tuple[int, list[int]]:
        """How many tokens are looked up there, and the drafted nodes whose tokens are right."""
        found = right = 0
        if draft.look_up is not None:
            found, right = self.looked_up(draft.look_up.shortest, draft.look_up.longest)[position]
            found, right = min(found, draft.length), min(right, draft.length)
        if found or draft.from_texts:
            return found, [*range(right)]
        levels = draft.network_length or draft.length
        return 0, self.by_tree(draft.nodes or levels, draft.branching, levels)[position]


def _accepted(shape: dict[int, list[int]], ranks: str) -> list[int]:
    """The path of nodes in a tree of this shape that have the tokens of these ranks."""
    path, node = [], ROOT
    for rank in map(int, ranks):
        children = shape.get(node, [])
        if rank >= len(children):
            break
        node = children[rank]
        path.append(node)
    return path


@dataclass
class ReplayDevice(SimulatedDevice):
    """A device on which requests with the seed i get the i-th answer."""

    answers: Sequence[Answer] = ()
    _slots: dict[int, tuple[Answer, int]] = field(default_factory=dict)  # answers, and how far they are
    _last: tuple[DeviceDraft | None, int] = (None, 0)  # draft and requests of the last pass

    def join(self, requests: SlotInits) -> None:
        for slot, seed, length in zip(requests.slots, requests.seeds, requests.lengths, strict=True):
            answer = self.answers[int(seed)]
            self._slots[int(slot)] = answer, int(length) + 1 - len(answer.recorded.prompt)

    def outcome(self, slots: Sequence[int], draft: DeviceDraft | None) -> DecodeOutput:
        self._wait_for_host(draft, len(slots))
        counts = np.ones(len(slots), np.int32)
        found = np.zeros(len(slots), np.int32)
        tokens = np.full((len(slots), 1 + (0 if draft is None else draft.length)), TOKEN, np.int32)
        nodes = np.zeros_like(tokens)
        for row, slot in enumerate(slots):
            answer, position = self._slots[slot]
            left = len(answer.recorded.tokens) - position
            if left <= 0:
                continue  # the request ends in a pass before
            if draft is not None:
                found[row], path = answer.accepted(position, draft)
                counts[row] = min(1 + len(path), left)
                nodes[row, 1 : 1 + len(path)] = [1 + node for node in path]
            if counts[row] == left and answer.recorded.ended:
                tokens[row, left - 1] = END
            self._slots[slot] = answer, position + int(counts[row])
        reads = draft is not None and draft.look_up is not None
        is_tree = draft is not None and draft.branching > 1
        return DecodeOutput(tokens, counts, found=found if reads else None, nodes=nodes if is_tree else None)

    def _wait_for_host(self, draft: DeviceDraft | None, requests: int) -> None:
        """The device waits where the plan or the requests change."""
        before, self._last = self._last, (draft, requests)
        if draft is not before[0]:
            self.machine.queue(SWITCH)
        if requests < before[1]:
            self.machine.queue(END_OF_REQUESTS)


class WaitedFor(AutoController):
    """`auto`; the device waits for each of its choices."""

    def __init__(self, machine: Machine, planner: DevicePlanner) -> None:
        plans = {name: DraftPlan(name, most) for name, most in LONGEST.items()}
        super().__init__(plans, StepCosts([1, 64], [1e-3, 2e-3]), device=planner)
        self._machine, self.planner = machine, planner

    def plan(self, running: Sequence[Request], load: Load) -> StepPlan:
        before = self.planner.choices
        step = super().plan(running, load)
        self._machine.queue(CHOICE * (self.planner.choices - before))
        return step


def auto(machine: Machine) -> Controller:
    """The controller of a model with a shipped head."""
    arms = device_arms(HEAD, "ngram", LONGEST, trees=True)
    return WaitedFor(machine, DevicePlanner(arms, prior_acceptance(LONGEST, [HEAD], {})))


class Replay:
    """An engine on recorded answers."""

    def __init__(self, answers: Sequence[Answer], plan: DraftPlan | None) -> None:
        """`plan`: of all requests; None: `auto`."""
        self.machine = Machine(h200_pass, per_row=0.6e-6, catch_up=0.1e-6)
        self.controller = auto(self.machine) if plan is None else FixedController(plan)
        self.answers = answers
        self._longest = max(len(answer.recorded.tokens) for answer in answers)
        device = ReplayDevice(self.machine, answers=answers)
        self.engine = simulated_engine(device, self.controller, HEAD)

    def seconds(self, group: Sequence[int], temperature: float) -> float:
        """Seconds of the answers of these numbers, asked at once."""
        recorded = [self.answers[number].recorded for number in group]
        params = [
            SamplingParams(
                max_tokens=self._longest if own.ended else len(own.tokens),
                seed=number,
                temperature=temperature,
            )
            for number, own in zip(group, recorded, strict=True)
        ]
        return seconds_of(self.engine, self.machine, [len(own.prompt) for own in recorded], params)


@dataclass(frozen=True)
class CellPlan:
    """A cell to replay: which answers are asked at once."""

    workload: str
    temperature: float
    concurrency: int
    groups: Sequence[Sequence[int]]


class ReplayGrid:
    """The cells of a recording, in random orders, for `auto` and fixed settings."""

    def __init__(self, recording: Recording) -> None:
        self.answers: list[Answer] = []
        self._numbers: dict[tuple[str, float], list[int]] = {}
        for key, recorded in recording.items():
            kept = [Answer(each) for each in recorded if len(each.tokens) > 1]
            self._numbers[key] = [*range(len(self.answers), len(self.answers) + len(kept))]
            self.answers += kept

    def cells(self, seed: int) -> list[CellPlan]:
        """All cells, in a random order, with random prompts."""
        chance, cells = random.Random(seed), []
        for (workload, temperature), numbers in self._numbers.items():
            for concurrency in CONCURRENCIES:
                size = min(concurrency, len(numbers))
                drawn = chance.sample(numbers, min(len(numbers), size * GROUPS[concurrency]))
                groups = [drawn[start : start + size] for start in range(0, len(drawn) - size + 1, size)]
                cells.append(CellPlan(workload, temperature, concurrency, groups))
        chance.shuffle(cells)
        return cells

    @cached_property
    def _fixed(self) -> dict[DraftPlan, Replay]:
        lengths = [DraftPlan(HEAD, length) for length in CONFIG.device_planner.head_lengths]
        trees = [DraftPlan(HEAD, *tree) for tree in CONFIG.device_planner.trees]
        plans = [DraftPlan(), DraftPlan("ngram", 7), *lengths, *trees]
        return {plan: Replay(self.answers, plan) for plan in plans}

    def fixed(self, cell: CellPlan) -> dict[str, list[float]]:
        """Seconds of the cell's groups, by fixed setting."""
        return {
            plan.label: [replay.seconds(group, cell.temperature) for group in cell.groups]
            for plan, replay in self._fixed.items()
            if plan.branching == 1 or cell.concurrency * (1 + plan.nodes) <= MAX_TREE_ROWS
        }

    def run(
        self, seed: int, on_turn: OnTurn = lambda _: None
    ) -> Iterable[tuple[CellPlan, list[list[float]]]]:
        """The cells in one order: the seconds of their groups with `auto`, in each round."""
        replay = Replay(self.answers, None)
        for cell in self.cells(seed):
            yield (
                cell,
                [[replay.seconds(group, cell.temperature) for group in cell.groups] for _ in range(ROUNDS)],
            )
            on_turn(f"{cell.workload} x{cell.concurrency}")
