"""A device of known times behind a real engine and a real controller, on a clock of its own.

The host takes time for every pass, passes queue on the device, and reading one waits for it. So runs
are host-bound or device-bound as on a GPU, and every run is the same.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.backends.async_decoding import DecodeOutput, DeviceDraft, DraftedRows, NgramLookup, SlotInits
from paceline.backends.base import Backend
from paceline.control.controller import Controller
from paceline.core.arrays import Int32Array
from paceline.core.detokenizer import TextTokenizer
from paceline.core.forward import ForwardBatch, ForwardOutput, KVPool
from paceline.core.params import SamplingParams
from paceline.core.request import Request, SamplingNeeds
from paceline.core.trees import DraftPlan, DraftTrees
from paceline.draft.base import Drafter
from paceline.draft.device import TextDrafts
from paceline.engine.admission import Limits
from paceline.engine.engine import Engine, target_cache

SLOTS, LONGEST = 64, 4096
VOCAB, END, TOKEN = 97, 0, 5  # tokens of the vocabulary; the one that ends an output, and the other one


@dataclass
class Machine:
    """Seconds of everything, and the clock."""

    device_pass: Callable[[int, DeviceDraft | None], float]  # for a number of requests, alone
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


@dataclass
class SimulatedPool:
    num_pages: int
    bytes_per_page: int = 1


@dataclass
class SimulatedDevice(Backend):
    """A backend and its decoder."""

    machine: Machine
    name: str = "simulated"
    batch_invariant: bool = True
    supports_features: bool = False
    chooses: bool = True
    page_size: int = 16
    max_rows: int = 2048
    supported_sampling: SamplingNeeds = SamplingNeeds.NOTHING
    supports_lookup: bool = True
    _unread: deque[tuple[float, DecodeOutput]] = field(default_factory=deque)

    @abstractmethod
    def outcome(self, slots: Sequence[int], draft: DeviceDraft | None) -> DecodeOutput:
        """What the next pass over these slots gives."""

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
        return  # there are no keys and values

    def first_layers(self, count: int) -> Backend:
        raise AssertionError("nothing drafts with the first layers")

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
        machine = self.machine
        drafted = 0.0 if draft is None else machine.host_drafted
        machine.now += machine.host_pass + (machine.host_request + drafted) * len(slots)
        seconds = machine.device_pass(1 << (len(slots) - 1).bit_length(), draft)
        done = machine.queue(seconds + machine.slower * len(slots))
        self._unread.append((done, self.outcome(slots, draft)))

    def has_room(self, draft: DeviceDraft) -> bool:
        return True

    def drafted(self) -> DraftedRows:
        raise AssertionError("no pass waits for masks")

    def send_masks(self, rows: Int32Array, masks: Sequence[Int32Array]) -> None:
        raise AssertionError("no pass waits for masks")

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
        known = draft if isinstance(draft, DeviceDraft) else None
        most = SLOTS if known is None or known.max_requests is None else min(SLOTS, known.max_requests)
        return {1 << power: self.machine.device_pass(1 << power, known) for power in range(most.bit_length())}


class SimulatedHead(Drafter):
    """A head that drafts on the device."""

    attaches = drafts_trees = True
    drafts_on_host = False

    def __init__(self, machine: Machine, name: str) -> None:
        self.name = name
        self._machine = machine
        self._known: set[Request] = set()
        self.device = self

    @property
    def catch_up_seconds(self) -> float | None:
        return self._machine.catch_up

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        return DraftTrees.chains([()] * len(requests))

    def device_draft(self, plan: DraftPlan) -> DeviceDraft | None:
        nodes = plan.nodes if plan.branching > 1 else 0
        runner = self  # anything: it tells the engine that a head drafts
        return DeviceDraft(plan.levels, runner, branching=plan.branching, nodes=nodes)  # type: ignore[arg-type]

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


class NoTexts:
    """A tokenizer for outputs that are never read."""

    eos_ids = frozenset({END})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return []

    def token_bytes(self, token_id: int) -> bytes:
        return b"-"

    def is_special(self, token_id: int) -> bool:
        return token_id == END


def simulated_engine(
    device: SimulatedDevice,
    controller: Controller,
    head: str = "head",
    tokenizer: TextTokenizer | None = None,
) -> Engine:
    """An engine on this device, warmed up, with a head of this name and prompt lookup."""
    machine = device.machine
    limits = Limits(VOCAB, LONGEST, SLOTS, 2048)
    engine = Engine(
        device,
        tokenizer or NoTexts(),
        limits,
        target_cache(device, limits, SLOTS * LONGEST // 16, enable_prefix_caching=False),
        controller=controller,
        drafters={head: SimulatedHead(machine, head), "ngram": SimulatedLookup()},
        clock=lambda: machine.now,
    )
    engine.prepare()
    return engine


def seconds_of(
    engine: Engine, machine: Machine, prompts: Sequence[int], params: Sequence[SamplingParams]
) -> float:
    """Seconds until a batch of requests has ended, whose prompts have these lengths."""
    start = machine.now
    for prompt, own in zip(prompts, params, strict=True):
        engine.add_request([TOKEN] * prompt, own)
    while engine.has_unfinished:
        engine.step()
    return machine.now - start
