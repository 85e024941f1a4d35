"""Where the time of a prompt's pass goes on the cpu backend, sampled while it runs.

Threads take the tasks of each phase from a counter of its own, so the last counter that has been used names
the phase. A Python thread looks every millisecond: the pass runs without the GIL.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from benchmarks.engine.rows import chain
from paceline.backends.base import Backend
from paceline.backends.cpu.backend import CpuBackend
from paceline.backends.cpu.job import COUNTERS_PER_LAYER, ENTRY_COUNTERS
from paceline.backends.cpu.weights.matrix_names import matrix_names
from paceline.bench.timing import OnTurn, Timing
from paceline.errors import ConfigError
from paceline.models.config import ModelConfig
from paceline.options import check_integer

SAMPLE_SECONDS = 0.001
ENTRY, OUTPUT = "embedding", "logits"
NORM, QKV, ROPE, ATTENTION, QUANTIZE = "norms", "QKV projections", "rope, KV", "attention", "quantize"
PROJECTION, GATE_UP, DOWN, OTHER = "output projection", "gate and up projections", "down projection", "other"
# Names of a dense layer's counters, by their number in the layer
LAYER_PHASES = {
    **dict.fromkeys((1, 17), NORM),
    **dict.fromkeys(range(2, 6), QKV),
    6: ROPE,
    7: ATTENTION,
    8: QUANTIZE,
    9: PROJECTION,
    18: GATE_UP,
    19: DOWN,
}
PHASES = (ENTRY, NORM, QKV, ROPE, ATTENTION, QUANTIZE, PROJECTION, GATE_UP, DOWN, OTHER, OUTPUT)
MATRICES = {  # of the phases that are matrix products, how their names end
    QKV: (".q_proj.weight", ".k_proj.weight", ".v_proj.weight"),
    PROJECTION: (".o_proj.weight",),
    GATE_UP: (".gate_proj.weight", ".up_proj.weight"),
    DOWN: (".down_proj.weight",),
}


def phase_of(counter: int, layers: int) -> str:
    """The name of the phase that has this counter."""
    layer, number = divmod(counter - ENTRY_COUNTERS, COUNTERS_PER_LAYER)
    if layer < 0:
        return ENTRY
    return LAYER_PHASES.get(number, OTHER) if layer < layers else OUTPUT


@dataclass
class Samples:
    """Seconds of each phase, and of threads that waited in it."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    waiting: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


@dataclass(frozen=True)
class PhaseTimes:
    """What the passes of a prompt showed."""

    passes: Timing
    samples: Samples
    threads: int
    products: dict[str, int]  # multiply-adds of a pass in the phases that are matrix products

    def facts(self) -> list[dict[str, str | float]]:
        """One entry per phase: ms of a median pass, its share, how long threads wait, multiply-adds."""
        total, lines = sum(self.samples.seconds.values()), []
        for name in PHASES:
            seconds = self.samples.seconds[name]
            if not seconds:
                continue
            share = seconds / total
            own = share * self.passes.median * self.threads  # seconds of all threads in a pass
            line: dict[str, str | float] = {"phase": name, "ms": 1e3 * share * self.passes.median}
            line |= {"share": share, "waiting": self.samples.waiting[name] / seconds / self.threads}
            line["giga_products"] = self.products.get(name, 0) / own / 1e9  # a second and thread
            lines.append(line)
        return lines


def measure_phases(
    backend: Backend,
    token_ids: Sequence[int],
    prompt: int,
    rounds: int = 5,
    on_turn: OnTurn = lambda _: None,
) -> PhaseTimes:
    """Phases of `rounds` passes over a prompt of `prompt` tokens, after one that is not looked at."""
    if not isinstance(backend, CpuBackend) or not _is_dense(backend.config):
        raise ConfigError("phases are known of dense models on the cpu backend; name such a model.")
    check_integer(ConfigError, "prompt", prompt, 1, backend.max_rows)
    check_integer(ConfigError, "rounds", rounds, 1, None)
    tokens = np.resize(np.asarray(token_ids, dtype=np.int32), prompt)
    batch = chain(tokens, 0, prompt, backend.make_pool(-(-prompt // backend.page_size)), all_logits=False)
    samples, seconds = Samples(), []
    backend.forward(batch)
    for number in range(rounds):
        with _sampled(backend, samples):
            start = time.perf_counter()
            backend.forward(batch)
            seconds.append(time.perf_counter() - start)
        on_turn(f"pass {number + 1} of {rounds}")
    return PhaseTimes(Timing(tuple(seconds)), samples, backend.threads, _products(backend, prompt))


def _is_dense(config: ModelConfig) -> bool:
    return not (config.moe or config.latent or config.recurrent or config.per_layer_input) and config.is_gated


def _products(backend: CpuBackend, rows: int) -> dict[str, int]:
    """Multiply-adds of `rows` rows in the phases that are matrix products."""
    products = dict.fromkeys(MATRICES, 0)
    for name in matrix_names(backend.config)[:-2]:  # all but embedding and LM head
        for phase, own in MATRICES.items():
            if name is not None and name.endswith(own):
                matrix = backend.workspace.packed_matrix(name)
                products[phase] += rows * matrix.rows * matrix.depth
    return products


@contextmanager
def _sampled(backend: CpuBackend, samples: Samples) -> Iterator[None]:
    """Look where the passes of this context are, until it ends."""
    ended, layers = threading.Event(), backend.config.num_layers

    def look() -> None:
        before = time.perf_counter()
        while not ended.wait(SAMPLE_SECONDS):
            counter, waiting = backend.progress()
            now, name = time.perf_counter(), phase_of(counter, layers)
            samples.seconds[name] += now - before
            samples.waiting[name] += (now - before) * waiting
            before = now

    thread = threading.Thread(target=look, name="phases")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
