"""What a server adds to its replicas' passes, measured: seconds per request, prompt token, pass and token.

Bursts of equal requests are sent to the real replicas and to simulated ones, whose passes take as long as
those of an engine alone on the machine. The difference is contention (replicas, ingress and clients share
cores, caches and memory) and the server (HTTP, JSON, the ingress).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from paceline.bench.run.speculation import OFF
from paceline.bench.run.turns import Answer
from paceline.bench.simulate.fleet import run_fleet
from paceline.bench.simulate.prices import Contention, ServerPrices, nonnegative_fit
from paceline.bench.simulate.prompts import FleetRequest, fleet_requests
from paceline.bench.simulate.run import Method, World
from paceline.bench.simulate.world import PAGE_SIZE, VOCABULARY
from paceline.bench.traffic.traces import Arrival

REPEATS = 6  # of each burst; the median counts
TOKENS = 24  # per answer
ALONE = (16, 64, 256, 768)  # tokens of the prompts of single requests
TOGETHER = ((1, 16), (1, 256), (4, 16), (4, 64))  # requests for each replica at once, and their tokens
Kind = tuple[int, int]  # of a burst: requests, tokens of each prompt
FIRST_PAGE = VOCABULARY**PAGE_SIZE // 2  # prompts share nothing with those of a trace


def pricing_bursts(num_replicas: int, repeats: int = REPEATS) -> list[list[FleetRequest]]:
    """The bursts, each several times: one request, one for each replica, and four for each."""
    together = [(count * num_replicas, prompt) for count, prompt in TOGETHER]
    sizes = [*[(1, prompt) for prompt in ALONE], *together] * repeats
    each = [Arrival(0.0, prompt, TOKENS) for size, prompt in sizes for _ in range(size)]
    requests = iter(replace(request, pages=FIRST_PAGE + request.pages) for request in fleet_requests(each))
    return [[next(requests) for _ in range(size)] for size, _ in sizes]


def served_world(
    world: World,
    num_replicas: int,
    bursts: Sequence[Sequence[FleetRequest]],
    measured: Sequence[Sequence[Answer]],
) -> World:
    """The simulated world with the measured server times and contention.

    A request alone, compared with one on each replica, shows the contention; the rest is the server.
    """
    took: dict[Kind, list[tuple[float, float]]] = defaultdict(list)
    for burst, answers in zip(bursts, measured, strict=True):
        took[len(burst), burst[0].prompt_tokens].append(_means(answers))
    kinds = {(len(burst), burst[0].prompt_tokens): burst for burst in bursts}
    first, each = np.median([took[kind] for kind in kinds], axis=1).T  # [kinds] to the first token, per token
    medians = dict(zip(kinds, zip(first, each, strict=True), strict=True))
    world = replace(world, contention=_contention(num_replicas, medians))
    runs = [run_fleet(world, Method(OFF), num_replicas, "prefix", burst) for burst in kinds.values()]
    first_alone, each_alone = np.array([_means(run.answers) for run in runs]).T
    slower = world.contention
    decoding = np.array([slower.decoding if size > 1 else 1.0 for size, _ in kinds])
    prompts = np.array([slower.prompts if size > 1 else 1.0 for size, _ in kinds])
    per_pass = decoding[:, None] * [(1.0, max(1.0, size / num_replicas)) for size, _ in kinds]
    step, token = nonnegative_fit(per_pass, each - each_alone, each)
    unqueued = [size <= num_replicas for size, _ in kinds]  # the first pass is theirs alone
    per_request = np.array([(1.0, prompt) for _, prompt in kinds])[unqueued]
    passes = np.array([-(-prompt // world.max_num_batched_tokens) for _, prompt in kinds])  # of the prompt
    waited = (first - first_alone - passes * prompts * (step + token))[unqueued]
    request, prompt_token = nonnegative_fit(per_request, waited, first[unqueued])
    server = ServerPrices(float(request), float(prompt_token), float(step), float(token))
    return replace(world, server=server)


def _contention(num_replicas: int, medians: Mapping[Kind, tuple[float, float]]) -> Contention:
    """How much longer a request takes beside one on each other replica than alone: per prompt token, of which
    bursts have different numbers, and per token."""
    if num_replicas == 1:
        return Contention()
    prompts = sorted(prompt for size, prompt in medians if size == num_replicas)
    short, long = prompts[0], prompts[-1]
    per_prompt = {size: medians[size, long][0] - medians[size, short][0] for size in (1, num_replicas)}
    decoding = fmean(medians[num_replicas, prompt][1] / medians[1, prompt][1] for prompt in prompts)
    return Contention(max(1.0, per_prompt[num_replicas] / per_prompt[1]), max(1.0, decoding))


def _means(answers: Sequence[Answer]) -> tuple[float, float]:
    """Seconds to the first token, and per token after it."""
    return fmean(one.ttft for one in answers), fmean(one.tpot or 0.0 for one in answers)
