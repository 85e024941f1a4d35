"""A trace through several `paceline serve` processes of one thread, beside the simulation of that fleet.

The client routes: it hashes prompts, asks the policy, and counts what each server has not finished. Prices
are measured in wall time just before and after, because the servers' times are of the wall clock too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.server.process import ServerProcess
from paceline.bench.loading import bench_config
from paceline.bench.run.turns import Answer
from paceline.bench.servers import client
from paceline.bench.simulate.fleet import FleetRun, check_lengths
from paceline.bench.simulate.fleet_check import (
    ComparedFleet,
    compare,
    figures,
    plain_prices,
    replica_world,
)
from paceline.bench.simulate.prompts import FleetRequest
from paceline.bench.simulate.world import PAGE_SIZE
from paceline.build import load_model
from paceline.config import SchedulerOptions
from paceline.errors import PacelineError
from paceline.kv.hashing import page_hashes
from paceline.scale.routing import PrefixRouting, RoutingOptions

FIRST_ID = 32  # of the model's ordinary tokens: simulated prompts have four different ones


def measure_fleet(model_name: str, count: int, requests: Sequence[FleetRequest]) -> list[ComparedFleet]:
    """Latencies and hit rate of servers, beside the simulated ones."""
    config = bench_config(model_name, "auto", 1, SchedulerOptions().max_num_seqs)
    model = load_model(config)
    world = replica_world(config, model)
    check_lengths(world, requests)
    prices = [plain_prices(config, model, time.perf_counter)]
    with ExitStack() as stack:
        flags = (model_name, "--threads", "1", "--draft", "off")
        servers = {str(number): stack.enter_context(ServerProcess(*flags)).server for number in range(count)}
        num_pages = (world.server_kv_tokens or 0) // PAGE_SIZE
        run = asyncio.run(_replay(servers, PrefixRouting(RoutingOptions(max_pages=num_pages)), requests))
    prices.append(plain_prices(config, model, time.perf_counter))
    measured = {name: value for name, value in figures(run).items() if not name.startswith("busy")}
    return compare(measured, world, prices, count, "prefix", requests)


async def _replay(
    servers: Mapping[str, client.Server], policy: PrefixRouting, requests: Sequence[FleetRequest]
) -> FleetRun:
    """All answers, each request sent when it is due."""
    loads = dict.fromkeys(servers, 0)
    counts = dict.fromkeys(servers, 0)
    cached = 0
    start = time.perf_counter()

    async def answer(request: FleetRequest) -> Answer:
        nonlocal cached
        await asyncio.sleep(start + request.due - time.perf_counter())
        ids = [FIRST_ID + token for token in request.token_ids()]
        hashes = page_hashes(ids, PAGE_SIZE)
        name = policy.rank(hashes, None, loads)[0]
        policy.record(name, hashes, None)
        loads[name] += 1
        counts[name] += 1
        got = await client.post(servers[name], "/v1/completions", _body(ids, request.answer_tokens))
        loads[name] -= 1
        if not got.complete:
            raise PacelineError(f"a server answered with status {got.status}: {got.error}")
        usage = [chunk["usage"] for _, chunk in got.chunks if chunk.get("usage")][-1]
        cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        due = start + request.due
        return Answer([], request.answer_tokens, (got.choices[0][0] - due,), got.ended - due)

    answers = await asyncio.gather(*map(answer, requests))
    seconds = time.perf_counter() - start
    prompt_tokens = sum(request.prompt_tokens for request in requests)
    return FleetRun(list(answers), seconds, [0.0], list(counts.values()), cached, prompt_tokens, 0, {})


def _body(ids: list[int], tokens: int) -> dict[str, Any]:
    return {
        "prompt": ids,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
