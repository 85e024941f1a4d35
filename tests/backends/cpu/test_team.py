"""The thread team: passes that follow at once or after a pause, from any thread, beside another team."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from paceline.backends.cpu import CpuBackend
from paceline.backends.cpu.team import LINE, WORKERS
from paceline.models.checkpoint import Checkpoint
from tests.backends.cpu.numbers import assert_same_bits
from tests.backends.driver import drive

TOKENS = [3, 14, 15, 92, 65, 35, 89]
PATIENCE = 60  # seconds after which a wait is a failure; nothing waits that long when all is well


def load(checkpoint: Checkpoint, threads: int) -> CpuBackend:
    return CpuBackend.load(checkpoint, quantization="int8", threads=threads, max_rows=16)


@pytest.fixture(scope="module")
def checkpoint(checkpoint_of: Callable[[str], Checkpoint]) -> Checkpoint:
    return checkpoint_of("qwen2")


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> np.ndarray:
    return one_pass(load(checkpoint, threads=1))


@pytest.fixture(params=[2, 3, 5], ids=lambda threads: f"{threads} threads")
def backend(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Iterator[CpuBackend]:
    backend = load(checkpoint, threads=request.param)
    yield backend
    backend.close()


def one_pass(backend: CpuBackend) -> np.ndarray:
    return drive(backend, pages_each=1)[0].run(TOKENS)


def sleeps(backend: CpuBackend, worker: int) -> bool:
    """Whether a worker has given up spinning, as its line of the control block says."""
    return bool(ctypes.c_int64.from_address(backend._team.control + WORKERS + 2 * LINE * worker).value)


def wait_until_asleep(backend: CpuBackend) -> None:
    """Return when every worker has given up spinning."""
    deadline = time.monotonic() + PATIENCE
    while not all(sleeps(backend, index) for index in range(1, backend.threads)):
        assert time.monotonic() < deadline, "the workers did not fall asleep"
        os.sched_yield()


def in_thread(work: Callable[[], None]) -> threading.Thread:
    """A thread that does the work and ends; joined with patience, not forever."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def assert_ends(thread: threading.Thread) -> None:
    thread.join(PATIENCE)
    assert not thread.is_alive(), f"{thread.name} did not end"


def test_passes_in_immediate_succession(backend: CpuBackend, expected: np.ndarray) -> None:
    for _ in range(50):
        assert_same_bits(one_pass(backend), expected)


def test_passes_after_the_workers_fell_asleep(backend: CpuBackend, expected: np.ndarray) -> None:
    for _ in range(10):
        wait_until_asleep(backend)
        assert_same_bits(one_pass(backend), expected)


def test_passes_that_start_while_a_worker_falls_asleep(backend: CpuBackend, expected: np.ndarray) -> None:
    """Start a pass at the moment a flag goes up, which is when a wake-up could be lost."""
    for number in range(30):
        while not sleeps(backend, 1 + number % (backend.threads - 1)):
            os.sched_yield()
        assert_same_bits(one_pass(backend), expected)


def test_a_team_of_one_has_no_workers(checkpoint: Checkpoint, expected: np.ndarray) -> None:
    before = threading.active_count()
    backend = load(checkpoint, threads=1)
    assert threading.active_count() == before
    assert_same_bits(one_pass(backend), expected)
    backend.close()


def load_with_workers(checkpoint: Checkpoint) -> tuple[CpuBackend, set[threading.Thread]]:
    before = set(threading.enumerate())
    backend = load(checkpoint, threads=3)
    workers = set(threading.enumerate()) - before
    assert len(workers) == 2
    return backend, workers


@pytest.mark.parametrize("state", ["fresh", "spinning", "asleep"])
def test_close_ends_the_workers(checkpoint: Checkpoint, state: str) -> None:
    backend, workers = load_with_workers(checkpoint)
    if state != "fresh":
        one_pass(backend)
    if state == "asleep":
        wait_until_asleep(backend)
    assert_ends(in_thread(backend.close))
    assert not any(worker.is_alive() for worker in workers)


def test_a_garbage_collected_backend_ends_its_workers(checkpoint: Checkpoint) -> None:
    backend, workers = load_with_workers(checkpoint)
    one_pass(backend)
    del backend
    gc.collect()
    for worker in workers:
        assert_ends(worker)


def test_close_may_come_twice(checkpoint: Checkpoint) -> None:
    backend = load(checkpoint, threads=2)
    assert_ends(in_thread(backend.close))
    assert_ends(in_thread(backend.close))


def test_two_teams_take_turns(checkpoint: Checkpoint, backend: CpuBackend, expected: np.ndarray) -> None:
    other = load(checkpoint, threads=2)
    for _ in range(10):
        assert_same_bits(one_pass(backend), expected)
        assert_same_bits(one_pass(other), expected)
    other.close()
    assert_same_bits(one_pass(backend), expected)  # which does not end with the other


def test_two_backends_share_a_team(checkpoint: Checkpoint, expected: np.ndarray) -> None:
    first = load(checkpoint, threads=2)
    workers = threading.active_count()
    second = CpuBackend.load(checkpoint, quantization="int8", threads=2, max_rows=64, beside=first)
    assert threading.active_count() == workers
    for _ in range(10):
        assert_same_bits(one_pass(first), expected)
        assert_same_bits(one_pass(second), expected)
    alone = CpuBackend.load(checkpoint, quantization="int8", threads=1, max_rows=64, beside=first)
    assert_same_bits(one_pass(alone), expected)  # another number of threads is another team
    first.close()


def test_two_teams_at_the_same_time(checkpoint: Checkpoint, expected: np.ndarray) -> None:
    backends = [load(checkpoint, threads=2), load(checkpoint, threads=2)]
    found: list[np.ndarray] = []

    def run_many(backend: CpuBackend) -> None:
        found.extend(one_pass(backend) for _ in range(20))

    threads = [in_thread(lambda backend=backend: run_many(backend)) for backend in backends]  # type: ignore[misc]
    for thread in threads:
        assert_ends(thread)
    assert len(found) == 40
    for logits in found:
        assert_same_bits(logits, expected)
    for backend in backends:
        backend.close()


def test_passes_from_several_threads_in_turn(backend: CpuBackend, expected: np.ndarray) -> None:
    found: list[np.ndarray] = []
    for _ in range(8):
        assert_ends(in_thread(lambda: found.append(one_pass(backend))))
    assert len(found) == 8
    for logits in found:
        assert_same_bits(logits, expected)


def test_a_pass_lets_other_python_threads_run(checkpoint: Checkpoint) -> None:
    """The compiled pass holds no lock: another thread counts on while passes run."""
    backend = load(checkpoint, threads=1)
    counts, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            counts[0] += 1

    counter = in_thread(count)
    before = counts[0]
    while counts[0] < before + 1000:
        one_pass(backend)
    stop.set()
    assert_ends(counter)
