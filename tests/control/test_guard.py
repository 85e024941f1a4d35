"""The A/B guard: what it must find out, and how few plain steps it may take."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.control.config import CONFIG
from paceline.control.guard import ABGuard

STOP = CONFIG.guard.stop_steps


def run(guard: ABGuard, speedup: float, steps: int, seed: int = 0, noise: float = 0.1) -> list[str | None]:
    """Why each step was plain, None if it was not; drafted ones give `speedup` times as much."""
    rng = np.random.default_rng(seed)
    reasons = []
    for _ in range(steps):
        reasons.append(guard.reason)
        worth = 1.0 if guard.reason else speedup
        guard.observe(worth, float(rng.lognormal(0.0, noise)))
    return reasons


def test_a_gain_is_confirmed_by_few_plain_steps_and_by_ever_fewer():
    reasons = run(ABGuard(), speedup=1.5, steps=5000)
    assert "stopped" not in reasons
    assert reasons[:700].count("pair") > 12
    assert reasons[2500:].count("pair") < 0.01 * 2500


@pytest.mark.parametrize("seed", range(3))
def test_a_loss_is_found_and_stops_drafting(seed: int):
    reasons = run(ABGuard(), speedup=0.9, steps=10_000, seed=seed)
    assert reasons.index("stopped") < 1500
    assert reasons.count(None) < 0.15 * 10_000  # drafted steps, all trials included


def test_after_each_loss_it_waits_twice_as_long():
    guard = ABGuard()
    reasons = run(guard, speedup=0.8, steps=30_000, noise=0.01)
    ends = [step for step in range(1, 30_000) if reasons[step - 1] == "stopped" != reasons[step]]
    starts = [step for step in range(1, 30_000) if reasons[step] == "stopped" != reasons[step - 1]]
    waits = [end - start for start, end in zip(starts, ends, strict=False)]
    assert waits[:4] == [STOP, 2 * STOP, 4 * STOP, 8 * STOP]
    assert max(waits) <= CONFIG.guard.max_stop_steps


def test_drafting_resumes_when_it_gains_again():
    guard = ABGuard()
    run(guard, speedup=0.8, steps=2000)
    reasons = run(guard, speedup=1.5, steps=3000)
    assert reasons[-1000:].count("stopped") == 0
    assert guard.stops == 0


def test_a_much_better_promise_than_the_one_that_failed_is_tried_at_once():
    guard = ABGuard()
    guard.expect(1.1)
    reasons = run(guard, speedup=0.8, steps=1000)
    while guard.reason != "stopped":
        reasons = run(guard, speedup=0.8, steps=1)
    assert reasons
    guard.expect(1.12)
    assert guard.reason == "stopped"
    guard.expect(1.5)
    assert guard.reason is None


@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_does_not_stop_a_small_gain(seed: int):
    assert "stopped" not in run(ABGuard(), speedup=1.05, steps=3000, seed=seed)
