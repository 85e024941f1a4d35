"""What a server adds to its replicas' passes, measured: seconds per request, prompt token, pass and token.

Probes, equal requests at once, are sent to the real replicas and to simulated ones, whose passes take as long
as those of an engine alone on the machine. The difference is contention (replicas, ingress and clients share
cores, caches and memory) and the server (HTTP, JSON, the ingress).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from paceline.bench.run.speculation import OFF
from paceline.bench.run.turns import Answer
from paceline.bench.simulate.costs import Contention, ServerCosts, nonnegative_fit
from paceline.bench.simulate.fleet import run_fleet
from paceline.bench.simulate.prompts import FleetRequest, fleet_requests
from paceline.bench.simulate.run import Method, World
from paceline.bench.simulate.world import PAGE_SIZE, VOCABULARY
from paceline.bench.traffic.traces import Arrival

REPEATS = 6  # of each probe; the median counts
TOKENS = 24  # per answer
ALONE = (16, 64, 256, 768)  # tokens of the prompts of single requests
CACHED = (256, 768)  # of single requests whose prompt was sent before
TOGETHER = ((1, 16), (1, 256), (4, 16), (4, 64))  # requests for each replica at once, and their tokens
PAUSE = 60.0  # simulated seconds between two requests with the same prompt: longer than any answer
FIRST_PAGE = VOCABULARY**PAGE_SIZE // 2  # prompts share nothing with those of a trace


@dataclass(frozen=True)
class Kind:
    """What a probe consists of."""

    size: int  # requests at once
    prompt: int  # tokens of each
    cached: bool = False  # sent once before


@dataclass(frozen=True)
class Probe:
    """Requests that are sent at once. What is measured is how long they take."""

    kind: Kind
    requests: list[FleetRequest]


def probes(num_replicas: int, repeats: int = REPEATS) -> list[Probe]:
    """The probes, each several times: one request, also with a cached prompt, one for each replica, and four
    for each."""
    kinds = [Kind(1, prompt) for prompt in ALONE] + [Kind(1, prompt, True) for prompt in CACHED]
    kinds += [Kind(count * num_replicas, prompt) for count, prompt in TOGETHER]
    each = [Arrival(0.0, kind.prompt, TOKENS) for kind in kinds * repeats for _ in range(kind.size)]
    requests = iter(replace(request, pages=FIRST_PAGE + request.pages) for request in fleet_requests(each))
    return [Probe(kind, [next(requests) for _ in range(kind.size)]) for kind in kinds * repeats]


def served_world(
    world: World, num_replicas: int, sent: Sequence[Probe], measured: Sequence[Sequence[Answer]]
) -> World:
    """The simulated world with the measured server times and contention.

    A request alone, compared with one on each replica, shows the contention; the rest is the server. A prompt
    that is cached shows what its tokens cost before they are computed, others also what computing adds.
    """
    took: dict[Kind, list[tuple[float, float]]] = defaultdict(list)
    for probe, answers in zip(sent, measured, strict=True):
        took[probe.kind].append(_means(answers))
    kinds = {probe.kind: probe.requests for probe in sent}
    first, each = np.median([took[kind] for kind in kinds], axis=1).T  # [kinds] to the first token, per token
    medians = dict(zip(kinds, zip(first, each, strict=True), strict=True))
    slower = _contention(num_replicas, medians)
    world = replace(world, contention=slower)
    simulated = [_simulated(world, num_replicas, kind, requests) for kind, requests in kinds.items()]
    first_alone, each_alone, computed = np.array(simulated).T
    sizes, prompts = np.array([(kind.size, kind.prompt) for kind in kinds]).T
    decoding = np.where(sizes > 1, slower.decoding, 1.0)
    per_pass = decoding[:, None] * np.stack([np.ones(len(kinds)), np.maximum(1.0, sizes / num_replicas)], 1)
    step, token = nonnegative_fit(per_pass, each - each_alone, each)
    unqueued = sizes <= num_replicas  # the first passes are theirs alone
    computing = np.where(sizes > 1, slower.prompts, 1.0)
    passes = np.ceil(computed / world.max_num_batched_tokens)
    waited = first - first_alone - passes * computing * (step + token)
    terms = np.stack([np.ones(len(kinds)), prompts, computing * computed], 1)
    request, prompt_token, row = nonnegative_fit(terms[unqueued], waited[unqueued], first[unqueued])
    return replace(world, server=ServerCosts(*map(float, (request, prompt_token, step, token, row))))


def _simulated(
    world: World, num_replicas: int, kind: Kind, requests: Sequence[FleetRequest]
) -> tuple[float, float, int]:
    """Without a server: seconds to the first token and per token, and prompt tokens that each computes."""
    before = list(requests) if kind.cached else []
    later = [replace(request, due=PAUSE) for request in requests] if kind.cached else list(requests)
    run = run_fleet(world, Method(OFF), num_replicas, "prefix", before + later)
    return *_means(run.answers[len(before) :]), kind.prompt - run.cached_tokens // kind.size


def _contention(num_replicas: int, medians: Mapping[Kind, tuple[float, float]]) -> Contention:
    """How much longer a request takes beside one on each other replica than alone: per prompt token, of which
    probes have different numbers, and per token."""
    if num_replicas == 1:
        return Contention()
    prompts = sorted(kind.prompt for kind in medians if kind.size == num_replicas)
    short, long = prompts[0], prompts[-1]
    per_prompt, per_token = (
        [medians[Kind(size, long)][0] - medians[Kind(size, short)][0] for size in (num_replicas, 1)],
        fmean(medians[Kind(num_replicas, prompt)][1] / medians[Kind(1, prompt)][1] for prompt in prompts),
    )
    return Contention(max(1.0, per_prompt[0] / per_prompt[1]), max(1.0, per_token))


def _means(answers: Sequence[Answer]) -> tuple[float, float]:
    """Seconds to the first token, and per token after it."""
    return fmean(one.ttft for one in answers), fmean(one.tpot or 0.0 for one in answers)
