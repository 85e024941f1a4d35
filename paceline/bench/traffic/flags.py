"""Flags for workloads and arrivals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ConfigError
from paceline.terminal.flags import PROMPT_FILE, Flag, Group, Options, by_topic, integers

if TYPE_CHECKING:
    from paceline.bench.traffic.profiles import Profile
    from paceline.bench.traffic.workloads import Workload

SHORT_LIMIT = 4  # prompts of each built-in workload, if none is named

WORKLOAD: Group = (
    Flag(
        "workload",
        list[str] | None,
        None,
        "File of prompts (JSON lines), or code-edit, summarize, extract, chat, writing. May be repeated. "
        f"Default: {SHORT_LIMIT} prompts of each of these.",
        " ".join(PROMPT_FILE),
    ),
    Flag("limit", int | None, None, "Maximum number of prompts from each segment of a file."),
    Flag("max_tokens", int | None, None, "Maximum tokens per answer. Default: each prompt's own, or 256."),
    Flag(
        "temperature",
        float | None,
        None,
        "Sampling temperature. Default: each prompt's own, or 0 (greedy).",
    ),
    Flag(
        "constrain",
        bool,
        True,
        "Hold answers to the prompts' response_format.",
        "--constrain/--no-constrain",
    ),
)
ARRIVALS: Group = (
    Flag("concurrency", str | None, None, "Numbers of concurrent requests to test, such as 1,8. Default: 1."),
    Flag("rate", list[float] | None, None, "Arrival rate in requests per second (Poisson). May be repeated."),
    Flag("trace", list[Path] | None, None, "CSV file of arrivals to replay. May be repeated."),
    Flag("time_scale", float, 1.0, "Factor on the times of --trace: 0.1 replays ten times as fast."),
    Flag("seed", int, 0, "Seed of the arrivals of --rate."),
)
WORKLOAD = by_topic(WORKLOAD, {"Prompts": "limit max_tokens temperature constrain"})
ARRIVALS = by_topic(ARRIVALS, {"Arrivals": "rate trace time_scale seed"})


def load_workloads(load: Options) -> tuple[Workload, ...]:
    """The workloads that the flags of WORKLOAD name."""
    from paceline.bench.traffic.builtin_workloads import BUILT_IN
    from paceline.bench.traffic.workloads import load_workload

    names: Sequence[str] = list(BUILT_IN) if load["workload"] is None else load["workload"]
    limit = SHORT_LIMIT if load["workload"] is None and load["limit"] is None else load["limit"]
    return tuple(load_workload(name, limit, load["max_tokens"]) for name in names)


def arrival_profiles(arrivals: Options, num_requests: int) -> tuple[Profile, ...]:
    """All arrival profiles that the flags of ARRIVALS name, fixed concurrencies first."""
    from paceline.bench.traffic.profiles import closed, poisson, replay

    rates, traces = arrivals["rate"] or [], arrivals["trace"] or []
    at_once = arrivals["concurrency"] or (None if rates or traces else "1")
    if arrivals["time_scale"] != 1 and not traces:
        raise ConfigError("--time-scale is of traces: name one by --trace, or leave it out.")
    return (
        *(closed(number) for number in (integers("--concurrency", at_once) if at_once else [])),
        *(poisson(rate, arrivals["seed"], num_requests) for rate in rates),
        *(replay(path, arrivals["time_scale"]) for path in traces),
    )
