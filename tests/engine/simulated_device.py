"""A device of known times behind a real engine and a real controller, on a clock of its own.

The host takes time for every pass, passes queue on the device, and reading one waits for it. So runs
are host-bound or device-bound as on a GPU, and every run is the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.backends.async_decoding import DecodeOutput, DeviceDraft, NgramLookup, SlotInits
from paceline.backends.base import Backend
from paceline.control.acceptance.chains import ChainAcceptance
from paceline.control.auto import AutoController
from paceline.control.controller import Controller, FixedController
from paceline.control.cost import StepCosts
from paceline.control.planner.arms import Arm, device_arms, prior_acceptance
from paceline.control.planner.device import DevicePlanner
from paceline.core.arrays import Int32Array
from paceline.core.forward import ForwardBatch, ForwardOutput, KVPool
from paceline.core.params import SamplingParams
from paceline.core.request import Request, SamplingNeeds
from paceline.core.trees import DraftPlan, DraftTrees
from paceline.draft.base import Drafter, TextDrafts
from paceline.engine.admission import Limits
from paceline.engine.engine import Engine
from tests.toy_tokenizer import VOCAB, ToyTokenizer

HEAD_LENGTHS = (2, 3, 5, 7)
SLOTS, LONGEST = 64, 4096
TOKEN = 5  # the only one that is ever sampled


@dataclass
class Machine:
    """Seconds of everything, and the clock."""

    # of a decode pass, by requests, verified tokens of each and passes of the head, when nothing else runs
    device_pass: Callable[[int, int, int], float]
    slower: float = 0.0  # seconds that a pass in traffic takes longer, per request: contexts are not empty
    per_row: float = 1.5e-6  # of a prefill, on the device
    catch_up: float = 0.2e-6  # per token of a head's catching up, on the device and on the host each
    host_pass: float = 0.15e-3  # of the host, per pass
    host_request: float = 4e-6  # and per request of a pass
    host_drafted: float = 0.5e-6  # and per request with a draft
    now: float = 0.0
    busy_until: float = 0.0  # of the device

    def queue(self, seconds: float) -> float:
        """The time at which work of this length ends if it is launched now."""
        self.busy_until = max(self.busy_until, self.now) + seconds
        return self.busy_until

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)


def small_gpu_pass(requests: int, length: int, by_head: int) -> float:
    """About the passes of a 135M model on an H200."""
    return 0.56e-3 + 0.045e-3 * by_head + 2.0e-6 * requests * (1 + length)


def lengths_of(draft: DeviceDraft | None) -> tuple[int, int]:
    """Verified tokens of a request, and those that a head can draft."""
    if draft is None:
        return 0, 0
    return draft.length, draft.length if draft.network_length is None else draft.network_length


@dataclass
class SimulatedPool:
    num_pages: int
    bytes_per_page: int = 1


@dataclass
class SimulatedDevice(Backend):
    """A backend, its decoder and a drafter that drafts there; what is accepted is drawn at random."""

    machine: Machine
    chance: Callable[[int], float]  # of each drafted token, by the number of the request's slot
    copies: Callable[[int], bool]  # whether the request in a slot repeats its text: all lookups are right
    name: str = "simulated"
    batch_invariant: bool = True
    chooses: bool = True
    page_size: int = 16
    max_rows: int = 2048
    supported_sampling: SamplingNeeds = SamplingNeeds.NOTHING
    supports_lookup: bool = True
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def __post_init__(self) -> None:
        self._unread: deque[tuple[float, DecodeOutput]] = deque()

    def make_pool(self, num_pages: int) -> KVPool:
        return SimulatedPool(num_pages)

    def bytes_per_page(self) -> int:
        return 1

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        return self.begin(batch)()

    def begin(self, batch: ForwardBatch) -> Callable[[], ForwardOutput]:
        machine, count = self.machine, 0 if batch.choices is None else len(batch.choices.rows)
        machine.now += machine.host_pass + machine.host_request * batch.num_requests
        done = machine.queue(machine.per_row * batch.num_rows)

        def wait() -> ForwardOutput:
            machine.wait(done)
            return ForwardOutput(np.empty((0, VOCAB), np.float32), None, np.full(count, TOKEN, np.int32))

        return wait

    def move(self, pool: KVPool, source: Int32Array, destination: Int32Array) -> None:
        raise AssertionError("chains stay in place")

    def make_async_decoder(self, *_: object) -> SimulatedDevice:
        return self

    # the decoder

    def join(self, requests: SlotInits) -> None:
        return

    def write_texts(self, slots: Sequence[int], texts: Sequence[Int32Array]) -> None:
        return

    def launch(
        self,
        slots: Sequence[int],
        page_tables: Int32Array,
        draft: DeviceDraft | None,
        host_drafts: Int32Array | None = None,
    ) -> None:
        machine, (length, by_head) = self.machine, lengths_of(draft)
        drafted = machine.host_drafted if length else 0.0
        machine.now += machine.host_pass + (machine.host_request + drafted) * len(slots)
        seconds = machine.device_pass(1 << (len(slots) - 1).bit_length(), length, by_head)
        done = machine.queue(seconds + machine.slower * len(slots))
        chances = np.array([self.chance(slot) for slot in slots])
        right = self.rng.random((len(slots), by_head)) < chances[:, None]
        counts = 1 + np.cumprod(right, axis=1).sum(axis=1)
        found = None
        if draft is not None and draft.look_up is not None:
            found = np.array([length if self.copies(slot) else 0 for slot in slots], dtype=np.int32)
            counts = np.where(found > 0, 1 + found, counts)
        tokens = np.full((len(slots), 1 + length), TOKEN, np.int32)
        self._unread.append((done, DecodeOutput(tokens, counts.astype(np.int32), found=found)))

    def read(self) -> DecodeOutput:
        done, output = self._unread.popleft()
        self.machine.wait(done)
        return output

    def skip(self) -> None:
        self._unread.popleft()

    def drop(self) -> None:
        self._unread.clear()

    def prepare(self, *arguments: object) -> Mapping[int, float]:  # type: ignore[override]
        if len(arguments) > 1:  # of the backend
            return {}
        (draft,) = arguments
        lengths = lengths_of(draft if isinstance(draft, DeviceDraft) else None)
        return {1 << power: self.machine.device_pass(1 << power, *lengths) for power in range(7)}


class SimulatedHead(Drafter):
    """A head that drafts on the device."""

    name = "head"
    attaches = True
    drafts_on_host = drafts_trees = False

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._known: set[Request] = set()
        self.device = self

    @property
    def catch_up_seconds(self) -> float | None:
        return self._machine.catch_up

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        return DraftTrees.chains([()] * len(requests))

    def device_draft(self, plan: DraftPlan) -> DeviceDraft | None:
        return DeviceDraft(plan.levels, runner=self)  # type: ignore[arg-type]

    def attach(self, requests: Sequence[Request]) -> bool:
        self.prefill_ahead(requests)
        return True

    def prefill_ahead(self, requests: Sequence[Request]) -> None:
        tokens = sum(len(request.token_ids) for request in requests if request not in self._known)
        self._known.update(requests)
        self._machine.now += self._machine.catch_up * tokens
        self._machine.queue(self._machine.catch_up * tokens)

    def detach(self, requests: Sequence[Request], unsure: int) -> None:
        self._known.difference_update(requests)


class SimulatedLookup(Drafter):
    """Prompt lookup, which the device does."""

    name = "ngram"

    def __init__(self) -> None:
        self.device = TextDrafts(NgramLookup(3, 8), optimistic=False)

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        return DraftTrees.chains([()] * len(requests))


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
    engine = Engine(
        SimulatedDevice(machine, chance, copies),
        ToyTokenizer(),
        Limits(VOCAB, LONGEST, SLOTS, 2048),
        num_pages=SLOTS * LONGEST // 16,
        enable_prefix_caching=False,
        controller=controller,
        drafters={"head": SimulatedHead(machine), "ngram": SimulatedLookup()},
        clock=lambda: machine.now,
    )
    engine.prepare()
    return engine


def seconds_of(
    engine: Engine, machine: Machine, requests: int, prompt: int, outputs: Callable[[int], int]
) -> float:
    """Seconds until a batch of requests has ended, of prompts and outputs of these tokens."""
    start = machine.now
    for number in range(requests):
        params = SamplingParams(max_tokens=outputs(number), ignore_eos=True, temperature=0)
        engine.add_request([TOKEN] * prompt, params)
    while engine.has_unfinished:
        engine.step()
    return machine.now - start
