"""Engines in one process step one at a time, and busy ones get equal time."""

from __future__ import annotations

import threading

from paceline.engine.frontend.step_turns import StepTurns, Turn

PATIENCE = 30.0  # seconds after which waiting fails


class Clock:
    """Time that passes only within steps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def contend(turns: StepTurns, clock: Clock, lengths: dict[str, float], steps: int) -> list[str]:
    """The order of the steps of engines that always have work."""
    order: list[str] = []
    inside = threading.Lock()
    members = {name: turns.join() for name in lengths}
    gate = turns.join()  # holds the first turn until all wait

    def work(name: str, turn: Turn) -> None:
        while len(order) < steps:
            with turn:
                assert inside.acquire(blocking=False), "two engines step at once"
                order.append(name)
                clock.now += lengths[name]
                inside.release()

    threads = [threading.Thread(target=work, args=item, daemon=True) for item in members.items()]
    with gate:
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    return order


def test_one_steps_at_a_time_and_a_lone_engine_never_waits() -> None:
    clock = Clock()
    assert contend(StepTurns(clock), clock, {"only": 1.0}, 50)[:50] == ["only"] * 50
    order = contend(StepTurns(clock), clock, {"a": 1.0, "b": 1.0, "c": 1.0}, 300)
    assert set(order) == {"a", "b", "c"}


def test_the_lowest_start_tag_goes_first() -> None:
    """Without threads: the tags alone decide, so the order is exact."""
    clock = Clock()
    turns = StepTurns(clock)
    fast, slow = turns.join(), turns.join()
    used = {fast: 0.0, slow: 0.0}
    for _ in range(1000):  # both always have work: the one that waits with the lower tag is next
        turn = min((fast, slow), key=lambda each: each.end)
        with turn:
            seconds = 0.01 if turn is fast else 0.1
            clock.now += seconds
            used[turn] += seconds
    assert abs(used[fast] - used[slow]) <= 0.1 + 1e-9


def test_an_engine_that_was_idle_has_saved_up_no_time() -> None:
    clock = Clock()
    turns = StepTurns(clock)
    busy, idle = turns.join(), turns.join()
    for _ in range(100):
        with busy:
            clock.now += 1.0
    with idle:
        clock.now += 1.0
    assert idle.end >= busy.end - 1.0


def test_a_step_that_fails_ends_the_turn() -> None:
    turns = StepTurns()
    first, second = turns.join(), turns.join()
    try:
        with first:
            raise ValueError("a step failed")
    except ValueError:
        pass
    with second:
        pass
