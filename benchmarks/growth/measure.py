"""Times of passes along four curves: context, requests, tree, prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from benchmarks.growth.floor import Floor, Load
from benchmarks.turns import take_turns
from paceline.backends.base import Backend
from paceline.bench.timing import OnTurn, Timing
from paceline.core.forward import ForwardBatch, KVPool
from paceline.errors import ConfigError

SHORT_CONTEXT = 128  # tokens before the rows of the curves that grow in something else
CURVES = {  # the growing quantity, in words
    "context": "tokens of context, one request",
    "requests": f"requests of {SHORT_CONTEXT} tokens, one row each",
    "tree": "nodes of a draft tree, one request",
    "prompt": "tokens of a prompt",
}
DEFAULT_SIZES: Mapping[str, tuple[int, ...]] = {
    "context": (128, 512, 2048, 8192, 32768),
    "requests": (1, 2, 4, 8, 16, 32, 64, 128, 256),
    "tree": (1, 2, 4, 8, 16, 32, 64),
    "prompt": (128, 512, 2048, 8192, 32768),
}


class Subject(Protocol):
    """A loaded model that is timed."""

    floor: Floor
    max_position: int

    def job(self, load: Load) -> Callable[[], float]:
        """A function that runs the load once and returns its seconds."""
        ...


@dataclass(frozen=True)
class Grown:
    """One point of a curve."""

    curve: str
    size: int
    load: Load
    timing: Timing
    memory: float  # seconds of the memory floor
    arithmetic: float  # and of the arithmetic floor

    def facts(self) -> dict[str, object]:
        """The point for JSON, in milliseconds."""
        floor = max(self.memory, self.arithmetic)
        return {
            "curve": self.curve,
            "size": self.size,
            "ms": 1e3 * self.timing.best,
            "median_ms": 1e3 * self.timing.median,
            "memory_floor_ms": 1e3 * self.memory,
            "arithmetic_floor_ms": 1e3 * self.arithmetic,
            "times_floor": self.timing.best / floor,
        }


def load_of(curve: str, size: int) -> Load:
    """The pass, or the passes of a prompt, at one point of a curve."""
    return {
        "context": Load(context=size),
        "requests": Load(requests=size, context=SHORT_CONTEXT),
        "tree": Load(rows=size, context=SHORT_CONTEXT),
        "prompt": Load(rows=size, is_prompt=True),
    }[curve]


def measure_growth(
    subject: Subject,
    sizes: Mapping[str, Sequence[int]],
    rounds: int,
    on_turn: OnTurn = lambda _: None,
) -> list[Grown]:
    """The points of the curves; sizes that the model's context cannot hold are left out."""
    points = [
        (curve, size, load)
        for curve, of_curve in sizes.items()
        for size in of_curve
        for load in [load_of(curve, size)]
        if load.context + load.rows <= subject.max_position
    ]
    if not points:
        raise ConfigError(f"The model's context of {subject.max_position:,} tokens holds none of the sizes.")
    grown = []
    for curve, size, load in points:
        job = subject.job(load)
        job()  # to compile, and to touch memory
        seconds = take_turns({f"{curve} {size:,}": job}, rounds, on_turn)
        timing = Timing(tuple(next(iter(seconds.values()))))
        floor = subject.floor
        grown.append(Grown(curve, size, load, timing, floor.memory(load), floor.arithmetic(load)))
    return grown


class BackendPasses:
    """Passes straight at a backend, over pages that only they use."""

    def __init__(self, backend: Backend, vocab_size: int, max_position: int, floor: Floor) -> None:
        self.floor = floor
        self.max_position = max_position
        self._backend = backend
        self._vocab_size = vocab_size

    def job(self, load: Load) -> Callable[[], float]:
        """A function that runs the load once and returns its seconds. Nothing is committed."""
        pages_each = -(-(load.context + load.rows) // self._backend.page_size)
        pool = self._backend.make_pool(load.requests * pages_each)
        pages = np.arange(load.requests * pages_each, dtype=np.int32).reshape(load.requests, pages_each)
        length = load.context + load.rows
        tokens = np.random.default_rng(0).integers(0, self._vocab_size, length).astype(np.int32)
        for request in range(load.requests):
            self._prefill(tokens[: load.context], pages[request], pool)

        def run() -> float:
            start = time.perf_counter()
            if load.is_prompt:
                self._prefill(tokens, pages[0], pool)
            else:
                self._backend.forward(_last_rows(load, tokens, pages, pool))
            return time.perf_counter() - start

        return run

    def _prefill(self, tokens: np.ndarray, pages: np.ndarray, pool: KVPool) -> None:
        for start in range(0, len(tokens), self._backend.max_rows):
            chunk = tokens[start : start + self._backend.max_rows]
            batch = _batch(chunk, _chain(len(chunk)), start, pages[None, :], pool, last_logits=True)
            self._backend.forward(batch)


def _last_rows(load: Load, tokens: np.ndarray, pages: np.ndarray, pool: KVPool) -> ForwardBatch:
    """A pass over a binary tree of `rows` nodes for each request."""
    rows = np.tile(tokens[load.context :], load.requests)
    return _batch(rows, _binary_tree(load.rows), load.context, pages, pool)


def _chain(rows: int) -> np.ndarray:
    return np.arange(-1, rows - 1, dtype=np.int32)


def _binary_tree(rows: int) -> np.ndarray:
    """Parents of nodes in breadth-first order; each has two children."""
    return (np.arange(rows, dtype=np.int32) - 1) // 2


def _batch(
    tokens: np.ndarray,
    parents: np.ndarray,
    context: int,
    pages: np.ndarray,
    pool: KVPool,
    last_logits: bool = False,
) -> ForwardBatch:
    """A pass over the same tree for each request, after `context` computed tokens."""
    requests, rows = len(pages), len(parents)
    depths = np.zeros(rows, dtype=np.int32)
    for node in range(1, rows):
        depths[node] = depths[parents[node]] + 1
    offsets = np.arange(requests + 1, dtype=np.int32) * rows
    outputs = offsets[1:] - 1 if last_logits else np.arange(requests * rows, dtype=np.int32)
    return ForwardBatch(
        tokens=tokens,
        positions=np.tile(context + depths, requests).astype(np.int32),
        parents=np.tile(parents, requests),
        row_offsets=offsets,
        context_lengths=np.full(requests, context, dtype=np.int32),
        page_tables=pages,
        logit_rows=outputs.astype(np.int32),
        pool=pool,
    )
