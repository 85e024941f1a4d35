"""Held-back answers replayed: which rows, which numbers, and heads that must not be scored."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.errors import ConfigError, PacelineError
from paceline.learn import jobs
from paceline.learn.data.folder import LearnFolder
from paceline.learn.data.rows import TrafficRow
from paceline.learn.data.split import Side, side_of
from paceline.learn.data.store import TrafficStore
from paceline.learn.evaluation.gate import GateConfig, RowScore, judge, tokens_per_pass
from paceline.learn.evaluation.history import History
from paceline.learn.evaluation.score import gate_rows, replay_acceptance, score_heads
from paceline.learn.head_commands import promote, rollback
from paceline.learn.training.objectives import objective_for
from paceline.models.files.safetensors_writer import encode
from paceline.models.heads.checkpoint import HeadCheckpoint, write_head
from paceline.models.heads.config import TargetName
from paceline.models.heads.fingerprint import target_fingerprint
from paceline.models.registry import load_checkpoint
from paceline.train.loop.acceptance import by_pass
from paceline.train.loop.batches import pack
from paceline.train.loop.sequences import load_target
from tests.models.heads.driver import random_checkpoint
from tests.models.heads.tiny_heads import DSPARK, EAGLE3
from tests.tiny import save_checkpoint

LONGER = 30  # tokens


@dataclass(frozen=True)
class Target:
    path: Path
    name: TargetName
    model: object


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    path = save_checkpoint("llama-attention-bias", tmp_path_factory.mktemp("target"))
    checkpoint = load_checkpoint(path)
    model = load_target(checkpoint, torch.device("cpu"), torch.float32)
    return Target(path, TargetName(target_fingerprint(checkpoint), "tiny"), model)


def rows(count: int = 400, length: int = LONGER) -> list[TrafficRow]:
    random = np.random.default_rng(0)
    return [
        TrafficRow(
            tuple(random.integers(3, 170, 8).tolist()), tuple(random.integers(3, 170, length).tolist()), "sql"
        )
        for _ in range(count)
    ]


def head(target: Target, seed: int = 3) -> HeadCheckpoint:
    return random_checkpoint(replace(EAGLE3, target=target.name), seed)


def test_rows_are_held_back_ones_each_prompt_once_new_ones_and_some_of_all_the_time_before():
    stored = rows(2000, length=2)
    found = gate_rows(stored, most=20)
    assert len(found) == 20
    held_back = [row for row in stored if side_of(row.prompt_ids) is Side.GATE]
    assert found[-10:] == held_back[-10:]
    assert found[0] == held_back[0]
    answered_again = replace(held_back[0], output_ids=(5, 6, 7))
    again = gate_rows([*stored, answered_again], most=20)
    assert again[-1] == answered_again
    assert held_back[0] not in again
    assert gate_rows([replace(row, output_ids=(1,)) for row in stored]) == []


@pytest.mark.parametrize("config", [EAGLE3, DSPARK], ids=["eagle3", "dspark"])
def test_a_score_is_the_passes_that_chains_of_the_head_would_need(target, config):
    chosen = gate_rows(rows(100))[:3]
    named = replace(config, target=target.name, own_lm_head=True)
    others = random_checkpoint(named, 4), random_checkpoint(replace(named, feature_layers=(0, 1, 2)), 3)
    given = random_checkpoint(named)
    objective = objective_for(given, target.model, target.name)
    scores = [score for (score,) in replay_acceptance(target.model, target.name, [given], chosen)]
    for row, found in zip(chosen, scores, strict=True):
        accepted = objective.accepted(pack([[*row.prompt_ids, *row.output_ids]], [8], torch.device("cpu")))
        assert found.tokens == LONGER - 1
        assert found.accepted == tuple(by_pass(accepted[0, 8:-1].tolist()))
        assert found.passes == len(found.accepted)
    # beside a head that shares the target's states, and one that reads other layers
    beside = list(replay_acceptance(target.model, target.name, [given, *others], chosen))
    alone = [replay_acceptance(target.model, target.name, [head], chosen) for head in (given, *others)]
    assert beside == [[score for (score,) in row] for row in zip(*alone, strict=True)]
    assert scores == [first for first, *_ in beside]


def test_a_head_with_weights_that_are_not_numbers_is_not_scored(target):
    bad = np.full((60, 180), np.nan, np.float32)
    broken = head(target)
    broken = replace(broken, tensors={**broken.tensors, "fc.weight": encode(bad)})
    with pytest.raises(PacelineError, match=r"fc\.weight has weights that are not finite"):
        next(replay_acceptance(target.model, target.name, [broken], []))


@pytest.fixture
def learned(target, tmp_path) -> LearnFolder:
    """A folder with traffic of the target, and a current head and a candidate beside it."""
    folder = LearnFolder(tmp_path / "learn")
    store = TrafficStore(folder.traffic, target.name, 173)
    for row in rows(60):
        store.append(replace(row, time=time.time()))
    store.close()
    write_head(head(target), tmp_path / "present", "sglang")
    write_head(head(target, seed=4), folder.candidate, "sglang")
    return folder


def test_both_heads_are_scored_on_the_same_stored_rows(learned, target, tmp_path):
    given = (str(target.path), learned.traffic, tmp_path / "present", learned.candidate)
    told: list[tuple[int, int]] = []
    replay = score_heads(*given, on_progress=lambda *progress: told.append(progress))
    assert [row.prompt for row in replay.present] == [row.prompt for row in replay.candidate]
    assert told == [(row, replay.planned) for row in range(1, replay.planned + 1)]
    assert len(replay.present) == replay.planned == len(gate_rows(TrafficStore(learned.traffic).rows()))
    assert [RowScore.from_json(asdict(row)) for row in replay.present] == replay.present
    assert 1.0 <= tokens_per_pass(replay.present) < 2.0
    assert score_heads(*given, may_go_on=lambda: False) is None  # told to end


def test_scoring_ends_when_the_gate_has_decided(learned, target, tmp_path):
    same = (str(target.path), learned.traffic, tmp_path / "present", tmp_path / "present")
    config = GateConfig(min_prompts=2, looks=(2, 4))
    replay = score_heads(*same, config=config)
    assert len(replay.present) == 2 < replay.planned  # a head that is the same gains nothing
    verdict = judge(replay, config=config)
    assert (verdict.decided, verdict.passes) == (True, False)


def test_heads_and_rows_of_another_model_are_refused(learned, target, tmp_path):
    other = TargetName("0" * 16, "another")
    write_head(random_checkpoint(replace(EAGLE3, target=other)), learned.candidate, "sglang")
    with pytest.raises(PacelineError, match="trained for another target, another"):
        score_heads(str(target.path), learned.traffic, tmp_path / "present", learned.candidate)
    foreign = TrafficStore(tmp_path / "foreign", other, 173)
    foreign.close()
    with pytest.raises(ConfigError, match="has the traffic of another"):
        score_heads(str(target.path), tmp_path / "foreign", *[tmp_path / "present"] * 2)
    missing = tmp_path / "missing"
    with pytest.raises(ConfigError, match="has no stored traffic: give the folder of --learn-dir"):
        score_heads(str(target.path), missing, *[tmp_path / "present"] * 2)
    assert not missing.exists()  # a reader makes no store


def test_processes_that_crash_give_nothing_and_are_told(learned, monkeypatch, caplog, tmp_path):
    """A stand-in for the command line, which does what the name of the model says."""
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(
        "import os, sys, pathlib\n"
        "command, model = sys.argv[1:3]\n"
        "out = pathlib.Path(sys.argv[sys.argv.index('--out') + 1])\n"
        "if model == 'crash': os.kill(os.getpid(), 11)\n"
        "if model == 'half': out.mkdir()\n"
        "if model == 'nothing': sys.exit(3)\n"
        "if model == 'rubbish': out.write_text('{')\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift 3\nexec {sys.executable} {stand_in} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(jobs.sys, "executable", str(python))

    def run(model: str) -> jobs.ProcessJobs:
        return jobs.ProcessJobs(learned, model, ())

    present = tmp_path / "present"
    assert asyncio.run(run("crash").score(present, learned.candidate)) is None
    assert "`paceline learn score` has ended with status -11" in caplog.text
    assert asyncio.run(run("rubbish").score(present, learned.candidate)) is None
    with pytest.raises(OSError, match="ended with status -11"):
        asyncio.run(run("crash").train(present, 0.0))
    assert asyncio.run(run("half").train(present, 0.0)) is None  # killed before candidate.json
    assert asyncio.run(run("nothing").train(present, 0.0)) is None


def test_a_process_is_paused_and_continues_by_signals(learned, tmp_path, monkeypatch):
    python, end = tmp_path / "python", tmp_path / "end"
    os.mkfifo(end)
    python.write_text(f"#!/bin/sh\nread line < {end}\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(jobs.sys, "executable", str(python))
    work = jobs.ProcessJobs(learned, "model", ())

    async def main() -> None:
        work.pause(True)
        task = asyncio.create_task(work.train(tmp_path, 0.0))
        seen = await asyncio.to_thread(_next_change, task)
        assert seen == os.CLD_STOPPED
        assert not task.done()
        work.pause(False)
        await asyncio.to_thread(end.write_text, "now")
        assert await task is None  # nothing better was found

    asyncio.run(main())


def _next_change(task: asyncio.Task[object]) -> int:
    """How the state of a child of this process changes next: it is stopped, or ends."""
    while not task.done():
        with suppress(ChildProcessError):  # it has not been started yet
            found = os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            return 0 if found is None else found.si_code
    return 0


def test_a_process_that_is_stopped_ends_with_its_parent_and_so_does_what_it_started(tmp_path):
    child = (
        "import os, signal, subprocess; from paceline.learn.training.yielding import Yielding;"
        "Yielding(end_with_parent=True); assert os.getpgrp() == os.getpid();"
        "subprocess.Popen(['cat'], stdin=subprocess.PIPE);"  # as torch.compile's: it ends with the pipe
        "os.write(1, b'%8d' % os.getpid()); signal.pause()"
    )
    start = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    with subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        group = int(os.read(parent.stdout.fileno(), 8))
        os.killpg(group, signal.SIGSTOP)
        deadline = time.monotonic() + 30
        while states(group) != ["T", "T"]:  # one that stops while its parent dies would stay stopped
            assert time.monotonic() < deadline
        parent.kill()
        # the pipe is closed: both of its writers have ended
        ended, _, _ = select.select([parent.stdout], [], [], 30)
        assert ended


def states(group: int) -> list[str]:
    """The states of a group's processes, as /proc says: T is stopped."""
    facts = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            facts.append(path.read_text().rpartition(")")[2].split())
    return [state for state, _, of, *_ in facts if int(of) == group]


def test_promote_and_rollback_by_hand_change_what_a_server_follows(learned, tmp_path):
    with pytest.raises(ConfigError, match="has no heads yet"):
        rollback(learned.root)
    history = History(learned.heads, tmp_path / "present")
    number = history.add(learned.candidate, {}).number
    promote(str(number), learned.root)
    assert history.current().number == number
    rollback(learned.root)
    assert history.current().path == tmp_path / "present"
    assert os.listdir(learned.heads / f"{number:04}")
    with pytest.raises(ConfigError, match="no intact head 9"):
        promote("9", learned.root)
