"""The gate passes a head that gains for certain, and no other; the trial does the same on live steps."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from paceline.core.stats import DraftFacts, StepStats
from paceline.learn.gate import RowScore, acceptance_by_position, judge, tokens_per_pass
from paceline.learn.trial import Meter, TrialConfig, log_speedup, outcome


def rows(lengths: dict[str, float], count: int = 40, seed: int = 0) -> list[RowScore]:
    """Answers of 60 tokens in each segment, with about this number of tokens per pass."""
    random = np.random.default_rng(seed)
    return [
        RowScore(f"{segment}{index}", segment, 60, max(1, round(60 / length * random.normal(1, 0.1))))
        for segment, length in lengths.items()
        for index in range(count)
    ]


def test_a_clear_gain_passes_with_its_evidence():
    verdict = judge(rows({"chat": 2.0}), rows({"chat": 2.5}, seed=1))
    assert verdict.passes
    (overall,) = verdict.gains
    assert overall.low > 1.15
    assert overall.ratio == pytest.approx(1.25, abs=0.05)
    assert verdict.evidence()["gains"][0]["prompts"] == 40


@pytest.mark.parametrize("length", [1.2, 1.9, 2.0, 2.01])
def test_what_does_not_gain_is_refused(length):
    verdict = judge(rows({"chat": 2.0}), rows({"chat": length}, seed=1))
    assert not verdict.passes
    assert "no significant gain" in verdict.reason


def test_the_same_scores_always_give_the_same_verdict():
    pair = rows({"chat": 2.0}), rows({"chat": 2.1}, seed=1)
    assert judge(*pair) == judge(*pair)


def test_chance_alone_rarely_passes():
    """Two heads that are equally good: of 100 pairs of scores at most a few pass."""
    passed = [
        judge(rows({"chat": 2.0}, seed=seed), rows({"chat": 2.0}, seed=1000 + seed)).passes
        for seed in range(100)
    ]
    assert sum(passed) <= 5


def test_a_segment_that_loses_vetoes_a_gain_overall():
    verdict = judge(rows({"sql": 2.0, "chat": 2.0}), rows({"sql": 3.0, "chat": 1.8}, seed=1))
    assert verdict.gains[0].low > 1
    assert not verdict.passes
    assert "'chat' loses" in verdict.reason


def test_a_segment_with_too_few_prompts_does_not_veto():
    few = rows({"rare": 2.0}, count=3), rows({"rare": 1.5}, count=3)
    verdict = judge(rows({"sql": 2.0}) + few[0], rows({"sql": 3.0}, seed=1) + few[1])
    assert verdict.passes


def test_a_client_that_loses_vetoes_however_much_another_one_gains():
    """Poisoned traffic: one client sends most rows, and a head that learned them is worse for others."""

    def scored(victim: float, poisoner: float, seed: int) -> list[RowScore]:
        own, many = rows({"chat": victim}, 20, seed), rows({"chat": poisoner}, 300, seed + 1)
        poison = [replace(row, prompt=f"p{row.prompt}", client="b00") for row in many]
        return [replace(row, client="a11") for row in own] + poison

    verdict = judge(scored(2.0, 2.0, 0), scored(1.7, 6.0, 5))
    assert verdict.gains[0].low > 2
    assert not verdict.passes
    assert "'client a11' loses" in verdict.reason


def test_a_slower_pass_counts_against_the_candidate():
    pair = rows({"chat": 2.0}), rows({"chat": 2.2}, seed=1)
    assert judge(*pair).passes
    assert not judge(*pair, cost=1.1).passes


def test_too_few_prompts_are_no_evidence_and_repeated_ones_count_once():
    present, candidate = rows({"chat": 2.0}, 5), rows({"chat": 4.0}, 5, seed=1)
    verdict = judge(present * 20, candidate * 20)  # one client sends the same prompts again and again
    assert not verdict.passes
    assert "5 held-back prompts are too few" in verdict.reason
    assert not judge([], []).passes


def test_scores_of_other_rows_are_refused():
    present = rows({"chat": 2.0})
    other = [replace(row, prompt="another") for row in present]
    assert judge(present, other).reason == "the two heads were not scored on the same rows"


def test_sums_over_rows():
    pair = [RowScore("a", "", 10, 4, (4, 3), (3, 1)), RowScore("b", "", 6, 4, (2,), (1,))]
    assert tokens_per_pass(pair) == 2.0
    assert acceptance_by_position(pair) == pytest.approx([4 / 6, 1 / 3])


def live(meter: Meter, steps: int, tokens: int, seconds: float, requests: int = 1, drafter="eagle3") -> None:
    for _ in range(steps):
        draft = DraftFacts("r", "chat", drafter, nodes=5, depth=5, accepted=tokens - 1)
        meter.step(
            StepStats(requests=requests, new_tokens=tokens * requests, forward_time=seconds, drafts=(draft,)),
            (),
        )


def test_a_turn_counts_decode_steps_of_its_drafter_after_those_that_are_skipped():
    meter = Meter("eagle3")
    meter.take(skip=2)
    live(meter, 5, tokens=3, seconds=0.01)
    live(meter, 5, tokens=3, seconds=0.01, drafter="ngram")
    meter.step(StepStats(requests=1, prefill_tokens=9), ())
    assert meter.has(3)
    assert not meter.has(4)
    assert meter.take().tokens_per_draft() == 3.0
    assert meter.take().tokens_per_draft() is None


def test_turns_are_compared_at_the_same_load():
    meter = Meter("eagle3")
    live(meter, 10, tokens=2, seconds=0.01)
    live(meter, 2, tokens=2, seconds=0.02, requests=8)
    before = meter.take()
    live(meter, 2, tokens=3, seconds=0.01)
    live(meter, 10, tokens=3, seconds=0.02, requests=8)  # most steps are larger now: no gain by that
    assert log_speedup(before, meter.take()) == pytest.approx(math.log(1.5))
    live(meter, 9, tokens=3, seconds=0.01)
    live(meter, 1, tokens=3, seconds=5.0)  # it waited for a core
    assert log_speedup(before, meter.take()) == pytest.approx(math.log(1.5))
    live(meter, 5, tokens=3, seconds=0.01, requests=3)
    assert log_speedup(before, meter.take()) is None


def test_a_head_that_the_controller_hardly_lets_draft_loses():
    """With a controller, a bad head is not slow but unused: its turn ends all the same."""
    meter = Meter("eagle3")
    live(meter, 30, tokens=3, seconds=0.01)
    good = meter.take()
    live(meter, 3, tokens=3, seconds=0.01)
    live(meter, 77, tokens=1, seconds=0.01, drafter="ngram")
    assert meter.has(10)
    assert not meter.has(11)
    bad = meter.take()
    assert (good.use, bad.use) == (1.0, pytest.approx(3 / 80))
    assert log_speedup(good, bad) == -log_speedup(bad, good) < -0.1


def test_a_trial_ends_by_a_significant_difference_or_at_its_last_pair():
    config = TrialConfig(min_pairs=4, max_pairs=6)
    assert outcome([0.1] * 3, config).better is None
    assert outcome([0.1, 0.12, 0.08, 0.1], config).better is True
    assert outcome([-0.1, -0.12, -0.08, -0.1], config).better is False
    unsure = [0.3, -0.2, 0.25, -0.3, 0.1]
    assert outcome(unsure, config).better is None
    for last in (0.0, -0.3):  # a gain that is not significant after the last pair is none
        assert outcome([*unsure, last], config).better is False
