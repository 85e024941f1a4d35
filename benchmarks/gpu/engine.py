"""Whole requests through the engine on a CUDA device: the time to their first tokens, and to all of them.

`benchmarks gpu` measures steps of the decode loop alone. Here requests arrive at once, are prefilled in
passes of `max_num_batched_tokens` rows, and decode; the host works between passes. Weights are random.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.gpu.measure import random_weights
from benchmarks.gpu.plan import SHAPES
from paceline.backends.cuda.backend import PAGE_SIZE, CudaBackend
from paceline.backends.cuda.weights.model_weights import load_weights
from paceline.bench.simulate.world import CountingTokenizer
from paceline.core.params import SamplingParams
from paceline.engine.admission import Limits
from paceline.engine.engine import Engine, target_cache
from paceline.errors import BackendError, ConfigError

WARM_UP = 2  # runs that are not timed: the first compiles kernels and captures graphs


@dataclass(frozen=True)
class Burst:
    """Requests that arrive at once."""

    requests: int
    prompt_tokens: int
    output_tokens: int = 1

    @property
    def longest(self) -> int:
        """Tokens of a request, prompt and output."""
        return self.prompt_tokens + self.output_tokens + 1


@dataclass(frozen=True)
class Served:
    """The times of one burst, in milliseconds: the median over runs."""

    shape: str
    burst: Burst
    rows: int  # of a pass, at most
    first_token: float  # until every request has its first token
    all_tokens: float  # until every request has all of its tokens

    @property
    def step(self) -> float:
        """Milliseconds per token of each request, prefill included."""
        return self.all_tokens / self.burst.output_tokens

    @property
    def decode_step(self) -> float | None:
        """Milliseconds per token after the first; None if there are no more."""
        more = self.burst.output_tokens - 1
        return (self.all_tokens - self.first_token) / more if more else None


def parse_burst(text: str, output_tokens: int) -> Burst:
    """The burst of a text like 64x128: requests times prompt tokens."""
    requests, _, tokens = text.strip().partition("x")
    if not (requests.isdigit() and tokens.isdigit() and int(requests) and int(tokens)):
        raise ConfigError(f"a burst is requests x prompt tokens, such as 64x128, not {text.strip()!r}.")
    return Burst(int(requests), int(tokens), output_tokens)


def measure_engine(
    shape: str, bursts: Sequence[Burst], rows: int, runs: int, on_line: Callable[[Served], None]
) -> list[Served]:
    """The times of bursts, one after the other, with passes of at most `rows` rows."""
    if not torch.cuda.is_available():
        raise BackendError(
            "`python -m benchmarks gpu-engine` needs a CUDA device, and torch sees none: run it where there "
            "is one, with a torch build for CUDA."
        )
    device, config = torch.device("cuda"), SHAPES[shape]
    backend = CudaBackend(load_weights(config, random_weights(config, device)), rows)
    lines = []
    for burst in bursts:
        engine = make_engine(backend, burst, rows)
        times = [serve(engine, burst, seed) for seed in range(WARM_UP + runs)][WARM_UP:]
        first, last = (1e3 * float(np.median(part)) for part in zip(*times, strict=True))
        engine.close()
        lines.append(Served(shape, burst, rows, first, last))
        on_line(lines[-1])
    return lines


def make_engine(backend: CudaBackend, burst: Burst, rows: int) -> Engine:
    """An engine without drafts or prefix caching that has room for a burst."""
    limits = Limits(backend.config.vocab_size, burst.longest, burst.requests, max(rows, burst.requests))
    num_pages = burst.requests * (-(-burst.longest // PAGE_SIZE) + 4)
    kv = target_cache(backend, limits, num_pages, enable_prefix_caching=False)
    return Engine(backend, CountingTokenizer(), limits, kv)


def serve(engine: Engine, burst: Burst, seed: int) -> tuple[float, float]:
    """Seconds until every request of a burst has its first token, and until all have all tokens."""
    size = (burst.requests, burst.prompt_tokens)
    prompts = np.random.default_rng(seed).integers(0, engine.limits.vocab_size, size).tolist()
    params = SamplingParams(temperature=0, max_tokens=burst.output_tokens, ignore_eos=True)
    torch.cuda.synchronize()
    start = time.perf_counter()
    requests = [own for prompt in prompts for own in engine.add_request(prompt, params)]
    first: float | None = None
    while engine.has_unfinished:
        engine.step()
        if first is None and all(request.num_output for request in requests):
            first = time.perf_counter() - start
    assert first is not None
    assert all(request.error is None for request in requests)
    return first, time.perf_counter() - start
