"""Measures the seconds of passes at start-up, and stores them for later starts."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from paceline.backends.base import Backend
from paceline.control.config import CONFIG
from paceline.control.cost.passes import StepCosts
from paceline.control.memory import Memory
from paceline.core.forward import ForwardBatch, KVPool


def step_costs(backend: Backend, longest: int, memory: Memory) -> StepCosts:
    """The pass costs of this model on this machine: from memory, or measured now and kept.

    Contexts have at most `longest` tokens.
    """
    kept = memory.read()
    try:
        return StepCosts.from_facts(kept["steps"])
    except (KeyError, TypeError, ValueError, OverflowError):
        costs = measure_steps(backend, longest)
        memory.write({**kept, "steps": costs.facts()})
        return costs


def measure_steps(
    backend: Backend, longest: int, clock: Callable[[], float] = time.perf_counter
) -> StepCosts:
    """The costs of passes of 1 to 128 rows over an empty context, and what a long context adds."""
    config = CONFIG.measure
    row_counts = [rows for rows in config.rows if rows <= min(backend.max_rows, longest // 2)]
    context = max(1, min(config.long_context, backend.max_rows, longest // 2))
    pool = backend.make_pool(-(-(context + max(row_counts)) // backend.page_size))
    filling = chain_batch(pool, 0, context)  # fills the pool, and warms caches
    longer = chain_batch(pool, context, min(8, max(row_counts)))
    batches = [chain_batch(pool, 0, rows) for rows in row_counts] + [longer]
    # otherwise the first pass of a size would be timed with its compilation, and stored for later starts
    backend.compile_ahead(lambda: [backend.forward(batch) for batch in (filling, *batches)])
    end = clock() + config.max_seconds
    backend.forward(filling)
    fastest = [float("inf")] * len(batches)
    for repeat in range(config.small_repeats):  # interleaved, so that a busy moment spoils none of them
        for place, batch in enumerate(batches):
            if repeat >= _repeats(batch.num_rows):
                continue
            if clock() < end or (fastest[place] == float("inf") and place in (0, 1, len(batches) - 1)):
                start = clock()
                backend.forward(batch)
                fastest[place] = min(fastest[place], clock() - start)
    found = dict(zip(row_counts, fastest, strict=False))
    per_key = max(0.0, fastest[-1] - found[longer.num_rows]) / (longer.num_rows * context)
    known = sorted(rows for rows, seconds in found.items() if seconds < float("inf"))
    # a pass is never slower than one of more rows: if it looks so, it was preempted
    seconds = np.minimum.accumulate([found[rows] for rows in reversed(known)])[::-1].tolist()
    if len(known) == 1:  # the backend runs one row at a time
        known, seconds = [1, 2], [seconds[0], 2 * seconds[0]]
    return StepCosts(known, seconds, per_key)


def _repeats(rows: int) -> int:
    """How often a pass of this many rows is timed."""
    config = CONFIG.measure
    if rows > config.large_pass:
        return config.large_repeats
    return config.repeats if rows > config.small_pass else config.small_repeats


def chain_batch(pool: KVPool, context: int, rows: int, logits: int | None = None) -> ForwardBatch:
    """A batch of one request's chain, with logits of its last rows; None: of all, if it may be a draft."""
    if logits is None:
        logits = rows if rows <= max(CONFIG.measure.rows) else 1
    count = np.arange(rows, dtype=np.int32)
    return ForwardBatch(
        tokens=np.zeros(rows, dtype=np.int32),
        positions=context + count,
        parents=count - 1,
        row_offsets=np.array([0, rows], dtype=np.int32),
        context_lengths=np.array([context], dtype=np.int32),
        page_tables=np.arange(pool.num_pages, dtype=np.int32)[None],
        logit_rows=count[-logits:],
        pool=pool,
    )
