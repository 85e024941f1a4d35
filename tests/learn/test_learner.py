"""The loop: a head serves only after it has gained in the shadow and live, and whatever fails, one serves.

The engine is a stand-in whose speed depends on the head in it. A poll of the Learner is some of its steps.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UnavailableError
from paceline.learn.slowdown import Slowdown
from tests.learn.world import CONFIG, FIRST, LOOK, World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


class Loaded(str):
    """A head that knows its folder, as replicas get it."""

    folder: Path


def test_what_serves_after_a_promotion_is_the_head_that_stays_on_the_disk(world):
    def load(path: Path) -> Loaded:
        head = Loaded(World.load(world, path))
        head.folder = path
        return head

    world.load, world.trained = load, [2.6]
    world.run()
    assert world.decisions == ["promoted"]
    assert world.in_use.folder == world.history.current().path
    assert world.in_use.folder.is_dir()


def test_a_head_that_gains_serves_and_says_why(world, caplog):
    caplog.set_level(logging.INFO)
    world.trained = [2.6]
    learner = world.run()
    assert world.in_use == "2.6"
    assert world.history.current().number == 1
    assert world.decisions == ["promoted"]
    assert (learner.status.swaps, learner.status.head, learner.status.rejected) == (1, 1, 0)
    assert learner.status.gain == pytest.approx(1.3)
    assert "1.300 times the tokens per second" in caplog.text
    evidence = world.history.card(1)["evidence"]
    assert evidence["gains"][0]["low"] > 1
    assert evidence["trial"]["better"] is True
    assert not (world.folder / "candidate").exists()


@pytest.mark.parametrize(
    ("trained", "replayed", "reason"),
    [
        (1.2, None, "no significant gain"),  # trained on rubbish
        (2.0, None, "no significant gain"),
        ("crashes", None, "could not be scored"),  # the process that scores it dies
        ("damaged", 3.0, "cannot be loaded: it is damaged"),
    ],
)
def test_a_head_that_does_not_gain_or_cannot_be_used_is_never_in_the_engine(world, trained, replayed, reason):
    world.trained, world.replayed = [trained], replayed
    learner = world.run()
    assert world.swaps == []
    assert world.decisions == ["rejected"]
    assert reason in world.history.decisions()[0]["reason"]
    assert (learner.status.rejected, world.history.current().number) == (1, 0)
    assert not (world.folder / "candidate").exists()


def test_a_head_that_gains_in_the_shadow_and_loses_live_goes_again(world):
    world.trained, world.replayed = [1.7], 2.6
    learner = world.run()
    assert "1.7" in world.swaps
    assert world.in_use == str(FIRST)
    assert world.history.current().number == 0
    assert "loses on live traffic" in world.history.decisions()[0]["reason"]
    assert learner.status.rejected == 1


def test_a_trainer_that_dies_or_finds_nothing_costs_a_cycle_only(world):
    world.trained = [OSError("killed"), None, 2.6]
    world.on_poll = lambda world: setattr(world, "collected", world.collected + bool(world.trained))
    learner = world.run(200)
    assert world.in_use == "2.6"
    assert learner.status.trainings == 3
    assert learner.status.failures == 1
    assert world.decisions == ["no candidate", "promoted"]


def test_rows_that_came_during_a_training_are_new_for_the_next_one(world):
    world.trained = [2.6, None]

    def more(world: World) -> None:
        if world.decisions:
            world.collected = 20

    world.on_poll = more
    world.run()
    first, second = world.since
    assert first == 0.0
    assert second == LOOK  # when the first one began, and not when its head was promoted


def test_a_live_loss_is_rolled_back_by_itself(world):
    world.trained = [2.6]

    def spoil(world: World) -> None:
        if world.polls > 60:  # this head is no longer good, the one before is
            world.live = {"2.6": 1.5}

    world.on_poll = spoil
    learner = world.run(150)
    assert world.decisions == ["promoted", "rolled back"]
    assert (learner.status.rollbacks, world.history.current().number, world.in_use) == (1, 0, str(FIRST))


def test_a_bad_head_that_was_promoted_by_hand_is_rolled_back_by_its_live_loss(world):
    """It never passed the gate, so what it must keep up with is what the head before it did live."""
    bad = world.folder / "bad"
    bad.mkdir()
    (bad / "model.safetensors").write_text("1.2")
    number = world.history.add(bad, {}).number
    world.collected, world.trained = 0, []

    def plant(world: World) -> None:
        if world.polls == 20:
            world.history.promote(number)

    world.on_poll = plant
    learner = world.run(120)
    assert (world.in_use, learner.status.rollbacks) == (str(FIRST), 1)
    assert world.history.current().number == 0
    assert world.decisions == ["serves", "rolled back"]


@pytest.mark.parametrize("fails", ["add", "promote", "note"])
def test_a_full_disk_when_a_head_is_promoted_leaves_one_that_works(world, fails, monkeypatch):
    def full(*arguments: Any, **facts: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(world.history, fails, full)
    world.trained, world.collected = [2.6], 10
    learner = world.run()
    serves = world.history.current()
    assert world.in_use == (serves.path / "model.safetensors").read_text()
    assert (world.in_use, learner.status.failures) == (("2.6", 0) if fails == "note" else (str(FIRST), 1))


def test_traffic_that_makes_both_heads_worse_rolls_nothing_back(world):
    world.trained = [2.6]
    world.on_poll = lambda world: setattr(world, "factor", 0.7 if world.polls > 60 else 1.0)
    learner = world.run(150)
    assert world.decisions == ["promoted", "kept"]
    assert (learner.status.rollbacks, world.in_use) == (0, "2.6")


def test_a_restart_serves_the_current_head_and_a_damaged_one_is_passed_over(world):
    world.trained = [2.6]
    world.run()
    world.collected, world.in_use = 0, str(FIRST)  # a new process
    assert (world.run(5).status.head, world.in_use) == (1, "2.6")
    (world.folder / "heads/0001/model.safetensors").write_text("9.9")  # not what the card says
    world.in_use = str(FIRST)
    assert (world.run(5).status.head, world.in_use) == (0, str(FIRST))


def test_an_engine_that_ends_in_a_trial_ends_learning_and_leaves_the_folder_as_it_is(world):
    world.trained = [2.6]
    world.run()

    async def gone(name: str, drafter: Any) -> None:
        raise UnavailableError("the engine has ended")

    world.trained, world.collected, world.replace_head = [3.4], 30, gone
    world.run()
    assert world.history.current().number == 1
    assert world.history.card(1)


def test_a_rollback_by_hand_is_followed_while_the_server_runs(world):
    world.trained = [2.6]

    def by_hand(world: World) -> None:
        if world.polls == 90:
            world.history.rollback()

    world.on_poll = by_hand
    learner = world.run()
    assert (learner.status.head, world.in_use) == (0, str(FIRST))
    assert world.decisions == ["promoted", "serves"]


def test_a_promotion_by_hand_during_a_trial_ends_it(world):
    other = world.folder / "other"
    other.mkdir()
    (other / "model.safetensors").write_text("2.2")
    number = world.history.add(other, {}).number
    world.trained = [2.6]

    def by_hand(world: World) -> None:
        if "2.6" in world.swaps and "2.2" not in world.swaps:
            world.history.promote(number)

    world.on_poll = by_hand
    world.run()
    assert world.in_use == "2.2"
    assert world.history.current().number == number
    assert world.decisions == ["serves", "rejected"]


def test_a_trial_gives_a_head_a_tenth_of_the_live_steps_until_its_gain_is_significant(world):
    trial = replace(CONFIG.trial, share=0.1, turn_steps=20)
    world.config, world.trained, world.replayed = replace(CONFIG, trial=trial), [1.7], 2.6
    world.run(300)
    assert world.decisions == ["rejected"]
    first = world.drafted.index("1.7")
    last = len(world.drafted) - world.drafted[::-1].index("1.7")
    tried = world.drafted[first:last].count("1.7")
    assert tried == 3 * 24  # turns of 20 steps, 2 more that are skipped, and those until the next look
    turns = world.swaps.index("1.7"), len(world.swaps) - world.swaps[::-1].index("1.7")
    assert world.swaps[slice(*turns)] == ["1.7", str(FIRST)] * 2 + ["1.7"]
    assert tried / (last - first) <= 0.15  # the last turn of the current head comes after that


def test_an_arrival_stops_the_trainer_at_once_and_under_load_looks_are_rare(world):
    async def train(present: Path, since: float) -> None:
        for _ in range(400):
            await asyncio.sleep(0)

    def load(world: World) -> None:
        world.running = 0 if world.polls < 20 else CONFIG.max_running + 1
        if world.polls == 20:
            looks = len(world.paused)
            world.learner.note_arrival()
            assert world.paused[looks:] == [True]
            world.learner.note_arrival()  # the next ones cost no look
            assert len(world.paused) == looks + 1

    world.train, world.on_poll = train, load
    world.config = replace(CONFIG, look_seconds=0.025, loaded_look_seconds=1.0)
    world.run(40)
    assert not any(world.paused[:18])
    assert world.slept[2:20] == [0.025] * 18
    assert sum(world.slept[20:]) > 0.9 * len(world.slept[20:])
    assert world.learner.status.paused


def test_training_pauses_while_requests_run(world):
    world.trained, world.running = [2.6], CONFIG.max_running + 1
    learner = world.run(6)
    assert learner.status.paused
    assert world.paused[:2] == [True, True]
    assert world.paused[-1] is False or learner.status.phase != "collecting"


def test_while_few_requests_run_the_trainer_works_for_its_share_and_alone_always(world):
    world.trained, world.running = [None], 1
    world.run(40)
    assert 0.6 < sum(world.paused) / len(world.paused) < 0.9  # FIRST_SHARE: nothing is known yet
    world.paused, world.trained, world.running, world.collected = [], [None], 0, 20
    world.run(40)
    assert not any(world.paused)


def test_a_moment_between_two_requests_is_no_time_to_work_in(world):
    def next_request(world: World) -> None:
        world.running = int(world.polls % 5 > 0)

    world.trained, world.on_poll, world.running = [None], next_request, 1
    world.run(40)
    assert 0.6 < sum(world.paused) / len(world.paused) < 0.9


def test_passes_are_disturbed_while_a_trainer_works_that_is_not_stopped(world):
    async def train(present: Path, since: float) -> None:
        for _ in range(12):  # looks
            await asyncio.sleep(0)

    world.train, world.running = train, 1
    world.run(15)
    first = world.disturbed.index(True)
    assert world.disturbed[:first] == [False] * first
    stopped = world.paused.index(True)  # at the look after which it does nothing
    assert world.disturbed[first : first + stopped] == [True] * stopped
    assert len(world.disturbed) > first + stopped + 5
    assert not any(world.disturbed[first + stopped + 1 :])


def test_a_trainer_that_limits_itself_is_stopped_by_load_alone(world):
    world.trained, world.running, world.slowdown = [None], 1, Slowdown(device="cuda")
    world.run(40)
    assert not any(world.paused)
    world.trained, world.running, world.collected = [None], CONFIG.max_running + 1, 20
    world.run(40)
    assert all(world.paused[-20:])
