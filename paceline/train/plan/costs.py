"""Seconds of the engine's steps, plain and with a head, at a concurrency."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from paceline.core.arrays import Int32Array
from paceline.core.params import SamplingParams
from paceline.llm import LLM
from paceline.train.objectives.objective import WriteHead
from paceline.train.plan.choose import StepCosts
from paceline.train.plan.vocabulary import restrict_vocabulary

PROMPT_TOKENS = 128
STEPS = 24  # timed steps of a round, if the context has room for them
ROUNDS = 4
KV_TOKENS = 1024  # of a request at most: its prompt, and the timed steps with whole blocks accepted

Load = Callable[[Any], LLM]  # an LLM for a speculative configuration


def measure_steps(
    load: Load,
    heads: Mapping[int, WriteHead],
    method: str,
    concurrency: int,
    drafts: Sequence[int],
    vocabularies: Sequence[Int32Array],
) -> StepCosts:
    """The best of several rounds, in turns, after an untimed one.

    Steps with a head, by its layers, draft each of these numbers of tokens for every request, with each of
    these vocabularies.
    """
    with TemporaryDirectory() as folder:
        engines = {(0, 0, 0): load("off")}
        for (layers, write), ids in product(heads.items(), vocabularies):
            write(path := Path(folder) / f"{layers}-{len(ids)}")
            restrict_vocabulary(path, ids)
            for count in drafts:
                # pilots are unsure: with a min_prob they would end their chains early, and look cheap
                options = {"method": method, "model": str(path), "num_speculative_tokens": count}
                engines[layers, len(ids), count] = load({**options, "min_prob": 0.0})
        jobs = {case: _timed(llm, concurrency) for case, llm in engines.items()}
        rounds = [{case: job() for case, job in jobs.items()} for _ in range(1 + ROUNDS)]
        best = {case: min(seconds[case] for seconds in rounds[1:]) for case in jobs}
        for llm in engines.values():
            llm.close()
    sizes = [len(ids) for ids in vocabularies]
    drafted = {
        layers: {size: {count: best[layers, size, count] for count in drafts} for size in sizes}
        for layers in heads
    }
    return StepCosts(best[0, 0, 0], drafted)


def _timed(llm: LLM, concurrency: int) -> Callable[[], float]:
    """A function that generates for `concurrency` requests and returns the mean seconds of a step."""
    limits = llm.engine.limits
    length = min(PROMPT_TOKENS, limits.max_model_len // 4)
    random = np.random.default_rng(0)
    prompts = random.integers(0, limits.vocab_size, (concurrency, length)).tolist()
    # a step gives more than one token where guesses are right; random texts seldom let them be
    params = SamplingParams(temperature=0.0, max_tokens=limits.max_model_len - length, ignore_eos=True)

    def run() -> float:
        engine = llm.engine
        requests = [request for prompt in prompts for request in engine.add_request(prompt, params)]
        while any(request.num_pending > 1 or not request.num_output for request in requests):
            engine.step()
        steps, start = 0, time.perf_counter()
        while steps < STEPS and not any(request.finished for request in requests):
            engine.step()
            steps += 1
        seconds = (time.perf_counter() - start) / max(1, steps)
        for request in requests:
            engine.abort(request.request_id)
        while engine.has_unfinished:
            engine.step()
        return seconds

    return run
