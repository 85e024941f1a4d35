"""What drafting methods give on a workload, each in turns with plain decoding.

Every contestant is an engine of its own around one loaded model, so that no drafter sees the answers
of another contestant: it could copy them. Engines are new in every round, so that none remembers an
answer from the round before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from paceline.bench.schemas import fits_schema
from paceline.bench.timing import OnTurn
from paceline.draft.methods import parse_speculative_config
from paceline.engine.engine import Engine
from paceline.engine.request import Request, SpeculativeCounts
from paceline.errors import ConfigError, RequestError
from paceline.options import check_integer
from paceline.verify.params import SamplingParams

OFF = "off"
COLD, WARM = "cold", "warm"
WARM_UP_TOKENS = 16

MakeEngine = Callable[[], Engine]
Key = tuple[str, str]  # cold or warm, and the method


@dataclass(frozen=True)
class Task:
    """One prompt of a workload, tokenized, with its sampling parameters."""

    id: str
    segment: str
    token_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Answer:
    """What one request got, and when. Times are seconds."""

    token_ids: list[int]
    ttft: float  # from its arrival to its first token
    decode_seconds: float  # from its first token to its last
    e2e_seconds: float
    gains: tuple[int, ...]  # tokens of each pass that gave it some
    speculative: SpeculativeCounts
    failed_drafters: tuple[str, ...]
    finished: bool = True  # it came to its end, it was not cut
    valid: bool | None = None  # whether it fits its schema; None: it has none


@dataclass(frozen=True)
class Turn:
    """One group of requests, run together."""

    seconds: float  # from the arrival of all to the end of the last
    answers: list[Answer]

    @property
    def decode_seconds(self) -> float:
        return sum(answer.decode_seconds for answer in self.answers)


@dataclass(frozen=True)
class Runs:
    """All turns of a workload."""

    groups: list[list[Task]]
    concurrency: int
    turns: dict[Key, list[list[Turn]]]  # [round][group]


def parse_methods(given: Sequence[str]) -> dict[str, Any]:
    """Contestants by label: plain decoding first, then what each value names, as speculative_config.

    A value is a list of short forms, such as ngram,suffix, or one JSON object.
    """
    contestants: dict[str, Any] = {OFF: OFF}
    for value in given:
        for config in [value] if value.lstrip().startswith("{") else value.split(","):
            label = config.strip()
            if label == OFF:
                continue
            parse_speculative_config(label)  # a mistake is told before a model is loaded
            if "suffix_cache_path" in label:
                raise ConfigError("a cache in a file is never cold: leave out suffix_cache_path.")
            contestants[_label(label)] = label
    if len(contestants) == 1:
        raise ConfigError("--methods names nothing to compare with off: give for example ngram,suffix.")
    return contestants


def _label(config: str) -> str:
    """A short name: the method, and what was asked beyond its defaults."""
    if not config.startswith("{"):
        return config
    keys = json.loads(config)
    method = keys.pop("method", "draft_model")
    return " ".join([method, *(f"{key}={value}" for key, value in keys.items())])


def measure_workload(
    makers: Mapping[str, MakeEngine],
    tasks: Sequence[Task],
    *,
    rounds: int,
    concurrency: int = 1,
    warm: bool = False,
    on_turn: OnTurn = lambda _: None,
) -> Runs:
    """All contestants' turns on a workload.

    A turn is one prompt, or `concurrency` of them at once. All contestants have their turn on a group
    before anyone sees the next; who begins changes from group to group. With `warm` each round is a
    pass over the workload with new engines and then a second one with the same.
    """
    check_integer(ConfigError, "rounds", rounds, 1, None)
    check_integer(ConfigError, "concurrency", concurrency, 1, None)
    groups = list(_groups(tasks, concurrency))
    labels = list(makers)
    _warm_up(makers, groups[0])
    passes = (COLD, WARM) if warm else (COLD,)
    turns: dict[Key, list[list[Turn]]] = {(name, label): [] for name in passes for label in labels}
    for number in range(rounds):
        engines = {label: make() for label, make in makers.items()}
        for name in passes:
            for label in labels:
                turns[name, label].append([])
            for index, group in enumerate(groups):
                first = (number + index) % len(labels)
                for label in labels[first:] + labels[:first]:
                    turns[name, label][number].append(run_group(engines[label], group))
                    on_turn(f"{name}, round {number + 1} of {rounds}: {label}")
        for engine in engines.values():
            engine.close()
    return Runs(groups, concurrency, turns)


def run_group(engine: Engine, group: Sequence[Task]) -> Turn:
    """The requests of a group, all arriving at once, run until the last has ended."""
    start = time.perf_counter()
    requests: list[Request] = []
    gains: dict[Request, list[int]] = {}
    for task in group:
        try:
            (request,) = engine.add_request(task.token_ids, task.params)
        except RequestError as error:
            raise ConfigError(f"prompt {task.id!r} cannot be run: {error}") from None
        requests.append(request)
        gains[request] = []
    while engine.has_unfinished:
        for delta in engine.step():
            if delta.token_ids:
                gains[delta.request].append(len(delta.token_ids))
    seconds = time.perf_counter() - start
    return Turn(seconds, [_answer(request, gains[request]) for request in requests])


def _answer(request: Request, gains: Sequence[int]) -> Answer:
    if request.error is not None:
        raise request.error
    assert request.first_token_time is not None
    assert request.finished_time is not None
    return Answer(
        token_ids=request.output_token_ids,
        ttft=request.first_token_time - request.arrival_time,
        decode_seconds=request.finished_time - request.first_token_time,
        e2e_seconds=request.finished_time - request.arrival_time,
        gains=tuple(gains),
        speculative=request.speculative,
        failed_drafters=tuple(sorted(request.failed_drafters)),
        finished=request.finish_reason == "stop",
        valid=fits_schema(request.detokenizer.text, request.params.structure),
    )


def _groups(tasks: Sequence[Task], size: int) -> Iterator[list[Task]]:
    """The tasks in order, in groups of one segment and of at most `size`."""
    for _, same in groupby(tasks, key=lambda task: task.segment):
        segment = list(same)
        for start in range(0, len(segment), size):
            yield segment[start : start + size]


def _warm_up(makers: Mapping[str, MakeEngine], group: Sequence[Task]) -> None:
    """Every contestant once, briefly and uncounted: code is compiled. These engines are not used again."""
    for make in makers.values():
        engine = make()
        for task in group[:1]:
            params = SamplingParams(temperature=0, max_tokens=WARM_UP_TOKENS, ignore_eos=True)
            run_group(engine, [Task(task.id, task.segment, task.token_ids, params)])
        engine.close()
