"""A simulated device whose drafts are accepted at random, and the controllers that are tested on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.control.replay import device as simulation
from benchmarks.control.replay.device import TOKEN, Machine, SimulatedDevice
from paceline.backends.async_decoding import DecodeOutput, DeviceDraft
from paceline.control.acceptance.chains import ChainAcceptance
from paceline.control.auto import AutoController
from paceline.control.controller import Controller, FixedController
from paceline.control.cost import StepCosts
from paceline.control.planner.arms import Arm, device_arms, prior_acceptance
from paceline.control.planner.device import DevicePlanner
from paceline.core.params import SamplingParams
from paceline.core.trees import DraftPlan
from paceline.engine.engine import Engine
from tests.toy_tokenizer import ToyTokenizer

HEAD_LENGTHS = (2, 3, 5, 7)


def lengths_of(draft: DeviceDraft | None) -> tuple[int, int]:
    """Verified tokens of a request, and those that a head can draft."""
    if draft is None:
        return 0, 0
    return draft.length, draft.length if draft.network_length is None else draft.network_length


def small_gpu_pass(requests: int, draft: DeviceDraft | None) -> float:
    """About the passes of a 135M model on an H200."""
    length, by_head = lengths_of(draft)
    return 0.56e-3 + 0.045e-3 * by_head + 2.0e-6 * requests * (1 + length)


@dataclass
class RandomDevice(SimulatedDevice):
    """What is accepted is drawn at random."""

    chance: Callable[[int], float] = lambda slot: 0.5  # of each drafted token, by the request's slot
    copies: Callable[[int], bool] = lambda slot: (
        False
    )  # whether a request repeats its text: lookups are right
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def outcome(self, slots: Sequence[int], draft: DeviceDraft | None) -> DecodeOutput:
        length, by_head = lengths_of(draft)
        chances = np.array([self.chance(slot) for slot in slots])
        right = self.rng.random((len(slots), by_head)) < chances[:, None]
        counts = 1 + np.cumprod(right, axis=1).sum(axis=1)
        found = None
        if draft is not None and draft.look_up is not None:
            found = np.array([length if self.copies(slot) else 0 for slot in slots], dtype=np.int32)
            counts = np.where(found > 0, 1 + found, counts)
        tokens = np.full((len(slots), 1 + length), TOKEN, np.int32)
        return DecodeOutput(tokens, counts.astype(np.int32), found=found)


def cascades() -> AutoController:
    """A controller of lookups and a head, as `auto` has them for a model with a shipped head."""
    longest = {"ngram": 15, "head": 7}
    planner = DevicePlanner(device_arms("head", "ngram", longest), prior_acceptance(longest, ["head"], {}))
    plans = {name: DraftPlan(name, most) for name, most in longest.items()}
    return AutoController(plans, StepCosts([1, 64], [1e-3, 2e-3]), device=planner)


def auto(prior: float) -> AutoController:
    """A controller that expects this chance of each drafted token."""
    arms = [Arm(DraftPlan("head", length), attaches=True) for length in HEAD_LENGTHS]
    acceptance = {("head", greedy): ChainAcceptance(7, [prior], 12) for greedy in (True, False)}
    return AutoController(
        {"head": DraftPlan("head", 7)},
        StepCosts([1, 64], [1e-3, 2e-3]),
        device=DevicePlanner(arms, acceptance),
    )


def fixed(length: int) -> Controller:
    return FixedController(DraftPlan("head", length) if length else DraftPlan())


def simulated_engine(
    machine: Machine,
    chance: Callable[[int], float],
    controller: Controller,
    copies: Callable[[int], bool] = lambda slot: False,
) -> Engine:
    """An engine on this machine, warmed up."""
    device = RandomDevice(machine, chance=chance, copies=copies)
    return simulation.simulated_engine(device, controller, tokenizer=ToyTokenizer())


def seconds_of(
    engine: Engine, machine: Machine, requests: int, prompt: int, outputs: Callable[[int], int]
) -> float:
    """Seconds until a batch of requests has ended, of prompts and outputs of these tokens."""
    params = [
        SamplingParams(max_tokens=outputs(number), ignore_eos=True, temperature=0)
        for number in range(requests)
    ]
    return simulation.seconds_of(engine, machine, [prompt] * requests, params)
