"""Engines whose requests have LoRA adapters, and what such requests get."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.build import LoadedModel, build_engine
from paceline.config import EngineConfig
from paceline.core.params import SamplingParams
from paceline.engine.engine import Engine
from tests.lossless.subject import Outcome

PROMPT = [*range(3, 15), 5, 6, 7, 5, 6]  # a page, and a row that is left to compute where it is found
TREE = {"method": "suffix", "num_speculative_tokens": 6, "branching": 2}


def make_engine(model: LoadedModel, folder: Path, method: Any, rows: int = 64) -> Engine:
    config = EngineConfig.from_options(
        model=str(folder),
        speculative_config=method,
        backend=model.backend.name,
        threads=1,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=rows,
    )
    return build_engine(config, model).engine


def outcomes_of(engine: Engine, names: Sequence[str], temperature: float) -> list[Outcome]:
    """The outcomes of requests with these adapters that run together, each asked twice."""
    params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=temperature, seed=3, logprobs=1)
    outcomes = []
    for name in [*names, *names]:
        outcomes.append(Outcome(engine.add_request(PROMPT, params, adapter=name)))
        engine.step()
    while engine.has_unfinished:
        engine.step()
    engine.close()
    return outcomes


def answers(engine: Engine, names: Sequence[str], temperature: float) -> list[str]:
    """The bytes of these outcomes."""
    return [repr(outcome.bytes()) for outcome in outcomes_of(engine, names, temperature)]


def requests_with_cached_pages(engine: Engine) -> list[bool]:
    """Whether each of five requests, one after another, found pages of an earlier one."""
    cached = []
    params = SamplingParams(max_tokens=2, temperature=0)
    for name, salt in (("", ""), ("a", ""), ("a", ""), ("b", ""), ("", "a\0")):
        (request,) = engine.add_request(PROMPT, params, adapter=name, cache_salt=salt)
        while engine.has_unfinished:
            engine.step()
        cached.append(request.num_cached_tokens > 0)
    engine.close()
    return cached
