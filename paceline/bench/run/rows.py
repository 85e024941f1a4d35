"""From turns to rows: one for each workload, segment, state of the caches and method."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from paceline.bench.run.figures import Objective, percentiles, ratio_interval
from paceline.bench.run.speculation import OFF, Runs
from paceline.bench.run.turns import Answer, Turn

ALL = "all"  # the segment of rows that sum up several


@dataclass(frozen=True)
class Row:
    """One method on one segment of a workload. The names are those of the JSON.

    Times are means over the rounds; ratios are of sums, and above 1 the method is faster than plain decoding.
    What needs plain decoding to compare with is None where it was not measured.
    """

    workload: str
    segment: str
    cache: str  # cold: drafters began the pass empty; warm: they have seen it once; server: its own affair
    profile: str  # how requests came
    concurrency: int | None  # None: they came when they were due
    method: str
    prompts: int
    failed: int  # requests without a whole answer, in all rounds; no other figure has them
    output_tokens: int
    seconds: float  # of all groups, from the first arrival to the last end
    lost_seconds: float  # to other programs and guests of the machine, beyond these
    decode_seconds: float  # of all requests, after their first token
    tokens_per_second: float
    decode_tokens_per_second: float  # of one request
    speedup_vs_off: float | None  # of tokens_per_second
    speedup_interval: tuple[float, float] | None  # 95 %, as wide as the prompts' own end-to-end times say
    median_speedup_vs_off: float | None  # of the groups' own ratios
    decode_speedup_vs_off: float | None
    median_decode_speedup_vs_off: float | None
    latency_speedup_vs_off: float | None  # of the sums of end-to-end times
    latency_speedup_interval: tuple[float, float] | None
    mean_acceptance_length: float | None  # tokens of a drafted step, with the bonus token; None: not told
    tokens_per_pass: float | None  # after the first pass, drafted or not
    draft_acceptance_rate: float | None
    acceptance_per_position: list[float]  # [d] share of drafted steps that accepted at least d + 1 tokens
    drafted_per_position: list[float]  # [d] share of them that drafted so deep; empty: not told
    draft_tokens_per_step: float | None  # of drafted steps
    drafted_share: float | None  # of passes after the first
    draft_us_per_pass: float | None  # proposing only; `benchmarks drafting` times observing too
    ttft_ms: float  # this and the next two: means
    tpot_ms: float
    e2e_ms: float
    percentiles: dict[str, dict[str, float] | None]  # of ttft_ms, tpot_ms, inter_token_ms and e2e_ms
    good_share: float | None  # of requests that met the objective; None: there is none
    goodput: float | None  # such requests a second
    structured: int  # answers, of all rounds, that a schema was given for
    finished: int  # those of them that came to their end
    valid: int  # those of them that fit the schema
    identical: bool | None  # token for token what plain decoding gave, in every round
    differing_prompts: list[str]
    failed_drafters: list[str]


def rows(workload: str, runs: Runs, objective: Objective | None = None) -> list[Row]:
    """The rows of a workload, segment by segment and, if there are several, all together; plain first."""
    segments = list(dict.fromkeys(task.segment for group in runs.groups for task in group))
    caches = list(dict.fromkeys(cache for cache, _ in runs.turns))
    methods = list(dict.fromkeys(method for _, method in runs.turns))
    found = []
    for segment in [*segments, *([ALL] if len(segments) > 1 else [])]:
        for cache in caches:
            off = _part(runs, cache, OFF, segment) if (cache, OFF) in runs.turns else None
            for method in methods:
                own = _part(runs, cache, method, segment)
                names = (workload, segment, cache, method)
                found.append(_row(names, runs, own, off, _differing(runs, method, segment), objective))
    return found


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
        """Those of all rounds."""
        return list(chain.from_iterable(turn.answers for turn in self.every))

    def means(self, of: Callable[[Turn], float]) -> list[float]:
        """Each group's mean over the rounds."""
        return [statistics.fmean(of(turn) for turn in turns) for turns in self.turns]

    def latencies(self) -> list[float | None]:
        """Each prompt's mean end-to-end time over the rounds; None if one of them had no whole answer."""
        found: list[float | None] = []
        for turns in self.turns:
            for answers in zip(*(turn.answers for turn in turns), strict=True):
                whole = all(answer.error is None for answer in answers)
                found.append(statistics.fmean(one.e2e_seconds for one in answers) if whole else None)
        return found


def _part(runs: Runs, cache: str, method: str, segment: str) -> _Part:
    """The turns of a segment; of groups that have several only its own answers."""
    rounds = runs.turns[cache, method]
    found = []
    for index, group in enumerate(runs.groups):
        places = [place for place, task in enumerate(group) if segment in (ALL, task.segment)]
        if places:
            found.append([_only(turns[index], places, segment) for turns in rounds])
    return _Part(found)


def _only(turn: Turn, places: Sequence[int], segment: str) -> Turn:
    if len(places) == len(turn.answers):
        return turn
    # of servers only a paceline tells how drafts fared in each segment
    return Turn(turn.seconds, [turn.answers[place] for place in places], turn.acceptance_of.get(segment))


def _differing(runs: Runs, method: str, segment: str) -> list[str] | None:
    """The prompts whose tokens were, in any round of any pass, not those of plain decoding's first run."""
    first = next(iter(runs.turns))[0]
    if (first, OFF) not in runs.turns:
        return None
    truths = _part(runs, first, OFF, segment).turns
    names = [task.id for group in runs.groups for task in group if segment in (ALL, task.segment)]
    truth = [answer for turns in truths for answer in turns[0].answers]
    differing = set()
    for cache in [cache for cache, label in runs.turns if label == method]:
        groups = _part(runs, cache, method, segment).turns
        for number in range(len(groups[0])):
            given = [answer for turns in groups for answer in turns[number].answers]
            for name, own, expected in zip(names, given, truth, strict=True):
                if own.error is None and expected.error is None and not own.same_as(expected):
                    differing.add(name)
    return [name for name in names if name in differing]


def _row(
    names: tuple[str, str, str, str],
    runs: Runs,
    own: _Part,
    off: _Part | None,
    differing: list[str] | None,
    objective: Objective | None,
) -> Row:
    """One row from the turns of its groups, its own and those of plain decoding."""
    workload, segment, cache, method = names
    every = own.answers
    answers = [answer for answer in every if answer.error is None]
    tokens = sum(answer.num_tokens for answer in answers) / own.rounds  # of one round, as all else
    seconds, decode = own.means(lambda turn: turn.seconds), own.means(lambda turn: turn.decode_seconds)
    later_tokens = tokens - len(answers) / own.rounds
    speed = tokens / sum(seconds)
    compared = _Compared(own, off, speed)
    counts = _Counts(own)
    good = None if objective is None else sum(objective.met_by(answer) for answer in every)
    structured = [answer for answer in answers if answer.valid is not None]
    return Row(
        workload=workload,
        segment=segment,
        cache=cache,
        profile=runs.profile.label,
        concurrency=runs.profile.concurrency,
        method=method,
        prompts=len(every) // own.rounds,
        failed=len(every) - len(answers),
        output_tokens=round(tokens),
        seconds=sum(seconds),
        lost_seconds=sum(own.means(lambda turn: turn.lost_seconds)),
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
        draft_tokens_per_step=_ratio(counts.drafted, counts.steps) if counts.told else None,
        drafted_share=_known_ratio(counts.steps, counts.later_passes),
        draft_us_per_pass=_known_ratio(1e6 * counts.draft_time, counts.later_passes),
        ttft_ms=_mean_ms([answer.ttft for answer in answers]),
        tpot_ms=1e3 * _ratio(sum(decode), later_tokens),
        e2e_ms=_mean_ms([answer.e2e_seconds for answer in answers]),
        percentiles=_latencies(answers),
        good_share=None if good is None else good / len(every),
        goodput=None if good is None else good / own.rounds / sum(seconds),
        structured=len(structured),
        finished=sum(answer.finished for answer in structured),
        valid=sum(bool(answer.valid) and answer.finished for answer in structured),
        identical=None if differing is None else not differing,
        differing_prompts=differing or [],
        failed_drafters=sorted({name for answer in answers for name in answer.failed_drafters}),
    )


def _latencies(answers: Sequence[Answer]) -> dict[str, dict[str, float] | None]:
    """Percentiles of all times that a user feels, in milliseconds."""
    found = {
        "ttft_ms": [answer.ttft for answer in answers],
        "tpot_ms": [answer.tpot for answer in answers if answer.tpot is not None],
        "inter_token_ms": [gap for answer in answers for gap in answer.gaps],
        "e2e_ms": [answer.e2e_seconds for answer in answers],
    }
    return {name: percentiles([1e3 * value for value in values]) for name, values in found.items()}


class _Compared:
    """A method against plain decoding; everything None where that was not measured."""

    def __init__(self, own: _Part, off: _Part | None, speed: float) -> None:
        self._own, self._off = own, off
        self.speedup: float | None = None
        self.interval: tuple[float, float] | None = None
        self.latency: float | None = None
        self.latency_interval: tuple[float, float] | None = None
        if off is None:
            return
        both = zip(off.latencies(), own.latencies(), strict=True)
        pairs = [(plain, mine) for plain, mine in both if plain is not None and mine is not None]
        if not pairs:
            return
        over, under = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        off_tokens = sum(answer.num_tokens for answer in off.answers if answer.error is None) / off.rounds
        self.speedup = speed / (off_tokens / sum(off.means(lambda turn: turn.seconds)))
        self.latency = sum(over) / sum(under)
        self.latency_interval = ratio_interval(over, under)
        if self.latency_interval is not None:
            # at a fixed concurrency the time of the whole is the sum of the requests' own, shared
            low, high = self.latency_interval
            self.interval = (self.speedup * low / self.latency, self.speedup * high / self.latency)

    def of_sums(self, of: Callable[[Turn], float]) -> float | None:
        """The ratio of the sums over groups."""
        return None if self._off is None else _ratio(sum(self._off.means(of)), sum(self._own.means(of)))

    def median(self, of: Callable[[Turn], float]) -> float | None:
        """The median of the groups' ratios; answers of one token have no decoding to compare."""
        if self._off is None:
            return None
        pairs = zip(self._off.means(of), self._own.means(of), strict=True)
        return statistics.median([over / under for over, under in pairs if under > 0] or [1.0])


class _Counts:
    """What drafting did, summed: from the answers themselves, or from a server's counters."""

    def __init__(self, part: _Part) -> None:
        answers = [answer for answer in part.answers if answer.error is None]
        told = [turn.acceptance for turn in part.every if turn.acceptance is not None]
        own = [answer.speculative for answer in answers]
        self.told = bool(told) or any(answer.gains for answer in answers)
        self.steps = sum(one.num_spec_steps for one in own) + sum(one.steps for one in told)
        self.drafted = sum(one.num_draft_tokens for one in own) + sum(one.drafted for one in told)
        self.accepted = sum(one.num_accepted_draft_tokens for one in own) + sum(one.accepted for one in told)
        each: list[Sequence[float]] = [one.accepted_per_position for one in own]
        each += [one.accepted_per_position for one in told if one.steps]
        self.accepted_per_position = [sum(counts) for counts in zip_longest(*each, fillvalue=0.0)]
        deep = [one.drafts_per_position for one in own]
        self.drafts_per_position = [sum(counts) for counts in zip_longest(*deep, fillvalue=0)]
        self.draft_time = sum(one.draft_time for one in own)
        self.later_gains = sum(sum(answer.gains[1:]) for answer in answers)
        self.later_passes = sum(len(answer.gains) - 1 for answer in answers if answer.gains)
        self._lengths = [one.length for one in told if one.length is not None]
        self._rates = [one.rate for one in told if one.rate is not None]

    @property
    def length(self) -> float | None:
        if self._lengths:
            return statistics.fmean(self._lengths)
        return 1 + _ratio(self.accepted, self.steps) if self.told else None

    @property
    def rate(self) -> float | None:
        if self._rates:
            return statistics.fmean(self._rates)
        return _ratio(self.accepted, self.drafted) if self.told else None


def _ratio(over: float, under: float) -> float:
    return over / under if under else 0.0


def _known_ratio(over: float, under: float) -> float | None:
    return over / under if under else None


def _mean_ms(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.fmean(seconds) if seconds else 0.0
