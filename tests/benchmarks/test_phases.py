"""Where the time of a prompt goes."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from benchmarks.engine.phases import (
    ATTENTION,
    DOWN,
    ENTRY,
    GATE_UP,
    OTHER,
    OUTPUT,
    PHASES,
    PhaseTimes,
    Samples,
    measure_phases,
    phase_of,
)
from benchmarks.engine.rows import chain
from benchmarks.loading import load_backend_for_bench
from paceline.backends.cpu.backend import CpuBackend
from paceline.bench.timing import Timing
from paceline.errors import ConfigError
from tests.benchmarks.cli import run_json
from tests.toy import ToyBackend


def test_every_phase_of_a_dense_model_has_a_name(tiny_gguf: Path) -> None:
    """The names follow the counters of forward_pass.py: all that a pass uses are named, in their order."""
    backend = load_backend_for_bench(str(tiny_gguf), "auto", 1).backend
    assert isinstance(backend, CpuBackend)
    batch = chain(np.arange(2, 10, dtype=np.int32), 0, 8, backend.make_pool(1), all_logits=False)
    backend.forward(batch)
    used = np.flatnonzero(backend.workspace.counters.any(axis=(1, 2)))
    names = [phase_of(int(counter), backend.config.num_layers) for counter in used]
    assert (names[0], names[-1]) == (ENTRY, OUTPUT)
    assert set(names) == set(PHASES) - {OTHER}
    assert backend.progress() == (used[-1], 0)
    layer = names[1 : 1 + (len(names) - 1) // backend.config.num_layers]
    assert layer.index(ATTENTION) < layer.index(GATE_UP) < layer.index(DOWN)


def test_shares_are_of_what_was_sampled() -> None:
    samples = Samples(
        defaultdict(float, {ATTENTION: 3.0, DOWN: 1.0}), defaultdict(float, {ATTENTION: 1.5, DOWN: 0.0})
    )
    attention, down = PhaseTimes(Timing((0.2, 0.4, 0.6)), samples, 2, {DOWN: 10**9}).facts()
    assert (attention["phase"], attention["share"]) == (ATTENTION, 0.75)
    assert attention["ms"] == pytest.approx(300)
    assert attention["waiting"] == pytest.approx(0.25)  # half of the time one of two threads
    assert attention["giga_products"] == 0
    assert down["giga_products"] == pytest.approx(1 / 0.1 / 2)


def test_the_command_tells_the_model_and_its_passes(tmp_path: Path, tiny_gguf: Path) -> None:
    facts = run_json(tmp_path, "phases", str(tiny_gguf), "--prompt", "32", "--rounds", "2", "--threads", "1")
    assert (facts["prompt"], facts["rounds"], facts["threads"]) == (32, 2, 1)
    assert 0 < facts["best_ms"] <= facts["median_ms"]
    assert {line["phase"] for line in facts["phases"]} <= set(PHASES)


def test_another_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="dense models on the cpu backend"):
        measure_phases(ToyBackend(max_rows=16), [1, 2], 2)
