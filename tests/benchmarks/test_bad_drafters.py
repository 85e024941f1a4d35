"""`python -m benchmarks bad-drafters`: the drafters are as bad as they claim, and change no token."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks.control import bad_drafters
from benchmarks.control.bad_drafters import SLEEP, SlowDrafter, WrongDrafter
from paceline.bench.run.engine_runner import Task, run_group
from paceline.core.params import SamplingParams
from tests.toy import toy_engine

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
TASKS = [Task(str(number), "s", [5, 6, 7, number], GREEDY) for number in range(3)]


def test_the_wrong_drafter_drafts_in_every_step_and_changes_no_answer() -> None:
    drafter = WrongDrafter(10**6)  # so that none is right by luck
    drafter._chance.randrange = lambda _: 0  # the toy model never answers with 0
    found = run_group(toy_engine(drafter=drafter, budget=3), TASKS)
    plain = run_group(toy_engine(), TASKS)
    assert all(own.same_as(other) for own, other in zip(found.answers, plain.answers, strict=True))
    assert sum(answer.speculative.num_draft_tokens for answer in found.answers) > 100
    assert sum(answer.speculative.num_accepted_draft_tokens for answer in found.answers) == 0


def test_the_slow_drafter_sleeps_before_it_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(bad_drafters, "time", SimpleNamespace(sleep=naps.append))
    drafter = SlowDrafter(SlowDrafter.Options())
    found = run_group(toy_engine(drafter=drafter, budget=3), TASKS)
    assert [answer.num_tokens for answer in found.answers] == [20] * 3
    assert naps
    assert set(naps) == {SLEEP}
