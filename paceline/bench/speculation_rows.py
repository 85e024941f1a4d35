"""From turns to rows: one for each workload, segment, state of the caches and method."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from paceline.bench.speculation import OFF, Answer, Runs, Turn


@dataclass(frozen=True)
class Row:
    """One method on one segment of a workload. The names are those of the JSON.

    Times are sums over prompts of each prompt's best round; ratios are of these sums, and above 1 the
    method is faster than plain decoding.
    """

    workload: str
    segment: str
    cache: str  # cold: drafters began the pass empty; warm: they have seen it once
    concurrency: int
    method: str
    prompts: int
    output_tokens: int
    seconds: float  # of all groups, from arrival to end
    decode_seconds: float  # of all requests, after their first token
    tokens_per_second: float
    decode_tokens_per_second: float  # of one request
    speedup_vs_off: float
    median_speedup_vs_off: float  # of the groups' own ratios
    decode_speedup_vs_off: float
    median_decode_speedup_vs_off: float
    mean_acceptance_length: float  # tokens of a drafted step, the bonus token included
    tokens_per_pass: float  # after the first pass, drafted or not
    draft_acceptance_rate: float
    acceptance_per_position: list[float]  # [d] share of drafted steps that accepted at least d + 1 tokens
    draft_tokens_per_step: float  # of drafted steps
    drafted_share: float  # of passes after the first
    draft_us_per_pass: float  # proposing only; `paceline bench drafting` times observing too
    ttft_ms: float
    tpot_ms: float
    e2e_ms: float
    structured: int  # answers that a schema was given for
    finished: int  # those of them that came to their end
    valid: int  # those of them that fit the schema
    identical: bool  # token for token what plain decoding gave, in every round
    differing_prompts: list[str]
    failed_drafters: list[str]


def rows(workload: str, runs: Runs) -> list[Row]:
    """The rows of a workload, segment by segment, plain decoding first."""
    segments = list(dict.fromkeys(group[0].segment for group in runs.groups))
    caches = list(dict.fromkeys(cache for cache, _ in runs.turns))
    methods = list(dict.fromkeys(method for _, method in runs.turns))
    found = []
    for segment in segments:
        members = [index for index, group in enumerate(runs.groups) if group[0].segment == segment]
        for cache in caches:
            off = [_turns(runs, cache, OFF, index) for index in members]
            for method in methods:
                own = [_turns(runs, cache, method, index) for index in members]
                differing = _differing(runs, method, members)
                found.append(_row((workload, segment, cache, method), runs.concurrency, own, off, differing))
    return found


def _turns(runs: Runs, cache: str, method: str, group: int) -> list[Turn]:
    """The turns of one group, one for each round."""
    return [turns[group] for turns in runs.turns[cache, method]]


def _differing(runs: Runs, method: str, members: Sequence[int]) -> list[str]:
    """The prompts whose tokens were, in any round of any pass, not those of plain decoding's first run."""
    first = next(iter(runs.turns))[0]
    names = []
    for index in members:
        truth = [answer.token_ids for answer in runs.turns[first, OFF][0][index].answers]
        caches = [cache for cache, label in runs.turns if label == method]
        every = [turn for cache in caches for turn in _turns(runs, cache, method, index)]
        for place, task in enumerate(runs.groups[index]):
            if any(turn.answers[place].token_ids != truth[place] for turn in every):
                names.append(task.id)
    return names


def _row(
    names: tuple[str, str, str, str],
    concurrency: int,
    own: Sequence[Sequence[Turn]],
    off: Sequence[Sequence[Turn]],
    differing: list[str],
) -> Row:
    """One row from the turns of its groups: [group][round], its own and those of plain decoding."""
    workload, segment, cache, method = names
    seconds, off_seconds = (_bests(turns, lambda turn: turn.seconds) for turns in (own, off))
    decode, off_decode = (_bests(turns, lambda turn: turn.decode_seconds) for turns in (own, off))
    quickest = [min(turns, key=lambda turn: turn.seconds) for turns in own]
    answers = list(chain.from_iterable(turn.answers for turn in quickest))
    tokens = sum(len(answer.token_ids) for answer in answers)
    later_tokens = tokens - len(answers)
    counts = _Counts(answers)
    return Row(
        workload=workload,
        segment=segment,
        cache=cache,
        concurrency=concurrency,
        method=method,
        prompts=len(answers),
        output_tokens=tokens,
        seconds=sum(seconds),
        decode_seconds=sum(decode),
        tokens_per_second=tokens / sum(seconds),
        decode_tokens_per_second=_ratio(later_tokens, sum(decode)),
        speedup_vs_off=sum(off_seconds) / sum(seconds),
        median_speedup_vs_off=_median_ratio(off_seconds, seconds),
        decode_speedup_vs_off=_ratio(sum(off_decode), sum(decode)),
        median_decode_speedup_vs_off=_median_ratio(off_decode, decode),
        mean_acceptance_length=1 + _ratio(counts.accepted, counts.steps),
        tokens_per_pass=_ratio(counts.later_gains, counts.later_passes),
        draft_acceptance_rate=_ratio(counts.accepted, counts.drafted),
        acceptance_per_position=[_ratio(count, counts.steps) for count in counts.accepted_per_position],
        draft_tokens_per_step=_ratio(counts.drafted, counts.steps),
        drafted_share=_ratio(counts.steps, counts.later_passes),
        draft_us_per_pass=1e6 * _ratio(counts.draft_time, counts.later_passes),
        ttft_ms=1e3 * statistics.fmean(answer.ttft for answer in answers),
        tpot_ms=1e3 * _ratio(sum(decode), later_tokens),
        e2e_ms=1e3 * statistics.fmean(answer.e2e_seconds for answer in answers),
        structured=len([answer for answer in answers if answer.valid is not None]),
        finished=len([answer for answer in answers if answer.valid is not None and answer.finished]),
        valid=len([answer for answer in answers if answer.valid and answer.finished]),
        identical=not differing,
        differing_prompts=differing,
        failed_drafters=sorted({name for answer in answers for name in answer.failed_drafters}),
    )


class _Counts:
    """What drafting did in some answers, summed."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.steps = sum(answer.speculative.num_spec_steps for answer in answers)
        self.drafted = sum(answer.speculative.num_draft_tokens for answer in answers)
        self.accepted = sum(answer.speculative.num_accepted_draft_tokens for answer in answers)
        each = [answer.speculative.accepted_per_position for answer in answers]
        self.accepted_per_position = [sum(counts) for counts in zip_longest(*each, fillvalue=0)]
        self.draft_time = sum(answer.speculative.draft_time for answer in answers)
        self.later_gains = sum(sum(answer.gains[1:]) for answer in answers)
        self.later_passes = sum(len(answer.gains) - 1 for answer in answers)


def _bests(groups: Sequence[Sequence[Turn]], of: Callable[[Turn], float]) -> list[float]:
    """Each group's least value over the rounds."""
    return [min(of(turn) for turn in turns) for turns in groups]


def _median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the ratios; answers of one token have no decoding to compare."""
    pairs = zip(numerators, denominators, strict=True)
    return statistics.median([over / under for over, under in pairs if under > 0] or [1.0])


def _ratio(over: float, under: float) -> float:
    return over / under if under else 0.0
