"""The checks of `paceline readiness`: each looks at what was measured, and gives a verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from paceline.bench.readiness.measure import SHORT_ANSWER, Measured
from paceline.bench.run.rows import Row
from paceline.bench.run.wording import ends, shown, with_interval

MIN_PROMPTS = 20
SWITCHED_OFF = '"speculative": "off"'  # in the body of a request
# Limits as (warn, fail): a value beyond the first is a warning, beyond the second a failure.
MIN_GAIN = (1.05, 0.97)  # speedup at the concurrency: below 1.05 drafting is not worth its memory
MIN_HOLD = (0.99, 0.95)  # speedup where drafting need not gain, but must not cost
MAX_FIRST_TOKEN = (1.1, 1.25)  # first token, relative to plain decoding
MAX_GAP = (2.0, 4.0)  # gaps, the same: a piece has several tokens, so it may take longer
MIN_COVERAGE = (0.97, 0.8)  # of the answers' tokens by a head's vocabulary
MAX_MEMORY = (0.15, 0.4)  # weights of the drafter, relative to the target's
MAX_KV_SHARE = (0.25, 0.5)  # of its keys and values, relative to the target's


class Verdict(Enum):
    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""  # what to do about a warning or a failure


def checks(measured: Measured) -> list[Check]:
    """All checks, in the order in which an operator reads them."""
    return [check(measured) for check in CHECKS]


def _at_most(value: float, limits: tuple[float, float]) -> Verdict:
    warn, fail = limits
    return Verdict.PASS if value <= warn else Verdict.WARN if value <= fail else Verdict.FAIL


def _at_least(value: float, limits: tuple[float, float]) -> Verdict:
    return _at_most(-value, (-limits[0], -limits[1]))


def _speedup_check(name: str, row: Row, limits: tuple[float, float], remedy: str) -> Check:
    """A check of a row's speedup; a warning if its confidence interval includes the limit of failing."""
    speedup, fail = row.speedup_vs_off or 0.0, limits[1]
    low, high = row.speedup_interval or (speedup, speedup)
    found = f"{with_interval(row)} times plain decoding"
    if low < fail <= high:
        return Check(
            name,
            Verdict.WARN,
            f"{found}: not sure",
            f"Below {fail} it would fail, and the interval includes that: measure with more prompts or "
            "--rounds, with nothing else running.",
        )
    return Check(name, _at_least(speedup, limits), found, remedy)


def _same_bytes(measured: Measured) -> Check:
    contests = [measured.contest, measured.short, *([measured.structured] if measured.structured else [])]
    rows = [measured.total(contest)[1] for contest in contests] + [measured.total(measured.contest, 2)[1]]
    differing = sorted({name for row in rows for name in row.differing_prompts})
    compared = sum(row.prompts for row in rows)
    if not differing:
        return Check("same bytes on and off", Verdict.PASS, f"{compared} answers, none differs")
    exact = measured.method not in measured.contest.inexact
    return Check(
        "same bytes on and off",
        Verdict.FAIL if exact else Verdict.WARN,
        f"{len(differing)} prompts differ, such as {differing[0]}",
        "This is a bug: please report it with the prompt."
        if exact
        else "This verification rule keeps the distribution only: use pathwise, the default, for same bytes.",
    )


def _speedup(measured: Measured) -> Check:
    return _speedup_check(
        f"speedup at {measured.concurrency} at once",
        measured.total(measured.contest)[1],
        MIN_GAIN,
        f"Try other drafters (`paceline tune MODEL --data FILE --concurrency {measured.concurrency}`), or "
        "train a head on this traffic (`paceline train --help`).",
    )


def _speedup_at_twice(measured: Measured) -> Check:
    return _speedup_check(
        f"speedup at {2 * measured.concurrency} at once",
        measured.total(measured.contest, 2)[1],
        MIN_HOLD,
        "auto drafts less under load and still loses here: name one drafter by --draft, or serve such a load "
        "with --draft off."
        if measured.auto
        else "Use --draft auto, which drafts less under load, or fewer num_speculative_tokens.",
    )


def _latency(name: str, figure: str, limits: tuple[float, float], remedy: str) -> Callable[[Measured], Check]:
    """A check of p50 and p99 with drafting, relative to those of plain decoding."""

    def check(measured: Measured) -> Check:
        off, on = (row.percentiles[figure] for row in measured.total(measured.contest))
        if off is None or on is None:
            return Check(name, Verdict.WARN, "every answer came in one piece", "Use longer answers.")
        worst = max(on[key] / off[key] for key in ("p50", "p99") if off[key] > 0)
        return Check(name, _at_most(worst, limits), f"off {ends(off)}, on {ends(on)} ms", remedy)

    return check


def _short_answers(measured: Measured) -> Check:
    return _speedup_check(
        f"short answers ({SHORT_ANSWER} tokens)",
        measured.total(measured.short)[1],
        MIN_HOLD,
        f"Send such requests with `{SWITCHED_OFF}`{_or_auto(measured)}.",
    )


def _segments(measured: Measured) -> Check:
    rows = measured.rows(measured.contest)
    named = {segment: on for segment, (_, on) in rows.items() if segment != "all"}
    verdicts = {segment: _at_least(on.speedup_vs_off or 0, MIN_HOLD) for segment, on in named.items()}
    slow = [segment for segment, verdict in verdicts.items() if verdict is not Verdict.PASS]
    slowest = min(named, key=lambda segment: named[segment].speedup_vs_off or 0)
    return Check(
        "acceptance by segment",
        Verdict.WARN if slow else Verdict.PASS,
        f"slowest of {len(named)}: {slowest}, {with_interval(named[slowest])} times",
        f"Slower with drafting: {', '.join(slow)}. Send these with `{SWITCHED_OFF}`{_or_auto(measured)}.",
    )


def _positions(measured: Measured) -> Check:
    row = measured.total(measured.contest)[1]
    shares = row.acceptance_per_position
    if not shares:
        return Check(
            "acceptance by position",
            Verdict.WARN,
            "nothing was drafted",
            "auto found no gain here. Name a drafter by --draft to see its acceptance."
            if measured.auto
            else f"{measured.method} found nothing in this traffic: name another drafter by --draft.",
        )
    first = shares[0]
    return Check(
        "acceptance by position",
        Verdict.PASS if first >= 0.3 else Verdict.WARN,
        f"{' '.join(f'{100 * share:.0f}' for share in shares[:8])} %; length {_length(row)}",
        "Fewer than 30 % of drafts are right at all: train a head on this traffic, or use another drafter.",
    )


def _structured(measured: Measured) -> Check:
    name = "structured outputs valid"
    if measured.structured_error:
        return Check(name, Verdict.WARN, "not checked", measured.structured_error)
    contest = measured.structured or measured.contest
    row = measured.total(contest)[1]
    own = measured.own_traffic and measured.structured is None
    whose = "your prompts" if own else "built-in prompts"
    if row.finished == 0:
        return Check(
            name,
            Verdict.WARN,
            f"no answer to {whose} finished",
            "Raise max_tokens in the data."
            if own
            else "Give prompts with a response_format, and max_tokens for a whole answer, by --data.",
        )
    return Check(
        name,
        Verdict.PASS if row.valid == row.finished else Verdict.FAIL,
        f"{row.valid} of {row.finished} finished answers to {whose}",
        "This is a bug: please report it with the schema.",
    )


def _head_fits(measured: Measured) -> Check:
    heads = [drafter for drafter in measured.drafters if drafter.has_head]
    unknown = [drafter.name for drafter in heads if not drafter.known_target]
    if unknown:
        return Check(
            "head fits the target",
            Verdict.WARN,
            f"{', '.join(unknown)}: the sizes fit, the file does not name its target",
            "Make sure that the head was trained for exactly these weights; acceptance tells.",
        )
    found = f"{', '.join(head.name for head in heads)}: fingerprint matches" if heads else "no head is loaded"
    return Check("head fits the target", Verdict.PASS, found)


def _vocabulary(measured: Measured) -> Check:
    shares = {item.name: item.coverage for item in measured.drafters if item.coverage is not None}
    name = "vocabulary covers the answers"
    if not shares:
        return Check(name, Verdict.PASS, "every token can be drafted")
    lowest = min(shares.values())
    return Check(
        name,
        _at_least(lowest, MIN_COVERAGE),
        ", ".join(f"{drafter}: {share:.1%} of tokens" for drafter, share in shares.items()),
        "The head cannot guess the other tokens: train one with a larger --draft-vocab-size on this traffic.",
    )


def _memory(measured: Measured) -> Check:
    weight_bytes = sum(drafter.weight_bytes for drafter in measured.drafters)
    share = weight_bytes / max(1, measured.target_bytes)
    kv_share = sum(drafter.kv_share for drafter in measured.drafters)
    verdicts = (_at_most(share, MAX_MEMORY), _at_most(kv_share, MAX_KV_SHARE))
    # only the KV cache depends on these flags
    lower = "" if verdicts[1] is Verdict.PASS else ", or lower --max-num-seqs or --max-model-len"
    return Check(
        "memory of the drafter",
        max(verdicts, key=list(Verdict).index),
        f"weights {weight_bytes / 1e6:,.0f} MB, {share:.0%} of the model's; KV cache +{kv_share:.0%}",
        f"Use a drafter without weights (--draft suffix or ngram), or a smaller one{lower}.",
    )


def _failures(measured: Measured) -> Check:
    rows = [row for contest in (measured.contest, measured.short) for row in contest.rows]
    failed = sorted({name for row in rows for name in row.failed_drafters})
    return Check(
        "drafters that failed",
        Verdict.FAIL if failed else Verdict.PASS,
        ", ".join(failed) or "none",
        "Their requests continued with plain decoding; the log has the traceback.",
    )


def _prompts(measured: Measured) -> Check:
    prompts = measured.total(measured.contest)[0].prompts
    wanted = max(MIN_PROMPTS, 2 * measured.concurrency)
    if not measured.own_traffic:
        return Check(
            "your own traffic",
            Verdict.WARN,
            f"{prompts} built-in prompts",
            "Speculation depends on the traffic: give a file of your own prompts by --data.",
        )
    return Check(
        "your own traffic",
        Verdict.PASS if prompts >= wanted else Verdict.WARN,
        f"{prompts} prompts",
        f"Give at least {wanted}, so that {2 * measured.concurrency} can run at once and percentiles mean "
        "something.",
    )


def _or_auto(measured: Measured) -> str:
    """The end of a remedy: auto, unless that is what was measured."""
    return "" if measured.auto else ", or use --draft auto"


def _length(row: Row) -> str:
    return shown(row.mean_acceptance_length, ".2f")


CHECKS: tuple[Callable[[Measured], Check], ...] = (
    _same_bytes,
    _speedup,
    _speedup_at_twice,
    _latency(
        "first token, p50 / p99",
        "ttft_ms",
        MAX_FIRST_TOKEN,
        "Lower --max-num-batched-tokens or num_speculative_tokens, so that prompts wait less.",
    ),
    _latency(
        "gaps between pieces, p50 / p99",
        "inter_token_ms",
        MAX_GAP,
        "A piece has several tokens. If gaps matter more than speed, use fewer num_speculative_tokens.",
    ),
    _short_answers,
    _segments,
    _positions,
    _structured,
    _head_fits,
    _vocabulary,
    _memory,
    _failures,
    _prompts,
)
