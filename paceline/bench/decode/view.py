"""`paceline bench decode`: its result as a table, notes and facts."""

from __future__ import annotations

import statistics

from paceline.bench.decode.measure import Contest, DecodeOptions, Measured
from paceline.bench.report.result import Result, Table
from paceline.bench.timing import Timing


def decode_result(contest: Contest) -> Result:
    """Both contestants' speeds, and their ratio."""
    options, peer = contest.options, contest.peer
    title = f"{options.model}: greedy, batch 1, best and median of {options.rounds}, in turns"
    columns = ["tokens per second", "paceline"]
    if peer is not None:
        columns += [f"{options.peer} {peer.facts['version']}", "ratio"]

    def row(what: str, tokens: int, decode: bool, best: bool) -> list[str]:
        def seconds(measured: Measured) -> float:
            timing = measured.decode if decode else measured.prefill
            return timing.best if best else timing.median

        speeds = [
            f"{tokens / seconds(measured):,.1f}"
            for measured in (contest.paceline, peer)
            if measured is not None
        ]
        ratio = contest.ratio(seconds)
        return [what, *speeds, *([] if ratio is None else [f"{ratio:.2f}"])]

    rows = [
        row(f"decode {options.tokens}, best", options.tokens, decode=True, best=True),
        row(f"decode {options.tokens}, median", options.tokens, decode=True, best=False),
        row(f"prefill {options.prefill}, best", options.prefill, decode=False, best=True),
        row(f"prefill {options.prefill}, median", options.prefill, decode=False, best=False),
    ]
    return Result(title, [Table(title, columns, rows)], decode_facts(contest), notes=_notes(contest))


def _notes(contest: Contest) -> list[str]:
    """Further findings, one per line."""
    ours, options, fresh = contest.paceline, contest.options, contest.fresh_start
    notes = [
        f"time per token: best {1e3 * ours.decode.best / options.tokens:.2f} ms, "
        f"median {1e3 * ours.decode.median / options.tokens:.2f} ms",
        f"overhead per step, outside the pass: best {1e3 * ours.overhead.best:.3f} ms, "
        f"median {1e3 * ours.overhead.median:.3f} ms",
        f"from process start to first token: {fresh.seconds:.2f} s (compile cache warm)",
        f"peak memory: {fresh.peak_memory_bytes / 1e6:,.0f} MB",
    ]
    if contest.peer is not None:
        notes.append(
            f"both chose the same first {contest.agreeing_tokens} of {len(ours.token_ids)} tokens "
            "(their roundings differ)"
        )
    if contest.peer_handicap is not None:
        notes.append(f"{options.peer} ran under a handicap: {contest.peer_handicap}")
    if contest.peer_error is not None:
        notes.append(f"no numbers of {options.peer}: {contest.peer_error}")
    return notes


def decode_facts(contest: Contest) -> dict[str, object]:
    """The contest for JSON. Ratios above 1: paceline is faster."""
    options = contest.options
    return {
        "model": options.model,
        "threads": contest.threads,
        "quantization": contest.paceline.facts["quantization"],
        "tokens": options.tokens,
        "prompt_tokens": options.prompt_tokens,
        "prefill_tokens": options.prefill,
        "rounds": options.rounds,
        "paceline": {
            **_result_facts(contest.paceline, options),
            "overhead_ms": _milliseconds(contest.paceline.overhead),
            "start_to_first_token_seconds": contest.fresh_start.seconds,
            "peak_memory_bytes": contest.fresh_start.peak_memory_bytes,
        },
        "peer": None
        if contest.peer is None
        else {"name": options.peer, **_result_facts(contest.peer, options)},
        "peer_error": contest.peer_error,
        "peer_handicap": contest.peer_handicap,
        "ratio": {
            "decode": {
                "best": contest.ratio(lambda result: result.decode.best),
                "median": contest.ratio(lambda result: result.decode.median),
            },
            "prefill": {
                "best": contest.ratio(lambda result: result.prefill.best),
                "median": contest.ratio(lambda result: result.prefill.median),
            },
        },
        "agreeing_tokens": None if contest.peer is None else contest.agreeing_tokens,
    }


def _result_facts(result: Measured, options: DecodeOptions) -> dict[str, object]:
    return {
        **result.facts,
        "decode": _speed(result.decode, options.tokens),
        "prefill": _speed(result.prefill, options.prefill),
    }


def _speed(timing: Timing, tokens: int) -> dict[str, object]:
    return {
        "tokens_per_second": {"best": tokens / timing.best, "median": tokens / timing.median},
        "ms_per_token": {"best": 1e3 * timing.best / tokens, "median": 1e3 * timing.median / tokens},
        "seconds": list(timing.seconds),
    }


def _milliseconds(timing: Timing) -> dict[str, float]:
    return {
        "best": 1e3 * timing.best,
        "median": 1e3 * timing.median,
        "mean": 1e3 * statistics.fmean(timing.seconds),
    }
