"""The flags that say what is asked and when, and what they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.bench.flags import integers
from paceline.errors import ConfigError
from paceline.terminal.flags import Flag, Group, Options

if TYPE_CHECKING:
    from paceline.bench.traffic.profiles import Profile
    from paceline.bench.traffic.workloads import Workload

SHORT_LIMIT = 4  # prompts of each built-in workload, if none is named

WORKLOAD: Group = (
    Flag(
        "workload",
        list[str] | None,
        None,
        "A file of JSON lines, or code-edit, summarize, extract, chat, writing. May be repeated. "
        f"If left out: {SHORT_LIMIT} prompts of each of these.",
    ),
    Flag("limit", int | None, None, "Take the first prompts of each workload only."),
    Flag("max_tokens", int | None, None, "Cut answers that may be longer."),
    Flag("temperature", float | None, None, "0 is greedy. If left out: each prompt's own, 0 unless it says."),
    Flag(
        "constrain",
        bool,
        True,
        "Answer in the form that a prompt's response_format asks for.",
        "--constrain/--no-constrain",
    ),
)
ARRIVALS: Group = (
    Flag("concurrency", str | None, None, "Numbers of requests at once, such as 1,8; 1 if left out."),
    Flag("rate", list[float] | None, None, "Requests a second that come by chance. May be repeated."),
    Flag("trace", list[Path] | None, None, "A CSV file of arrivals to replay. May be repeated."),
    Flag("time_scale", float, 1.0, "Of traces: 0.1 lets requests come ten times as fast."),
    Flag("seed", int, 0, "Decides when requests come by --rate."),
)


def load_workloads(load: Options) -> tuple[Workload, ...]:
    """What the flags of WORKLOAD ask for."""
    from paceline.bench.traffic.builtin_workloads import BUILT_IN
    from paceline.bench.traffic.workloads import load_workload

    names: Sequence[str] = list(BUILT_IN) if load["workload"] is None else load["workload"]
    limit = SHORT_LIMIT if load["workload"] is None and load["limit"] is None else load["limit"]
    return tuple(load_workload(name, limit, load["max_tokens"]) for name in names)


def arrival_profiles(arrivals: Options, num_requests: int) -> tuple[Profile, ...]:
    """All ways in which the flags of ARRIVALS let requests come, those at once first."""
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
