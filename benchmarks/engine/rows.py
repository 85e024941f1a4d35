"""The cost of a pass over several rows relative to one row, which speculation depends on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.turns import take_turns
from paceline.backends.base import Backend
from paceline.bench.timing import OnTurn, Timing
from paceline.core.forward import ForwardBatch, KVPool, chain_parents
from paceline.errors import ConfigError
from paceline.options import check_integer

DEFAULT_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class RowCosts:
    """Times of one pass, by its number of rows."""

    timings: dict[int, Timing]

    def facts(self) -> list[dict[str, float]]:
        """One entry per number of rows, for JSON; `ratio` compares best times with 1 row."""
        single = self.timings[1]
        return [
            {
                "rows": rows,
                "ms": 1e3 * timing.best,
                "median_ms": 1e3 * timing.median,
                "ratio": timing.best / single.best,
                "median_ratio": timing.median / single.median,
            }
            for rows, timing in self.timings.items()
        ]


def measure_rows(
    backend: Backend,
    token_ids: Sequence[int],
    max_position: int,
    counts: Sequence[int] = DEFAULT_ROWS,
    context: int = 64,
    rounds: int = 20,
    on_turn: OnTurn = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> RowCosts:
    """Times of one request's pass over a chain of n rows with logits for all, for each n and always for 1.

    `context` tokens are committed before; the rows never are, so every pass is the same. The numbers of
    rows take turns, after one untimed pass each. `clock` tells the seconds.
    """
    for count in counts:
        check_integer(ConfigError, "a number of rows", count, 1, backend.max_rows)
    distinct = sorted({1, *counts})
    check_integer(ConfigError, "context", context, 0, max_position - distinct[-1], "The rows come after it.")
    check_integer(ConfigError, "rounds", rounds, 1, None)
    length = context + distinct[-1]
    tokens = np.resize(np.asarray(token_ids, dtype=np.int32), length)  # repeated if it is too short
    pool = backend.make_pool(-(-length // backend.page_size))
    for start in range(0, context, backend.max_rows):
        backend.forward(chain(tokens, start, min(backend.max_rows, context - start), pool, all_logits=False))
    jobs = {count: _timed_pass(backend, chain(tokens, context, count, pool), clock) for count in distinct}
    take_turns(jobs, 1)
    seconds = take_turns(jobs, rounds, lambda done: on_turn(f"rows: {done}"))
    return RowCosts({count: Timing(tuple(times)) for count, times in seconds.items()})


def _timed_pass(backend: Backend, batch: ForwardBatch, clock: Callable[[], float]) -> Callable[[], float]:
    def run() -> float:
        start = clock()
        backend.forward(batch)
        return clock() - start

    return run


def chain(
    tokens: np.ndarray[tuple[int], np.dtype[np.int32]],
    context: int,
    rows: int,
    pool: KVPool,
    all_logits: bool = True,
) -> ForwardBatch:
    """A pass over `rows` tokens after `context` committed ones, in consecutive pages."""
    return ForwardBatch(
        tokens=tokens[context : context + rows],
        positions=np.arange(context, context + rows, dtype=np.int32),
        parents=chain_parents([rows]),
        row_offsets=np.array([0, rows], dtype=np.int32),
        context_lengths=np.array([context], dtype=np.int32),
        page_tables=np.arange(pool.num_pages, dtype=np.int32)[None, :],
        logit_rows=np.arange(0 if all_logits else rows - 1, rows, dtype=np.int32),
        pool=pool,
    )
