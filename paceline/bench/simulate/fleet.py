"""A fleet: simulated replicas behind a real routing policy, all in the same simulated time.

Each replica has the real scheduler, controller and prefix cache, and a clock of its own. The replica whose
clock is furthest behind steps next, unless a request arrives before that: so no step sees a request early,
and the router sees a request end only when the pass that ends it is over.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from paceline.bench.run.turns import Answer
from paceline.bench.simulate.costs import Call, CostModel, PassSize, ServedCosts, ServerCosts
from paceline.bench.simulate.prompts import FleetRequest
from paceline.bench.simulate.run import LEARNING, Method, World, simulated_engine
from paceline.bench.simulate.world import PAGE_SIZE, VOCABULARY, VirtualClock
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.draft.methods import AUTO
from paceline.engine.admission import Limits
from paceline.engine.engine import Engine
from paceline.errors import ConfigError
from paceline.kv.hashing import page_hashes
from paceline.scale.remote.routing import (
    LeastLoadedRouting,
    PrefixRouting,
    RandomRouting,
    Routing,
    RoutingOptions,
)

LEARNING_PROMPT = 512  # tokens, at most, of the requests that a controller learns from
POOLED = "pooled"  # instead of a policy: one replica with the memory and the speed of all


@dataclass(frozen=True)
class FleetRun:
    """What a fleet gave. Answers are in order of arrival and have no token but the first timed."""

    answers: list[Answer]
    seconds: float  # from the first arrival to the last end
    busy_seconds: list[float]  # [replica] seconds in which it computed
    requests: list[int]  # [replica] that it got
    cached_tokens: int  # prompt tokens found in prefix caches
    prompt_tokens: int
    preemptions: int
    reasons: Mapping[str, int]  # steps of all controllers by reason

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were cached."""
        return self.cached_tokens / self.prompt_tokens

    @property
    def utilization(self) -> float:
        """The share of the time that a replica computed, on average."""
        return sum(self.busy_seconds) / len(self.busy_seconds) / self.seconds


@dataclass
class Replica:
    """An engine, with a clock of its own."""

    name: str
    engine: Engine
    clock: VirtualClock
    busy_seconds: float = 0.0
    num_requests: int = 0

    def step(self, crowded: bool) -> list[Request]:
        """One step, while others compute or not. The requests that ended with it."""
        start = self.clock()
        with self.clock.crowding(crowded):
            deltas = self.engine.step()
        self.busy_seconds += self.clock() - start
        return [delta.request for delta in deltas if delta.request.finished]


@dataclass
class Fleet:
    """Replicas that were never used, and the policy that chooses among them."""

    replicas: list[Replica]
    routing: Routing
    reasons: Counter[str]
    server: ServerCosts = field(default_factory=ServerCosts)
    _busy: list[tuple[float, int]] = field(default_factory=list)  # heap of the times of next steps
    _ends: list[tuple[float, int]] = field(default_factory=list)  # heap of ends that the router has not seen
    _loads: dict[str, int] = field(default_factory=dict)  # requests, as the router sees them

    def run(self, requests: Sequence[FleetRequest]) -> FleetRun:
        """All answers."""
        start = max(replica.clock() for replica in self.replicas)  # they may have learned before
        for replica in self.replicas:
            replica.clock.advance(start - replica.clock())
        self._loads = {replica.name: 0 for replica in self.replicas}
        arrivals = [start + each.due + self.server.arrival_seconds(each.prompt_tokens) for each in requests]
        coming = deque(sorted(range(len(requests)), key=arrivals.__getitem__))
        sent: dict[int, Request] = {}
        while coming or self._busy:
            if coming and (not self._busy or arrivals[coming[0]] <= self._busy[0][0]):
                number = coming.popleft()
                sent[number] = self._send(number, requests[number], arrivals[number])
            else:
                self._step()
        return self._result({sent[number]: request for number, request in enumerate(requests)}, start)

    def _send(self, number: int, request: FleetRequest, now: float) -> Request:
        """The request, queued at the replica that the policy ranks first."""
        while self._ends and self._ends[0][0] <= now:
            self._loads[self.replicas[heappop(self._ends)[1]].name] -= 1
        token_ids = request.token_ids()
        hashes = page_hashes(token_ids, PAGE_SIZE)
        name = self.routing.rank(hashes, None, self._loads)[0]
        self.routing.record(name, hashes, None)
        self._loads[name] += 1
        index = next(index for index, replica in enumerate(self.replicas) if replica.name == name)
        replica = self.replicas[index]
        if not replica.engine.has_unfinished:
            replica.clock.advance(max(0.0, now - replica.clock()))
            heappush(self._busy, (replica.clock(), index))
        replica.num_requests += 1
        (queued,) = replica.engine.add_request(token_ids, _params(number, request.answer_tokens))
        return queued

    def _step(self) -> None:
        """A step of the replica that is furthest behind."""
        _, index = heappop(self._busy)
        replica = self.replicas[index]
        for _ in replica.step(crowded=bool(self._busy)):
            heappush(self._ends, (replica.clock(), index))
        if replica.engine.has_unfinished:
            heappush(self._busy, (replica.clock(), index))

    def _result(self, sent: Mapping[Request, FleetRequest], start: float) -> FleetRun:
        return FleetRun(
            answers=[_answer(request, start + asked.due) for request, asked in sent.items()],
            seconds=max(request.finished_time or 0.0 for request in sent) - start,
            busy_seconds=[replica.busy_seconds for replica in self.replicas],
            requests=[replica.num_requests for replica in self.replicas],
            cached_tokens=sum(request.num_cached_tokens for request in sent),
            prompt_tokens=sum(asked.prompt_tokens for asked in sent.values()),
            preemptions=sum(request.num_preemptions for request in sent),
            reasons=dict(self.reasons),
        )


def run_fleet(
    world: World, method: Method, num_replicas: int, routing: str, requests: Sequence[FleetRequest]
) -> FleetRun:
    """The requests through `num_replicas` replicas of the world's machine. `routing`: a key of ROUTINGS."""
    if routing == POOLED:
        world, num_replicas = _pooled(world, num_replicas), 1
    longest = check_lengths(world, requests)
    limits = Limits(VOCABULARY, longest + 1, world.max_num_seqs, world.max_num_batched_tokens)
    kv_tokens = world.max_num_seqs * longest if world.server_kv_tokens is None else world.server_kv_tokens
    num_pages = kv_tokens // PAGE_SIZE
    reasons: Counter[str] = Counter()
    replicas = []
    for number in range(num_replicas):
        clock = VirtualClock()
        costs = ServedCosts(world.costs[method.label], world.server, world.contention, clock.is_crowded)
        served = replace(world, costs={method.label: costs})
        engine = simulated_engine(served, method, clock, limits, num_pages, reasons, True)
        replicas.append(Replica(f"{number:06}", engine, clock))
        if method.label == AUTO:  # like a server that has run for a while: its controller knows its drafters
            _learn(engine, requests[:LEARNING])
    reasons.clear()
    return Fleet(replicas, ROUTINGS[routing](num_pages), reasons, world.server).run(requests)


def check_lengths(world: World, requests: Sequence[FleetRequest]) -> int:
    """The tokens of the longest request. ConfigError if the model's context has fewer."""
    longest = max(request.prompt_tokens + request.answer_tokens for request in requests)
    if world.max_model_len is not None and longest > world.max_model_len:
        raise ConfigError(
            f"--trace has a request of {longest:,} tokens, but the model's context has "
            f"{world.max_model_len:,}. Leave it out of the trace, or take another model."
        )
    return longest


ROUTINGS: Mapping[str, Callable[[int], Routing]] = {  # by the number of pages of a replica's KV cache
    "prefix": lambda num_pages: PrefixRouting(RoutingOptions(max_pages=num_pages)),
    "least-loaded": lambda _: LeastLoadedRouting(),
    "random": lambda _: RandomRouting(),
    POOLED: lambda _: LeastLoadedRouting(),
}


def _learn(engine: Engine, requests: Sequence[FleetRequest]) -> None:
    """Answer requests that have no prefix in common with the later ones."""
    for number, request in enumerate(requests):
        prompt = request.token_ids()[:LEARNING_PROMPT]
        engine.add_request(prompt, _params(number, request.answer_tokens), cache_salt="learning")
    while engine.has_unfinished:
        engine.step()


def _params(number: int, tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, seed=number)


def _answer(request: Request, arrival: float) -> Answer:
    if request.error is not None:
        raise request.error
    assert request.first_token_time is not None
    assert request.finished_time is not None
    first, end = request.first_token_time - arrival, request.finished_time - arrival
    return Answer([], request.num_output, (first,), end, speculative=request.speculative)


def _pooled(world: World, size: int) -> World:
    """One machine with the memory and the speed of `size` of them."""
    return replace(
        world,
        costs={label: _Faster(costs, size) for label, costs in world.costs.items()},
        max_num_batched_tokens=size * world.max_num_batched_tokens,
        server_kv_tokens=None if world.server_kv_tokens is None else size * world.server_kv_tokens,
        max_num_seqs=size * world.max_num_seqs,
    )


@dataclass(frozen=True)
class _Faster:
    """Costs of a machine that is `factor` times as fast: it does as many rows in the same time."""

    costs: CostModel
    factor: int

    def pass_seconds(self, size: PassSize) -> float:
        return self.costs.pass_seconds(size) / self.factor

    def overhead_seconds(self, size: PassSize) -> float:
        return self.costs.overhead_seconds(size) / self.factor

    def draft_seconds(self, call: Call) -> float:
        return self.costs.draft_seconds(call) / self.factor
