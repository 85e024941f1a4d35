"""`python -m benchmarks changes`: when a controller has reacted to a change, and the page that shows it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.control.changes import Changes, Course, Moment, Phase, run_course
from benchmarks.control.changes_report import changes_result
from paceline.bench.report.page import html_page
from paceline.bench.run.engine_runner import Task
from paceline.core.params import SamplingParams
from paceline.draft.lookup.ngram import NgramDrafter
from tests.toy import toy_engine

STEP = 0.01  # seconds


def course(*phases: tuple[int, list[int]]) -> Course:
    """Phases of these numbers of requests, and the drafted tokens of their steps."""
    moments: list[Moment] = []
    for number, (requests, drafted) in enumerate(phases):
        for tokens in drafted:
            now = STEP * (len(moments) + 1)
            moments.append(Moment(number, now, requests, requests, tokens, 0, ("ngram",) if tokens else ()))
    return Course("traffic", tuple(f"phase {number}" for number in range(len(phases))), moments)


@pytest.mark.parametrize("late", [0, 1, 20, 70])
def test_a_change_is_followed_when_drafts_are_nearer_to_where_they_settle(late: int) -> None:
    (reaction,) = course((1, [6] * 100), (1, [6] * late + [0] * 200)).reactions()
    assert (reaction.before, reaction.after) == (6.0, 0.0)
    assert reaction.change == "phase 0 to phase 1"
    # a mean of 8 steps is nearer to the new level when half of them are
    assert reaction.steps == max(late - 4, 0) + 1
    assert reaction.seconds == pytest.approx(STEP * reaction.steps)


def test_a_single_step_is_no_reaction() -> None:
    (reaction,) = course((1, [6] * 100), (1, [0] + [6] * 29 + [0] * 100)).reactions()
    assert reaction.steps == 27


def test_without_a_change_of_drafts_there_is_no_verdict() -> None:
    (reaction,) = course((1, [0, 0, 0, 1] * 30), (1, [0] * 100)).reactions()
    assert reaction.holds is None


def test_under_load_drafts_are_counted_per_request() -> None:
    crowd = course((1, [4] * 50), (32, [128] * 60 + [0] * 100), (1, [4] * 50)).reactions()
    assert [(one.before, one.after) for one in crowd] == [(4.0, 0.0), (0.0, 4.0)]
    assert [one.steps for one in crowd] == [57, 1]
    assert [one.holds for one in crowd] == [True, True], "57 steps, but not two seconds"
    slow = replace(crowd[0], seconds=2.5)
    assert not slow.holds


def test_an_engine_goes_through_the_phases_and_the_page_shows_them() -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    tasks = [Task(str(number), "s", [5, 6, 5, 6, number], params) for number in range(6)]
    engine = toy_engine(drafter=NgramDrafter(NgramDrafter.Options(prompt_lookup_max=1)), budget=3)
    found = run_course("load", engine, [Phase("one", tasks[:2]), Phase("all", tasks, 3)])
    assert sum(moment.new_tokens for moment in found.moments) == 8 * 12
    assert [moment.requests for moment in found.moments][found.starts()[1]] == 3
    assert max(moment.drafted for moment in found.moments) > 0
    changes = Changes("toy & co", [found])
    result = changes_result(changes)
    assert any("within 50 steps or 2 seconds" in note for note in result.notes)
    page = html_page(result)
    assert page.count('<svg class="plot"') == 2
    assert "toy &amp; co" in page
    assert "<script" not in page


def test_facts_have_every_step() -> None:
    facts = Changes("toy", [course((1, [6] * 10), (1, [0] * 10))]).facts()
    assert len(facts["courses"][0]["moments"]) == 20
    assert facts["reactions"][0]["holds"] is True
