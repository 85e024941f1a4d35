"""Costs of a model on this machine: passes timed alone, everything else from steps of real engines."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.backends.base import Backend
from paceline.bench.run.engine_runner import Task
from paceline.bench.run.slices import ContestantClock, Disturbances
from paceline.bench.run.turns import Slices, Turn
from paceline.bench.simulate.costs import (
    LONG,
    ROWS,
    Call,
    MeasuredCosts,
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
ROUNDS = 4  # the fastest one counts
IN_A_ROW = 5  # small passes: after a large one, the first few are slower on some CPUs
SMALL = 64  # rows
CONCURRENCY = (1, 4, 16)
STEPS = 24  # timed at each concurrency, besides those with prompts
ALONE = 20  # steps that a pass timed alone weighs as much as
PROMPT = 64  # maximum tokens of a prompt in them


@dataclass(frozen=True)
class TimedStep:
    """One timed step of a real engine."""

    stats: StepStats
    seconds: float  # of the whole step, without time lost to other programs

    @property
    def seconds_without_drafting(self) -> float:
        """Seconds without its drafters."""
        return self.seconds - self.stats.draft_time

    @property
    def is_reliable(self) -> bool:
        """Whether it can be used: if most of its time was lost, the rest is not reliable."""
        return self.seconds_without_drafting > 0.5 * self.stats.forward_time

    @property
    def size(self) -> PassSize:
        """Estimated: the statistics do not tell how rows are distributed over requests."""
        stats = self.stats
        keys_of_rows = stats.rows * (stats.rows / stats.requests + 1) / 2
        return PassSize(
            stats.rows,
            stats.requests,
            stats.rows - stats.prefill_tokens,
            round(stats.attended * stats.requests / stats.rows),
            round(stats.attended + keys_of_rows),
        )


class PassMeter:
    """Times passes of a backend alone, a few per slice."""

    def __init__(
        self, backend: Backend, longest: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`longest`: maximum tokens of a context."""
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
        self._backend.forward(chain_batch(self._pool, 0, self._context, 1))  # fill the pool
        for _ in range(ROUNDS):  # interleaved, so that a disturbance does not hit one size only
            for index, batch in enumerate(self._batches):
                for _ in range(IN_A_ROW if batch.num_rows <= SMALL else 2):
                    start = self._clock()
                    self._backend.forward(batch)
                    self._quickest[index] = min(self._quickest[index], self._clock() - start)
                yield
        return Turn(0.0, [])

    def costs(self) -> MeasuredCosts:
        """Costs of passes; everything else is still free."""
        verified = self._quickest[: len(self._verified)]
        prompts = self._quickest[len(self._verified) : -2]
        few = verified[self._verified.index(self._few)]
        one_context, few_contexts = (self._quickest[-2:] - [verified[0], few]) / self._context
        per_key = max(0.0, float(few_contexts - one_context)) / max(1, self._few - 1)
        # keys that rows read of each other are priced as keys, not again with the rows
        verified = np.maximum(verified - per_key * _own_keys(self._verified), verified[0])
        prompts = np.maximum(prompts - per_key * _own_keys(self._prompts), verified[0])
        return MeasuredCosts(
            verified=StepCosts(self._verified, _rising(verified)),
            prompts=StepCosts([1, *self._prompts], _rising(np.array([verified[0], *prompts]))),
            per_key=per_key,
            per_context=max(0.0, float(one_context) - per_key),
        )


def watching(
    engine: Engine,
    tasks: Sequence[Task],
    disturbances: Disturbances,
    watched: list[TimedStep],
    clock: Callable[[], float] = time.perf_counter,
    again: Callable[[], bool] = lambda: False,
) -> Slices:
    """Steps of an engine at several concurrencies, appended to `watched`; repeated while `again` is true."""
    own_clock = ContestantClock(clock)
    arrived = itertools.count()
    for concurrency in itertools.cycle(CONCURRENCY):
        names = [str(next(arrived)) for _ in range(concurrency)]
        for name, task in zip(names, itertools.cycle(tasks), strict=False):
            engine.add_request(task.token_ids[:PROMPT], task.params, name)
        decoding = 0
        while engine.has_unfinished and decoding < STEPS:
            if own_clock.slice_is_over:
                own_clock.pause()
                yield
                own_clock.resume()
            start, before = own_clock.now(), disturbances.waited()
            engine.step()
            seconds, waited = own_clock.now() - start, disturbances.waited() - before
            step = TimedStep(engine.stats, seconds - disturbances.in_step(engine.stats, waited))
            if step.is_reliable:
                watched.append(step)
            decoding += engine.stats.prefill_tokens == 0
        for name in names:
            engine.abort(name)
        if concurrency == CONCURRENCY[-1] and not again():
            break
    engine.close()
    return Turn(0.0, [])


def measure_costs(
    passes: MeasuredCosts, watched: Mapping[str, Sequence[TimedStep]], drafters: Sequence[str]
) -> dict[str, MeasuredCosts]:
    """The costs of each method's steps, by label.

    In an engine, passes are slower than alone by a factor that all methods share; what a step takes beyond
    that is the method's overhead. `drafters` are the methods with one drafter that drafts in every step: its
    calls are priced from their steps.
    """
    labels = list(watched)
    num_terms = len(overhead_terms(PassSize.chain(1)))
    width = 2 + num_terms * len(labels)
    terms, seconds = [row for row in np.eye(2, width) for _ in range(ALONE)], [1.0] * 2 * ALONE
    for index, label in enumerate(labels):
        for step in watched[label]:
            step_terms = np.zeros(width)
            step_terms[int(step.size.has_prompts)] = passes.pass_seconds(step.size)
            step_terms[2 + num_terms * index : 2 + num_terms * (index + 1)] = overhead_terms(step.size)
            terms.append(step_terms)
            seconds.append(step.seconds_without_drafting)
    scale, prompt_scale, *overheads = fit(np.array(terms), np.array(seconds))
    drafts = {name: _draft_costs(name, watched[name]) for name in drafters}
    return {
        label: replace(
            passes,
            scale=scale,
            prompt_scale=prompt_scale,
            overhead=overheads[num_terms * index : num_terms * (index + 1)],
            drafts=drafts,
        )
        for index, label in enumerate(labels)
    }


def _draft_costs(name: str, steps: Sequence[TimedStep]) -> list[float]:
    """[terms] costs of a drafter's calls, from steps that all drafted."""
    drafted = [step.stats for step in steps if step.stats.prefill_tokens == 0]
    calls = [
        Call(name, stats.requests, max([draft.depth for draft in stats.drafts], default=0), stats.drafted)
        for stats in drafted
    ]
    return fit(
        np.array([call_terms(call) for call in calls]), np.array([stats.draft_time for stats in drafted])
    )


def _own_keys(rows: Sequence[int]) -> Float64Array:
    """[chains] keys that the rows of a chain read of each other and of themselves."""
    return np.array([PassSize.chain(count).keys for count in rows], dtype=np.float64)


def _rising(seconds: Float64Array) -> list[float]:
    """Running maximum: a pass is never slower than one with more rows, unless it was disturbed."""
    rising: list[float] = np.minimum.accumulate(seconds[::-1])[::-1].tolist()
    return rising
