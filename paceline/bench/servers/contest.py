"""`paceline bench serve URL`: the same measurements on running servers."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from paceline.bench.run.contest import Contest, SpeculationOptions
from paceline.bench.run.rows import rows
from paceline.bench.run.speculation import OFF, measure_workload
from paceline.bench.servers.client import ClientError, Server
from paceline.bench.servers.endpoints import (
    Endpoint,
    EndpointRunner,
    metrics_page,
    read_page,
    served_model,
    served_task,
)
from paceline.bench.timing import OnTurn
from paceline.draft.methods import AUTO
from paceline.errors import ConfigError

SERVER = "server"  # label of a single server, and of the state of its caches in rows
_NAMED = re.compile(r"([^=:/?]+)=(.+)")


def parse_addresses(option: str, given: Sequence[str]) -> dict[str, str]:
    """Addresses by label, from URL or LABEL=URL."""
    addresses: dict[str, str] = {}
    for value in given:
        named = _NAMED.fullmatch(value)
        label, url = (named[1], named[2]) if named else (SERVER, value)
        if label in addresses:
            raise ConfigError(
                f"{option} is given twice for {label!r}: name each server, such as {option} off={url}."
            )
        if not re.match(r"https?://[^/]", url):
            raise ConfigError(
                f"{option} must be like http://127.0.0.1:8000 or LABEL=http://127.0.0.1:8000, got {value!r}."
            )
        addresses[label] = url
    return addresses


def run_served(
    options: SpeculationOptions,
    addresses: Mapping[str, str],
    metrics: Mapping[str, str],
    api_key: str | None,
    model: str | None,
    on_turn: OnTurn = lambda _: None,
) -> Contest:
    """All rows, measured on servers. `model` is their name of the model; None: each server's first.

    With methods or models in the options (paceline servers only), each of them is a contestant on the one
    server; otherwise each server is.
    """
    for flag, given in {"--methods": options.methods, "--models": options.models}.items():
        if given and len(addresses) > 1:
            raise ConfigError(f"{flag} are of one server: leave them out, or name one server only.")
    unknown = set(metrics) - set(addresses)
    if unknown:
        raise ConfigError(
            f"--metrics names {sorted(unknown)[0]!r}, but --endpoint does not: name them alike."
        )
    endpoints, names, remarks = asyncio.run(_reach(options, addresses, metrics, api_key))
    name = ", ".join(options.models) or model or names[0]
    options = replace(options, model=name)
    numbers, run_id = count(), uuid.uuid4().hex

    def make(label: str) -> EndpointRunner:
        return EndpointRunner(endpoints[label], f"{run_id} {next(numbers)}")

    makers = {label: partial(make, label) for label in endpoints}
    foreign = frozenset(label for label, endpoint in endpoints.items() if not endpoint.ours)
    reference = options.models[0] if options.models else OFF
    contest = Contest(
        options,
        inexact=foreign | set(options.models[1:]),  # other models answer otherwise
        endpoints=addresses,
        remarks=tuple(remarks),
        reference=reference,
    )
    for workload in options.workloads:
        tasks = [
            served_task(prompt, name, number, options.temperature_of(prompt), options.constrain)
            for number, prompt in enumerate(workload.prompts)
        ]
        for profile in options.profiles:
            runs = measure_workload(
                makers, tasks, rounds=options.rounds, profile=profile, passes=(SERVER,), on_turn=on_turn
            )
            contest.rows.extend(rows(workload.name, runs, options.objective, reference))
    return contest


async def _reach(
    options: SpeculationOptions,
    addresses: Mapping[str, str],
    metrics: Mapping[str, str],
    api_key: str | None,
) -> tuple[dict[str, Endpoint], list[str], list[str]]:
    """The contestants, the servers' model names, and remarks for the reader."""
    endpoints: dict[str, Endpoint] = {}
    names: list[str] = []
    remarks = [
        "No other client may use the servers during the run: their counters would include its requests."
    ]
    for label, url in addresses.items():
        server = Server.at(url, api_key)
        name, ours = await served_model(server)
        names.append(name)
        page = metrics_page(metrics.get(label, url.rstrip("/").removesuffix("/v1") + "/metrics"), api_key)
        try:
            await read_page(page)
        except ClientError as error:
            if label in metrics:
                raise
            remarks.append(f"{label}: no acceptance figures. {error}")
            endpoints[label] = Endpoint(server, None, ours=ours)
        else:
            endpoints[label] = Endpoint(server, page, ours=ours)
    if not all(endpoint.ours for endpoint in endpoints.values()):
        remarks.append(
            "Other servers than paceline's keep prefixes and past responses from run to run: restart them "
            "for each. A paceline server keeps every method and round apart, by a cache_salt."
        )
    if not (options.methods or options.models):
        return endpoints, names, remarks
    (endpoint,) = endpoints.values()
    if options.models:
        by_model = {name: replace(endpoint, extra={"model": name}) for name in options.models}
        return by_model, names, remarks
    if not endpoint.ours:
        raise ConfigError(
            "--methods chooses what a paceline drafts for each request, and this server is none. Start one "
            f"server for each method and name them: --endpoint {OFF}=URL --endpoint eagle3=URL."
        )
    methods = {
        label: replace(endpoint, extra={"speculative": _body(config)})
        for label, config in options.methods.items()
    }
    return methods, names, remarks


def _body(config: str) -> Any:
    """A method in the form that a request body takes; strict, so that nothing else is measured for it."""
    if config in (OFF, AUTO):
        return config
    return {"strict": True, **(json.loads(config) if config.startswith("{") else {"method": config})}
