"""A trace through `paceline serve --replicas`, beside the simulation of that fleet.

The replicas are timed by the wall clock, the costs of passes by CPU time: both are equal on an otherwise
idle machine. What the server adds, and what replicas on one machine take from each other, is measured on
the same replicas, before and after the trace, with other requests (fleet_costs.py). The simulated figures
are the means over costs that were measured before and after. The trace is replayed several times: a figure
that differs between two real runs cannot be predicted more exactly than that.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.server.fleet_costs import Probe, probes, served_world
from benchmarks.server.process import ServerProcess
from benchmarks.server.replicas import Fleet
from paceline.bench.loading import bench_config
from paceline.bench.run.speculation import OFF
from paceline.bench.run.turns import Answer
from paceline.bench.servers import client
from paceline.bench.simulate.fleet import FleetRun, check_lengths
from paceline.bench.simulate.fleet_check import (
    ComparedFleet,
    compare,
    figures,
    plain_costs,
    replica_world,
)
from paceline.bench.simulate.prompts import FleetRequest
from paceline.bench.simulate.run import World
from paceline.bench.traffic.traces import Arrival
from paceline.build import load_model
from paceline.config import EngineConfig, SchedulerOptions
from paceline.errors import PacelineError

RUNS = 3  # of the trace; the median of each figure counts
SHORTEST_ANSWER = 16  # tokens, of answers that are made shorter
FIRST_ID = 32  # of the model's ordinary tokens: simulated prompts have four different ones


def measure_fleet(
    model_name: str, count: int, requests: Sequence[FleetRequest]
) -> tuple[list[ComparedFleet], list[World]]:
    """Latencies, throughput and hit rate of replicas beside the simulated ones, and what was simulated."""
    config = _config(model_name)
    model = load_model(config)
    world = replica_world(config, model)
    check_lengths(world, requests)
    costs = [plain_costs(config, model)]
    sent = probes(count)
    half = len(sent) // 2
    flags = (model_name, "--replicas", str(count), "--threads", "1", "--draft", "off")
    with ServerProcess(*flags) as running:
        Fleet(model_name, running.server, running.process.pid).wait_for(count)
        answers = [_probe(running.server, probe) for probe in sent[:half]]
        runs = [asyncio.run(_replay(running.server, _renamed(requests, run))) for run in range(RUNS)]
        answers += [_probe(running.server, probe) for probe in sent[half:]]
    costs.append(plain_costs(config, model))
    worlds = [replace(world, costs={OFF: each}) for each in costs]
    served = [served_world(each, count, sent, answers) for each in worlds]
    return compare([figures(run) for run in runs], served, count, "prefix", requests), served


def scaled(arrival: Arrival, factor: float) -> Arrival:
    """The arrival with shorter prompt and answer; times per token of very short answers would be noise."""
    if factor == 1.0:
        return arrival
    prompt, answer = arrival.prompt_tokens or 0, arrival.answer_tokens or 0
    return replace(
        arrival,
        prompt_tokens=max(1, round(factor * prompt)),
        answer_tokens=max(SHORTEST_ANSWER, round(factor * answer)),
    )


def _config(model_name: str) -> EngineConfig:
    return bench_config(model_name, "auto", 1, SchedulerOptions().max_num_seqs)


def _probe(server: client.Server, probe: Probe) -> list[Answer]:
    for _ in range(probe.kind.cached):
        asyncio.run(_replay(server, probe.requests))
    return asyncio.run(_replay(server, probe.requests)).answers


def _renamed(requests: Sequence[FleetRequest], run: int) -> list[FleetRequest]:
    """The requests with other prompts in every run, so that none finds those of another run cached."""
    names = 1 + max(int(request.pages.max()) for request in requests)
    return [replace(request, pages=request.pages + run * names) for request in requests]


async def _replay(server: client.Server, requests: Sequence[FleetRequest]) -> FleetRun:
    """All answers, each request sent when it is due."""
    bodies = [_body(request) for request in requests]
    cached = 0
    start = time.perf_counter()

    async def answer(request: FleetRequest, body: bytes) -> Answer:
        nonlocal cached
        await asyncio.sleep(start + request.due - time.perf_counter())
        got = await client.post(server, "/v1/completions", body)
        if not got.complete:
            raise PacelineError(f"a server answered with status {got.status}: {got.error}")
        usage = [chunk["usage"] for _, chunk in got.chunks if chunk.get("usage")][-1]
        cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        due = start + request.due
        return Answer([], request.answer_tokens, (got.choices[0][0] - due,), got.choices[-1][0] - due)

    answers = await asyncio.gather(*map(answer, requests, bodies))
    seconds = max(request.due + one.e2e_seconds for request, one in zip(requests, answers, strict=True))
    prompt_tokens = sum(request.prompt_tokens for request in requests)
    return FleetRun(list(answers), seconds, [], [], cached, prompt_tokens, 0, {})


def _body(request: FleetRequest) -> bytes:
    body = {
        "prompt": [FIRST_ID + token for token in request.token_ids()],
        "max_tokens": request.answer_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,  # a chunk for every token, also for one that ends no character
    }
    return json.dumps(body).encode()
