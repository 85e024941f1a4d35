"""What passes cost on this machine, measured when an engine starts and kept for the next time."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from paceline.backends.base import Backend
from paceline.control.cost import StepCosts
from paceline.control.memory import Memory
from paceline.core.forward import ForwardBatch, KVPool

ROWS = (1, 8, 4, 2, 16, 5, 9, 3, 6, 32, 12, 7, 17, 64, 24)  # the most telling first
LONG = 1024  # keys of the context that is held against an empty one
# Passes of up to so many rows are measured so often, others less; the quickest counts: what else the machine
# does can only slow them down.
SMALL, REPEATS_OF_SMALL, REPEATS = 16, 12, 3
SECONDS = 2.0  # that a measurement may take


def step_costs(backend: Backend, longest: int, memory: Memory) -> StepCosts:
    """The costs of this model here: as they are remembered, or measured now and kept.

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
    """The costs of passes of 1 to 64 rows over an empty context, and of what a long one adds."""
    rows_of_all = [rows for rows in ROWS if rows <= min(backend.max_rows, longest // 2)]
    context = max(1, min(LONG, backend.max_rows, longest // 2))
    pool = backend.make_pool(-(-(context + max(rows_of_all)) // backend.page_size))
    end = clock() + SECONDS
    backend.forward(chain_batch(pool, 0, context))  # fills the pool, and whatever caches there are
    longer = chain_batch(pool, context, min(8, max(rows_of_all)))
    batches = [chain_batch(pool, 0, rows) for rows in rows_of_all] + [longer]
    quickest = [float("inf")] * len(batches)
    for number in range(REPEATS_OF_SMALL):  # one after the other, so that a bad moment spoils none of them
        for place, batch in enumerate(batches):
            if batch.num_rows > SMALL and number >= REPEATS:
                continue
            if clock() < end or (quickest[place] == float("inf") and place in (0, 1, len(batches) - 1)):
                start = clock()
                backend.forward(batch)
                quickest[place] = min(quickest[place], clock() - start)
    found = dict(zip(rows_of_all, quickest, strict=False))
    per_key = max(0.0, quickest[-1] - found[longer.num_rows]) / (longer.num_rows * context)
    known = sorted(rows for rows, seconds in found.items() if seconds < float("inf"))
    # a pass is never slower than one of more rows: what seems so was disturbed
    seconds = np.minimum.accumulate([found[rows] for rows in reversed(known)])[::-1].tolist()
    if len(known) == 1:  # a pass has room for nothing more
        known, seconds = [1, 2], [seconds[0], 2 * seconds[0]]
    return StepCosts(known, seconds, per_key)


def chain_batch(pool: KVPool, context: int, rows: int, logits: int | None = None) -> ForwardBatch:
    """One request's chain, of whose last rows logits are wanted; None: of all that can be a draft's."""
    if logits is None:
        logits = rows if rows <= max(ROWS) else 1
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
