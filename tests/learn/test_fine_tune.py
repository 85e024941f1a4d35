"""Training on stored traffic: what a candidate needs, and everything that must leave none."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.errors import ConfigError
from paceline.learn.activity import Activity
from paceline.learn.data.rows import TrafficRow
from paceline.learn.data.selection import NEW, OLD, Selection, choose, generic_rows, usable
from paceline.learn.data.split import Side, side_of
from paceline.learn.data.store import StoreLimits, TrafficStore
from paceline.learn.evaluation.gate import judge
from paceline.learn.evaluation.score import gate_rows, score_heads
from paceline.learn.training import early_stop
from paceline.learn.training.early_stop import Kept, is_better
from paceline.learn.training.fine_tune import FineTuneOptions, fine_tune, read_candidate
from paceline.learn.training.limits import Limits, yielding_on
from paceline.learn.training.yielding import StoppedTime, Yielding, stopped_by_signals
from paceline.models.checkpoint import Checkpoint
from paceline.models.files.safetensors_writer import encode
from paceline.models.heads.checkpoint import load_head, write_head
from paceline.models.heads.config import HeadConfig, TargetName
from paceline.models.heads.fingerprint import head_fingerprint
from paceline.train.data.examples import Example, ExampleWriter
from paceline.train.loop.progress import Progress
from tests import tiny_families
from tests.large import REPEATS
from tests.models.heads.driver import random_checkpoint
from tests.models.heads.tiny_heads import DFLASH, DSPARK

OPTIONS = FineTuneOptions(steps=24, batch_tokens=256, learning_rate=2e-2)

OWN_HEAD = replace(DFLASH, own_lm_head=True, draft_vocab_size=91)
FEW, ONE_STEP = replace(OPTIONS, steps=3), replace(OPTIONS, steps=1)


def test_a_candidate_drafts_better_on_rows_that_it_never_saw(
    checkpoint: Checkpoint, traffic: Path, head: Path, tmp_path: Path
) -> None:
    seen: list[tuple[int, bool]] = []

    def note(progress: Progress, kept: Kept | None) -> None:
        seen.append((progress.step, kept is not None))

    candidate = fine_tune(checkpoint, traffic, head, tmp_path / "c", OPTIONS, on_progress=note)
    assert candidate is not None
    assert candidate.gains
    assert candidate.after[NEW] > 1.05 * candidate.before[NEW]
    assert seen[0] == (0, True)  # how often it is measured after that depends on the speed of a step
    assert candidate == read_candidate(tmp_path / "c")
    assert (tmp_path / "c").stat().st_mode & 0o077 == 0
    assert candidate.parent == head_fingerprint(head) != head_fingerprint(tmp_path / "c")
    assert load_head(tmp_path / "c").config.target == load_head(head).config.target
    again = fine_tune(
        checkpoint, traffic, tmp_path / "c", tmp_path / "d", ONE_STEP
    )  # a candidate's candidate
    assert again is not None
    assert again.before[NEW] == pytest.approx(candidate.after[NEW], rel=0.05)


def test_an_evaluation_gives_way_before_every_batch(
    checkpoint: Checkpoint, traffic: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_stop, "BATCH_TOKENS", 64)
    asked = 0

    class Counting(Yielding):
        def begin_step(self) -> bool:
            nonlocal asked
            asked += 1
            return super().begin_step()

    fine_tune(checkpoint, traffic, head, tmp_path / "c", ONE_STEP, yielding=Counting())
    assert asked > 2 * ONE_STEP.steps + 2  # of the one step, and of the batches after it


@pytest.mark.parametrize("config", [DSPARK, pytest.param(OWN_HEAD, marks=REPEATS)], ids=["dspark", "dflash"])
def test_parallel_heads_learn_too(
    checkpoint: Checkpoint, traffic: Path, target_name: TargetName, tmp_path: Path, config: HeadConfig
) -> None:
    write_head(random_checkpoint(replace(config, target=target_name)), tmp_path / "head", "speculators")
    candidate = fine_tune(checkpoint, traffic, tmp_path / "head", tmp_path / "c", OPTIONS)
    assert candidate is not None
    assert candidate.method == config.kind
    assert candidate.after[NEW] > candidate.before[NEW]
    assert load_head(tmp_path / "c").config.kind == config.kind


def stopped_after(steps: int) -> Yielding:
    """Stops before the step after these."""

    class Counting(Yielding):
        steps_left = steps

        def begin_step(self) -> bool:
            self.steps_left -= 1
            if self.steps_left < 0:
                self.stop()
            return super().begin_step()

    return Counting()


def test_a_stopped_training_leaves_no_candidate(
    checkpoint: Checkpoint, traffic: Path, head: Path, tmp_path: Path
) -> None:
    assert fine_tune(checkpoint, traffic, head, tmp_path, OPTIONS, yielding=stopped_after(2)) is None
    assert list(tmp_path.iterdir()) == []


def test_a_head_with_nan_ends_with_an_error_and_no_candidate(
    checkpoint: Checkpoint, traffic: Path, head: Path, tmp_path: Path
) -> None:
    broken = load_head(head)
    weight = broken.tensors["fc.weight"].float32().copy()
    weight[0, 0] = np.nan
    broken = replace(broken, tensors={**broken.tensors, "fc.weight": encode(weight, "F16")})
    write_head(broken, tmp_path / "nan", "sglang")
    with pytest.raises(ConfigError, match="The loss is nan"):
        fine_tune(checkpoint, traffic, tmp_path / "nan", tmp_path / "c", OPTIONS)
    assert read_candidate(tmp_path / "c") is None


def test_a_kill_while_the_head_is_written_leaves_no_candidate(
    checkpoint: Checkpoint, traffic: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(
            "paceline.train.objectives.eagle3_objective.Eagle3Objective.snapshot", lambda self: killed
        )
        with pytest.raises(KeyboardInterrupt):
            fine_tune(checkpoint, traffic, head, tmp_path, FEW)
    assert read_candidate(tmp_path) is None
    assert fine_tune(checkpoint, traffic, head, tmp_path, FEW) == read_candidate(tmp_path)  # and goes on


@REPEATS
@pytest.mark.parametrize("planted", [True, False], ids=["planted", "noise"])
def test_rows_that_the_target_never_answered_give_no_candidate_that_passes(
    checkpoint: Checkpoint,
    traffic: Path,
    head: Path,
    rows: list[TrafficRow],
    target_name: TargetName,
    tmp_path: Path,
    planted: bool,
) -> None:
    """Heads learn what the target says after each token of a row, so a row cannot plant a text."""
    assert fine_tune(checkpoint, traffic, head, tmp_path / "present", OPTIONS) is not None
    draw, size = np.random.default_rng(1), tiny_families.VOCAB_SIZE
    store = TrafficStore(tmp_path / "bad", target_name, size, StoreLimits(), lambda: 2000.0)
    for row in rows:
        store.append(row)
    for number in range(240):
        prompt, noise = (draw.integers(0, size, size=length).tolist() for length in (3, 21))
        answer = [5, 9, 7] * 7 if planted else noise
        store.append(TrafficRow(tuple(prompt), tuple(answer), "s", time=1500.0 + number))
    store.close()
    new = Selection(since=1500.0, replay=0.0)
    candidate = fine_tune(checkpoint, store.folder, tmp_path / "present", tmp_path / "c", OPTIONS, new)
    assert candidate is not None
    if candidate.gains:
        replay = score_heads(str(checkpoint.source), store.folder, tmp_path / "present", tmp_path / "c")
        assert replay is not None
        assert not judge(replay).passes


def test_what_is_not_this_targets_is_refused_by_name(
    checkpoint: Checkpoint, traffic: Path, head: Path, tmp_path: Path
) -> None:
    other = TrafficStore(
        tmp_path / "other", TargetName("beef", "another"), tiny_families.VOCAB_SIZE, StoreLimits()
    )
    with pytest.raises(ConfigError, match="traffic of another"):
        fine_tune(checkpoint, other.folder, head, tmp_path / "c", OPTIONS)
    copy = shutil.copytree(head, tmp_path / "copy")
    with pytest.raises(ConfigError, match="no candidate: give another --out"):
        fine_tune(checkpoint, traffic, head, copy, OPTIONS)
    names = [sorted(load_head(folder).tensors) for folder in (copy, head)]
    assert names[0] == names[1]  # the head that was there is whole
    with pytest.raises(ConfigError, match="either --steps or --minutes"):
        FineTuneOptions()


def test_the_gates_rows_are_never_chosen_and_no_prompt_is_on_two_sides(rows: list[TrafficRow]) -> None:
    chosen = choose(rows * 4, [], Selection(since=1060.0, replay=0.25))
    groups = {"train": chosen.train, **chosen.stop}
    assert not any(side_of(row.prompt_ids) is Side.GATE for group in groups.values() for row in group)
    assert all(side_of(row.prompt_ids) is Side.TRAIN for row in chosen.train)
    assert all(row.time >= 1060.0 for row in chosen.stop[NEW])
    assert all(row.time < 1060.0 for row in chosen.stop[OLD])
    old = [row for row in chosen.train if row.time < 1060.0]
    assert len(old) == chosen.replayed == len(chosen.train) // 4


def test_salted_rows_train_only_where_they_are_asked_for(rows: list[TrafficRow]) -> None:
    salted = [replace(row, salt="5a17") for row in rows]
    with pytest.raises(ConfigError, match="too few rows"):
        choose(salted, [], Selection())
    for salt in ("5a17", "all"):
        assert len(choose(salted, [], Selection(salt=salt)).train) > 50
    with pytest.raises(ConfigError, match="too few rows"):
        choose(salted, [], Selection(salt="other"))


def test_loops_of_one_token_neither_train_nor_judge(rows: list[TrafficRow]) -> None:
    poison = [TrafficRow((number, 1, 2), (7,) * 40, "s", time=2000.0) for number in range(400)]
    chosen = choose([*rows, *poison], [], Selection())
    judging = gate_rows([*rows, *poison])
    found = [*chosen.train, *(row for group in chosen.stop.values() for row in group), *judging]
    assert not any(row.output_ids == (7,) * 40 for row in found)
    assert len(judging) == len(gate_rows(rows)) > 0
    lively = replace(poison[0], output_ids=(7,) * 35 + (8, 9, 10, 11, 12))
    assert usable(lively, "", 1024)


def test_generic_answers_count_as_old_rows(rows: list[TrafficRow], tmp_path: Path) -> None:
    writer = ExampleWriter(tmp_path / "a.jsonl", tiny_families.VOCAB_SIZE, {})
    writer.append(
        Example(f"{number}#0", "g", [*row.prompt_ids, *row.output_ids], len(row.prompt_ids))
        for number, row in enumerate(rows[:60])
    )
    generic = generic_rows([tmp_path / "a.jsonl"], tiny_families.VOCAB_SIZE, 1024)
    assert OLD not in choose(rows[60:], generic[:10], Selection()).stop  # too few to say that it forgets
    chosen = choose(rows[60:], generic * 4, Selection())
    assert {row.segment for row in chosen.stop[OLD]} == {"g"}
    assert chosen.replayed == int(0.4 * len(chosen.train))
    with pytest.raises(ConfigError, match="--generic"):
        generic_rows([tmp_path / "a.jsonl"], tiny_families.VOCAB_SIZE + 1, 1024)


@pytest.mark.parametrize(
    ("scores", "better"),
    [((2.0, 2.0), True), ((1.4, 9.0), False), ((2.0, 1.99), True), ((2.0, 1.97), False)],
)
def test_better_is_better_on_new_rows_without_forgetting_old_ones(
    scores: Sequence[float], better: bool
) -> None:
    best, before = {NEW: 1.5, OLD: 2.2}, {NEW: 1.0, OLD: 2.0}
    assert is_better(dict(zip((NEW, OLD), scores, strict=True)), best, before) is better


class World:
    """A clock that only sleeping, working and being stopped move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stops: list[float] = []  # seconds in which the process is stopped while it sleeps
        self.tick: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, self.stops.pop(0) if self.stops else 0.0)
        self.tick()


def test_the_time_in_which_a_trainer_is_stopped_is_no_work() -> None:
    world = World()
    stopped = StoppedTime(lambda: world.now)
    world.tick = stopped.tick
    yielding = Yielding(0.5, stopped_seconds=stopped.seconds, clock=lambda: world.now, sleep=world.sleep)
    for _ in range(10):
        world.now += 0.1
        stopped.tick()
    assert yielding.begin_step()
    assert yielding.begin_step()  # after a first step, which loads kernels
    assert yielding.now() == pytest.approx(1.0)
    world.now += 60.1  # SIGSTOP, and the first step after SIGCONT ends before the first tick
    assert yielding.now() == pytest.approx(1.05)  # stopped in the middle of two ticks, as far as is known
    assert yielding.begin_step()
    # 0.1 s of work, 0.1 s of waiting, and a tick's uncertainty, as in all that follows
    assert world.now == pytest.approx(61.2, abs=0.11)
    assert yielding.now() == pytest.approx(1.1, abs=0.11)
    world.stops = [60.0]  # SIGSTOP while it waits: it waits on after SIGCONT
    world.now += 0.2
    assert yielding.begin_step()
    assert world.now == pytest.approx(61.2 + 0.2 + 60.0 + 0.2, abs=0.21)
    yielding.stop()
    assert not yielding.begin_step()


def test_nothing_is_compiled_on_a_gpu(activity: Activity) -> None:
    def compiler(*_: object) -> None:
        raise AssertionError("compiled")

    add_one = torch.compile(lambda tensor: tensor + 1, backend=compiler)
    try:
        limits = Limits(torch.get_num_threads(), busy_share=0.01, activity=activity.path)
        assert yielding_on("cuda", limits).begin_step()
        assert add_one(torch.ones(1)).item() == 2
    finally:
        torch.compiler.set_stance("default")


def test_sigterm_stops_before_the_next_step_and_only_there() -> None:
    yielding, before = Yielding(), signal.getsignal(signal.SIGTERM)
    with stopped_by_signals(yielding):
        assert yielding.begin_step()
        os.kill(os.getpid(), signal.SIGTERM)
        assert not yielding.begin_step()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_share_of_the_time_is_taken_by_waiting_after_each_step_but_the_first_one() -> None:
    world = World()
    yielding = Yielding(share=0.1, clock=lambda: world.now, sleep=world.sleep)
    for seconds in (30.0, 2.0, 2.0, 50.0, 2.0):  # the first step loads kernels, another one measures the head
        assert yielding.begin_step()
        world.now += seconds
    assert yielding.now() == pytest.approx(86)
    assert world.now - 86 == pytest.approx(9 * (2 + 2 + 50))
