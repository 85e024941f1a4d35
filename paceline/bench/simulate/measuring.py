"""Prices of a model on this machine: its passes alone, and all else from a few steps of real engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.backends.base import Backend, ForwardBatch, KVPool
from paceline.bench.engine_runner import Task
from paceline.bench.simulate.prices import (
    LONG,
    ROWS,
    MeasuredPrices,
    PassSize,
    call_terms,
    fit,
    overhead_terms,
)
from paceline.bench.slices import Disturbances
from paceline.bench.turns import Slices, Turn
from paceline.control.cost import Call, Float64Array, StepCosts
from paceline.engine.engine import Engine
from paceline.engine.stats import StepStats

PROMPT_ROWS = (32, 64, 128, 256, 512)
VERIFIED_ROWS = (*ROWS, 128)
ROUNDS = 3  # of which the quickest counts
IN_A_ROW = 5  # small passes: behind a large one the first few are slower on some processors
SMALL = 64  # rows
CONCURRENCY = (1, 4, 16)
STEPS = 24  # that are watched at each concurrency, beside those with prompts
PROMPT = 64  # most tokens of a prompt in them


@dataclass(frozen=True)
class Watched:
    """One step of a real engine."""

    stats: StepStats
    seconds: float  # of all of it

    @property
    def size(self) -> PassSize:
        """About: a step does not tell how its rows are spread over its requests."""
        stats = self.stats
        own = stats.rows * (stats.rows / stats.requests + 1) / 2
        return PassSize(
            stats.rows,
            stats.requests,
            stats.rows - stats.prefill_tokens,
            round(stats.attended * stats.requests / stats.rows),
            round(stats.attended + own),
        )


def measure_passes(
    backend: Backend, longest: int, clock: Callable[[], float] = time.perf_counter
) -> MeasuredPrices:
    """Prices of passes; all else costs nothing yet. Contexts have at most `longest` tokens."""
    most = min(backend.max_rows, longest // 2)
    context = min(LONG, most)
    few = min(8, most)
    pool = backend.make_pool(-(-max(most, context + few) // backend.page_size))
    verified = [rows for rows in VERIFIED_ROWS if rows <= most]
    prompts = [rows for rows in PROMPT_ROWS if rows <= most]
    batches = [
        *(_chain(pool, 0, rows, rows) for rows in verified),
        *(_chain(pool, 0, rows, 1) for rows in prompts),
        _chain(pool, context, 1, 1),
        _chain(pool, context, few, few),
    ]
    backend.forward(_chain(pool, 0, context, 1))  # fills the pool, and whatever caches there are
    quickest = np.full(len(batches), np.inf)  # [batches]
    for _ in range(ROUNDS):  # one after the other, so that a bad moment spoils none of them
        for place, batch in enumerate(batches):
            for _ in range(IN_A_ROW if batch.num_rows <= SMALL else 1):
                start = clock()
                backend.forward(batch)
                quickest[place] = min(quickest[place], clock() - start)
    first, last = quickest[: len(verified)], quickest[len(verified) : -2]
    one, several = (quickest[-2:] - [first[0], first[verified.index(few)]]) / context
    per_key = max(0.0, float(several - one)) / max(1, few - 1)
    # what rows read of each other is priced as keys, and not once more with the rows
    first = np.maximum(first - per_key * _own_keys(verified), first[0])
    last = np.maximum(last - per_key * _own_keys(prompts), first[0])
    return MeasuredPrices(
        verified=StepCosts(verified, _rising(first)),
        prompts=StepCosts([1, *prompts], _rising(np.array([first[0], *last]))),
        per_key=per_key,
        per_context=max(0.0, float(one) - per_key),
    )


def watching(
    engine: Engine,
    tasks: Sequence[Task],
    disturbances: Disturbances,
    watched: list[Watched],
    clock: Callable[[], float] = time.perf_counter,
) -> Slices:
    """Steps of an engine at several concurrencies, one in each slice, all added to `watched`."""
    for concurrency in CONCURRENCY:
        for number in range(concurrency):
            task = tasks[number % len(tasks)]
            engine.add_request(task.token_ids[:PROMPT], task.params, f"{concurrency}-{number}")
        decoding = 0
        while engine.has_unfinished and decoding < STEPS:
            start, before = clock(), disturbances.waited()
            engine.step()
            seconds, waited = clock() - start, disturbances.waited() - before
            watched.append(Watched(engine.stats, seconds - disturbances.in_step(engine.stats, waited)))
            decoding += engine.stats.prefill_tokens == 0
            yield
        for number in range(concurrency):
            engine.abort(f"{concurrency}-{number}")
    engine.close()
    return Turn(0.0, [])


def measure_prices(
    passes: MeasuredPrices, watched: Mapping[str, Sequence[Watched]], drafters: Sequence[str]
) -> dict[str, MeasuredPrices]:
    """The prices of each method's steps, by its label. `drafters` are the methods that have one drafter and
    always ask it: its calls are priced from their steps."""
    drafts = {name: _draft_prices(name, watched[name]) for name in drafters}
    return {label: _step_prices(replace(passes, drafts=drafts), steps) for label, steps in watched.items()}


def _step_prices(passes: MeasuredPrices, steps: Sequence[Watched]) -> MeasuredPrices:
    """The prices with the scale and the overhead of these steps."""
    terms = np.array([(passes.pass_seconds(step.size), *overhead_terms(step.size)) for step in steps])
    scale, *overhead = fit(terms, np.array([step.seconds - step.stats.draft_time for step in steps]))
    return replace(passes, scale=scale, overhead=overhead)


def _draft_prices(name: str, steps: Sequence[Watched]) -> list[float]:
    """[terms] of the calls of a drafter that was asked in every step."""
    drafted = [step.stats for step in steps if step.stats.prefill_tokens == 0]
    calls = [
        Call(name, stats.requests, max([draft.depth for draft in stats.drafts], default=0), stats.drafted)
        for stats in drafted
    ]
    return fit(np.array([call_terms(call) for call in calls]), np.array([one.draft_time for one in drafted]))


def _own_keys(rows: Sequence[int]) -> Float64Array:
    """[chains] keys that the rows of chains read of each other and of themselves."""
    return np.array([PassSize.chain(count).keys for count in rows], dtype=np.float64)


def _rising(seconds: Float64Array) -> list[float]:
    """A pass is never slower than one of more rows: what seems so was disturbed."""
    rising: list[float] = np.minimum.accumulate(seconds[::-1])[::-1].tolist()
    return rising


def _chain(pool: KVPool, context: int, rows: int, logits: int) -> ForwardBatch:
    """One request's chain, of whose last rows logits are wanted."""
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
