"""From turns to rows: one per workload, segment, cache state and method."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from paceline.bench.run.figures import Objective, percentiles, ratio_interval
from paceline.bench.run.speculation import OFF, Runs
from paceline.bench.run.turns import Answer, Turn

ALL = "all"  # segment of rows that sum up several


@dataclass(frozen=True)
class Row:
    """One method on one segment of a workload. Field names are those of the JSON.

    Times are means over the rounds; speedups are ratios of sums, above 1 if faster than plain decoding.
    They are None if plain decoding was not measured. With several models of a server as contestants, the
    first one stands where plain decoding does.
    """

    workload: str
    segment: str
    cache: str  # cold: drafters start the pass empty; warm: they have seen it once; server: unknown
    profile: str  # arrival profile
    concurrency: int | None  # None: an open profile
    method: str
    prompts: int
    failed: int  # requests without a complete answer, in all rounds; excluded from all other figures
    output_tokens: int
    seconds: float  # of all groups, from the first arrival to the last end
    lost_seconds: float  # lost to other programs and virtual machines; not in `seconds`
    decode_seconds: float  # summed over requests, after their first token
    tokens_per_second: float
    decode_tokens_per_second: float  # of one request
    speedup_vs_off: float | None  # ratio of tokens_per_second
    speedup_interval: tuple[float, float] | None  # 95 %, from the variation of the prompts' end-to-end times
    median_speedup_vs_off: float | None  # median of the groups' ratios
    decode_speedup_vs_off: float | None
    median_decode_speedup_vs_off: float | None
    latency_speedup_vs_off: float | None  # ratio of the sums of end-to-end times
    latency_speedup_interval: tuple[float, float] | None
    mean_acceptance_length: float | None  # tokens per drafted step, bonus token included; None: unknown
    tokens_per_pass: float | None  # after the first pass, drafted or not
    draft_acceptance_rate: float | None
    acceptance_per_position: list[float]  # [d] fraction of drafted steps that accepted at least d + 1 tokens
    drafted_per_position: list[float]  # [d] fraction of drafted steps that drafted this deep; empty: unknown
    draft_tokens_per_step: float | None  # in drafted steps
    drafted_share: float | None  # fraction of passes after the first
    draft_us_per_pass: float | None  # proposing only; `benchmarks drafting` also times observing
    ttft_ms: float  # mean, like the next two
    tpot_ms: float
    e2e_ms: float
    percentiles: dict[str, dict[str, float] | None]  # of ttft_ms, tpot_ms, inter_token_ms and e2e_ms
    good_share: float | None  # fraction of requests that met the objective; None: there is none
    goodput: float | None  # requests per second that met the objective
    structured: int  # answers with a schema, in all rounds
    finished: int  # those of them that ended before max_tokens
    valid: int  # those of them that are valid
    identical: bool | None  # token for token as plain decoding, in every round
    differing_prompts: list[str]
    failed_drafters: list[str]
    equal_share: float | None  # of prompts whose answers equal plain decoding's; None: it was not measured
    answered_by: dict[str, float]  # share of answers by model, for a route; else empty


def rows(workload: str, runs: Runs, objective: Objective | None = None, reference: str = OFF) -> list[Row]:
    """The rows of a workload: per segment and, if there are several, over all; the reference first.

    `reference` is what the others are compared with: plain decoding, or the first of several models.
    """
    segments = list(dict.fromkeys(task.segment for group in runs.groups for task in group))
    caches = list(dict.fromkeys(cache for cache, _ in runs.turns))
    methods = list(dict.fromkeys(method for _, method in runs.turns))
    workload_rows = []
    for segment in [*segments, *([ALL] if len(segments) > 1 else [])]:
        for cache in caches:
            off = _part(runs, cache, reference, segment) if (cache, reference) in runs.turns else None
            for method in methods:
                part = _part(runs, cache, method, segment)
                names = (workload, segment, cache, method)
                differing = _differing(runs, method, segment, reference)
                workload_rows.append(_row(names, runs, part, off, differing, objective))
    return workload_rows


@dataclass(frozen=True)
class _Part:
    """A method's turns on one segment: [group][round]."""

    turns: list[list[Turn]]

    @property
    def rounds(self) -> int:
        return len(self.turns[0])

    @property
    def every(self) -> list[Turn]:
        return list(chain.from_iterable(self.turns))

    @property
    def answers(self) -> list[Answer]:
        """The answers of all rounds."""
        return list(chain.from_iterable(turn.answers for turn in self.every))

    def means(self, of: Callable[[Turn], float]) -> list[float]:
        """Each group's mean over the rounds."""
        return [statistics.fmean(of(turn) for turn in turns) for turns in self.turns]

    def latencies(self) -> list[float | None]:
        """Each prompt's mean end-to-end time over the rounds; None if one of them has no complete answer."""
        means: list[float | None] = []
        for turns in self.turns:
            for answers in zip(*(turn.answers for turn in turns), strict=True):
                whole = all(answer.error is None for answer in answers)
                means.append(statistics.fmean(answer.e2e_seconds for answer in answers) if whole else None)
        return means


def _part(runs: Runs, cache: str, method: str, segment: str) -> _Part:
    """The turns of a segment; from groups with several segments, only its answers."""
    rounds = runs.turns[cache, method]
    turns_by_group = []
    for index, group in enumerate(runs.groups):
        indices = [number for number, task in enumerate(group) if segment in (ALL, task.segment)]
        if indices:
            turns_by_group.append([_only(turns[index], indices, segment) for turns in rounds])
    return _Part(turns_by_group)


def _only(turn: Turn, indices: Sequence[int], segment: str) -> Turn:
    if len(indices) == len(turn.answers):
        return turn
    # only paceline servers report acceptance by segment
    return Turn(turn.seconds, [turn.answers[index] for index in indices], turn.acceptance_of.get(segment))


def _differing(runs: Runs, method: str, segment: str, reference: str) -> list[str] | None:
    """The prompts whose tokens differ, in any round, from those of the reference's first round."""
    first = next(iter(runs.turns))[0]
    if (first, reference) not in runs.turns:
        return None
    truths = _part(runs, first, reference, segment).turns
    names = [task.id for group in runs.groups for task in group if segment in (ALL, task.segment)]
    truth = [answer for turns in truths for answer in turns[0].answers]
    differing = set()
    for cache in [cache for cache, label in runs.turns if label == method]:
        groups = _part(runs, cache, method, segment).turns
        for number in range(len(groups[0])):
            given = [answer for turns in groups for answer in turns[number].answers]
            for name, answer, expected in zip(names, given, truth, strict=True):
                if answer.error is None and expected.error is None and not answer.same_as(expected):
                    differing.add(name)
    return [name for name in names if name in differing]


def _row(
    names: tuple[str, str, str, str],
    runs: Runs,
    part: _Part,
    off: _Part | None,
    differing: list[str] | None,
    objective: Objective | None,
) -> Row:
    """One row from a method's turns and those of plain decoding."""
    workload, segment, cache, method = names
    every = part.answers
    answers = [answer for answer in every if answer.error is None]
    tokens = sum(answer.num_tokens for answer in answers) / part.rounds  # per round, like all other figures
    seconds, decode = part.means(lambda turn: turn.seconds), part.means(lambda turn: turn.decode_seconds)
    later_tokens = tokens - len(answers) / part.rounds
    speed = tokens / sum(seconds)
    compared = _Compared(part, off, speed)
    counts = _Counts(part)
    good = None if objective is None else sum(objective.met_by(answer) for answer in every)
    structured = [answer for answer in answers if answer.valid is not None]
    return Row(
        workload=workload,
        segment=segment,
        cache=cache,
        profile=runs.profile.label,
        concurrency=runs.profile.concurrency,
        method=method,
        prompts=len(every) // part.rounds,
        failed=len(every) - len(answers),
        output_tokens=round(tokens),
        seconds=sum(seconds),
        lost_seconds=sum(part.means(lambda turn: turn.lost_seconds)),
        decode_seconds=sum(decode),
        tokens_per_second=speed,
        decode_tokens_per_second=_ratio(later_tokens, sum(decode)),
        speedup_vs_off=compared.speedup,
        speedup_interval=compared.interval,
        median_speedup_vs_off=compared.median(lambda turn: turn.seconds),
        decode_speedup_vs_off=compared.of_sums(lambda turn: turn.decode_seconds),
        median_decode_speedup_vs_off=compared.median(lambda turn: turn.decode_seconds),
        latency_speedup_vs_off=compared.latency,
        latency_speedup_interval=compared.latency_interval,
        mean_acceptance_length=counts.length,
        tokens_per_pass=_known_ratio(counts.later_gains, counts.later_passes),
        draft_acceptance_rate=counts.rate,
        acceptance_per_position=[_ratio(count, counts.steps) for count in counts.accepted_per_position],
        drafted_per_position=[_ratio(count, counts.steps) for count in counts.drafts_per_position],
        draft_tokens_per_step=_ratio(counts.drafted, counts.steps) if counts.is_known else None,
        drafted_share=_known_ratio(counts.steps, counts.later_passes),
        draft_us_per_pass=_known_ratio(1e6 * counts.draft_time, counts.later_passes),
        ttft_ms=_mean_ms([answer.ttft for answer in answers]),
        tpot_ms=1e3 * _ratio(sum(decode), later_tokens),
        e2e_ms=_mean_ms([answer.e2e_seconds for answer in answers]),
        percentiles=_latencies(answers),
        good_share=None if good is None else good / len(every),
        goodput=None if good is None else good / part.rounds / sum(seconds),
        structured=len(structured),
        finished=sum(answer.finished for answer in structured),
        valid=sum(bool(answer.valid) and answer.finished for answer in structured),
        identical=None if differing is None else not differing,
        differing_prompts=differing or [],
        failed_drafters=sorted({name for answer in answers for name in answer.failed_drafters}),
        equal_share=None if differing is None else 1 - len(differing) * part.rounds / len(every),
        answered_by=_answered_by(answers),
    )


def _answered_by(answers: Sequence[Answer]) -> dict[str, float]:
    """The share of the answers by the model that a route led to; empty without a route."""
    models = Counter(answer.answered_by for answer in answers if answer.answered_by is not None)
    return {model: count / len(answers) for model, count in models.most_common()}


def _latencies(answers: Sequence[Answer]) -> dict[str, dict[str, float] | None]:
    """Percentiles of all user-visible times, in milliseconds."""
    times = {
        "ttft_ms": [answer.ttft for answer in answers],
        "tpot_ms": [answer.tpot for answer in answers if answer.tpot is not None],
        "inter_token_ms": [gap for answer in answers for gap in answer.gaps],
        "e2e_ms": [answer.e2e_seconds for answer in answers],
    }
    return {name: percentiles([1e3 * value for value in values]) for name, values in times.items()}


class _Compared:
    """A method compared with plain decoding; everything is None if that was not measured."""

    def __init__(self, part: _Part, off: _Part | None, speed: float) -> None:
        self._part, self._off = part, off
        self.speedup: float | None = None
        self.interval: tuple[float, float] | None = None
        self.latency: float | None = None
        self.latency_interval: tuple[float, float] | None = None
        if off is None:
            return
        both = zip(off.latencies(), part.latencies(), strict=True)
        pairs = [(plain, mine) for plain, mine in both if plain is not None and mine is not None]
        if not pairs:
            return
        over, under = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        off_tokens = sum(answer.num_tokens for answer in off.answers if answer.error is None) / off.rounds
        self.speedup = speed / (off_tokens / sum(off.means(lambda turn: turn.seconds)))
        self.latency = sum(over) / sum(under)
        self.latency_interval = ratio_interval(over, under)
        if self.latency_interval is not None:
            # at a fixed concurrency, total time is proportional to the sum of the requests' times
            low, high = self.latency_interval
            self.interval = (self.speedup * low / self.latency, self.speedup * high / self.latency)

    def of_sums(self, of: Callable[[Turn], float]) -> float | None:
        """The ratio of the sums over groups."""
        return None if self._off is None else _ratio(sum(self._off.means(of)), sum(self._part.means(of)))

    def median(self, of: Callable[[Turn], float]) -> float | None:
        """The median of the groups' ratios; answers of one token have no decoding to compare."""
        if self._off is None:
            return None
        pairs = zip(self._off.means(of), self._part.means(of), strict=True)
        return statistics.median([over / under for over, under in pairs if under > 0] or [1.0])


class _Counts:
    """Draft statistics, summed: from the answers, or from a server's counters."""

    def __init__(self, part: _Part) -> None:
        answers = [answer for answer in part.answers if answer.error is None]
        reported = [turn.acceptance for turn in part.every if turn.acceptance is not None]
        counted = [answer.speculative for answer in answers]
        self.is_known = bool(reported) or any(answer.gains for answer in answers)
        self.steps = sum(item.num_spec_steps for item in counted) + sum(item.steps for item in reported)
        self.drafted = sum(item.num_draft_tokens for item in counted) + sum(item.drafted for item in reported)
        self.accepted = sum(item.num_accepted_draft_tokens for item in counted) + sum(
            item.accepted for item in reported
        )
        each: list[Sequence[float]] = [item.accepted_per_position for item in counted]
        each += [item.accepted_per_position for item in reported if item.steps]
        self.accepted_per_position = [sum(counts) for counts in zip_longest(*each, fillvalue=0.0)]
        deep = [item.drafts_per_position for item in counted]
        self.drafts_per_position = [sum(counts) for counts in zip_longest(*deep, fillvalue=0)]
        self.draft_time = sum(item.draft_time for item in counted)
        self.later_gains = sum(sum(answer.gains[1:]) for answer in answers)
        self.later_passes = sum(len(answer.gains) - 1 for answer in answers if answer.gains)
        self._lengths = [item.length for item in reported if item.length is not None]
        self._rates = [item.rate for item in reported if item.rate is not None]

    @property
    def length(self) -> float | None:
        if self._lengths:
            return statistics.fmean(self._lengths)
        return 1 + _ratio(self.accepted, self.steps) if self.is_known else None

    @property
    def rate(self) -> float | None:
        if self._rates:
            return statistics.fmean(self._rates)
        return _ratio(self.accepted, self.drafted) if self.is_known else None


def _ratio(over: float, under: float) -> float:
    return over / under if under else 0.0


def _known_ratio(over: float, under: float) -> float | None:
    return over / under if under else None


def _mean_ms(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.fmean(seconds) if seconds else 0.0
