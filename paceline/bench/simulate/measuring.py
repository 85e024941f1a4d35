"""Prices of a model on this machine: its passes alone, and all else from a few steps of real engines."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.backends.base import Backend
from paceline.bench.run.engine_runner import Task
from paceline.bench.run.slices import Disturbances, OwnClock
from paceline.bench.run.turns import Slices, Turn
from paceline.bench.simulate.prices import (
    LONG,
    ROWS,
    Call,
    MeasuredPrices,
    PassSize,
    call_terms,
    fit,
    overhead_terms,
)
from paceline.control.cost import Float64Array, StepCosts
from paceline.control.cost.measure import chain_batch
from paceline.core.stats import StepStats
from paceline.engine.engine import Engine

PROMPT_ROWS = (32, 64, 128, 256, 512)
VERIFIED_ROWS = (*ROWS, 128)
ROUNDS = 4  # of which the quickest counts
IN_A_ROW = 5  # small passes: behind a large one the first few are slower on some processors
SMALL = 64  # rows
CONCURRENCY = (1, 4, 16)
STEPS = 24  # that are watched at each concurrency, beside those with prompts
ALONE = 20  # steps that what was measured alone counts for
PROMPT = 64  # most tokens of a prompt in them


@dataclass(frozen=True)
class Watched:
    """One step of a real engine."""

    stats: StepStats
    seconds: float  # of all of it, without what others on the machine took

    @property
    def own_seconds(self) -> float:
        """Without its drafters."""
        return self.seconds - self.stats.draft_time

    @property
    def is_telling(self) -> bool:
        """Whether most of it was its own: else nobody knows what of it was lost."""
        return self.own_seconds > 0.5 * self.stats.forward_time

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


class PassMeter:
    """Times passes of a backend alone, a few in each slice."""

    def __init__(
        self, backend: Backend, longest: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Contexts have at most `longest` tokens."""
        self._backend, self._clock = backend, clock
        most = min(backend.max_rows, longest // 2)
        self._context, self._few = min(LONG, most), min(8, most)
        self._pool = backend.make_pool(-(-max(most, self._context + self._few) // backend.page_size))
        self._verified = [rows for rows in VERIFIED_ROWS if rows <= most]
        self._prompts = [rows for rows in PROMPT_ROWS if rows <= most]
        self._batches = [
            *(chain_batch(self._pool, 0, rows, rows) for rows in self._verified),
            *(chain_batch(self._pool, 0, rows, 1) for rows in self._prompts),
            chain_batch(self._pool, self._context, 1, 1),
            chain_batch(self._pool, self._context, self._few, self._few),
        ]
        self._quickest = np.full(len(self._batches), np.inf)  # [batches] seconds

    def slices(self) -> Slices:
        self._backend.forward(chain_batch(self._pool, 0, self._context, 1))  # fills the pool
        for _ in range(ROUNDS):  # one after the other, so that a bad moment spoils none of them
            for place, batch in enumerate(self._batches):
                for _ in range(IN_A_ROW if batch.num_rows <= SMALL else 2):
                    start = self._clock()
                    self._backend.forward(batch)
                    self._quickest[place] = min(self._quickest[place], self._clock() - start)
                yield
        return Turn(0.0, [])

    def prices(self) -> MeasuredPrices:
        """Prices of passes; all else costs nothing yet."""
        verified = self._quickest[: len(self._verified)]
        prompts = self._quickest[len(self._verified) : -2]
        few = verified[self._verified.index(self._few)]
        one, several = (self._quickest[-2:] - [verified[0], few]) / self._context
        per_key = max(0.0, float(several - one)) / max(1, self._few - 1)
        # what rows read of each other is priced as keys, and not once more with the rows
        verified = np.maximum(verified - per_key * _own_keys(self._verified), verified[0])
        prompts = np.maximum(prompts - per_key * _own_keys(self._prompts), verified[0])
        return MeasuredPrices(
            verified=StepCosts(self._verified, _rising(verified)),
            prompts=StepCosts([1, *self._prompts], _rising(np.array([verified[0], *prompts]))),
            per_key=per_key,
            per_context=max(0.0, float(one) - per_key),
        )


def watching(
    engine: Engine,
    tasks: Sequence[Task],
    disturbances: Disturbances,
    watched: list[Watched],
    clock: Callable[[], float] = time.perf_counter,
    again: Callable[[], bool] = lambda: False,
) -> Slices:
    """Steps of an engine at several concurrencies, all added to `watched`; and once more, while `again`."""
    own = OwnClock(clock)
    arrived = itertools.count()
    for concurrency in itertools.cycle(CONCURRENCY):
        names = [str(next(arrived)) for _ in range(concurrency)]
        for name, task in zip(names, itertools.cycle(tasks), strict=False):
            engine.add_request(task.token_ids[:PROMPT], task.params, name)
        decoding = 0
        while engine.has_unfinished and decoding < STEPS:
            if own.slice_is_over:
                own.pause()
                yield
                own.go_on()
            start, before = own.now(), disturbances.waited()
            engine.step()
            seconds, waited = own.now() - start, disturbances.waited() - before
            step = Watched(engine.stats, seconds - disturbances.in_step(engine.stats, waited))
            if step.is_telling:
                watched.append(step)
            decoding += engine.stats.prefill_tokens == 0
        for name in names:
            engine.abort(name)
        if concurrency == CONCURRENCY[-1] and not again():
            break
    engine.close()
    return Turn(0.0, [])


def measure_prices(
    passes: MeasuredPrices, watched: Mapping[str, Sequence[Watched]], drafters: Sequence[str]
) -> dict[str, MeasuredPrices]:
    """The prices of each method's steps, by its label.

    In an engine, passes are slower than alone by a share that all methods have in common; what their steps
    take beyond that is each one's overhead. `drafters` are the methods that have one drafter and always ask
    it: its calls are priced from their steps.
    """
    labels = list(watched)
    few = len(overhead_terms(PassSize.chain(1)))
    width = 2 + few * len(labels)
    terms, seconds = [row for row in np.eye(2, width) for _ in range(ALONE)], [1.0] * 2 * ALONE
    for place, label in enumerate(labels):
        for step in watched[label]:
            own = np.zeros(width)
            own[int(step.size.has_prompts)] = passes.pass_seconds(step.size)
            own[2 + few * place : 2 + few * (place + 1)] = overhead_terms(step.size)
            terms.append(own)
            seconds.append(step.own_seconds)
    scale, prompt_scale, *overheads = fit(np.array(terms), np.array(seconds))
    drafts = {name: _draft_prices(name, watched[name]) for name in drafters}
    return {
        label: replace(
            passes,
            scale=scale,
            prompt_scale=prompt_scale,
            overhead=overheads[few * place : few * (place + 1)],
            drafts=drafts,
        )
        for place, label in enumerate(labels)
    }


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
