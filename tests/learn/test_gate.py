"""The gate passes a head that gains for certain, and no other; the trial does the same on live steps."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from paceline.core.stats import DraftStats, StepStats
from paceline.learn.evaluation import gate
from paceline.learn.evaluation.acceptance import acceptance_by_position, acceptance_lines
from paceline.learn.evaluation.gate import (
    GateConfig,
    Replay,
    RowScore,
    Verdict,
    tokens_per_pass,
)
from paceline.learn.evaluation.trial import Meter, TrialConfig, log_speedup, outcome
from tests.learn.world import replay_of


def rows(lengths: dict[str, float], count: int = 40, seed: int = 0) -> list[RowScore]:
    """Answers of 60 tokens in each segment, with about this number of tokens per pass."""
    random = np.random.default_rng(seed)
    return [
        RowScore(f"{segment}{index}", segment, 60, max(1, round(60 / length * random.normal(1, 0.1))))
        for segment, length in lengths.items()
        for index in range(count)
    ]


def judge(present: list[RowScore], candidate: list[RowScore], cost: float = 1.0) -> Verdict:
    """The verdict on all rows."""
    return gate.judge(replay_of(present, candidate), cost)


def looked(
    present: list[RowScore], candidate: list[RowScore], config: GateConfig | None = None
) -> tuple[int, Verdict]:
    """The rows that are scored until the gate decides, and what it decides."""
    config = config or GateConfig()
    for scored in (*config.looks, len(present)):
        verdict = gate.judge(replay_of(present, candidate, scored), config=config)
        if verdict.decided:
            return scored, verdict
    raise AssertionError("undecided after all rows")


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


def test_a_large_gain_or_loss_is_decided_early_and_a_small_gain_late():
    def scored(length: float) -> list[tuple[int, bool]]:
        pairs = [(rows({"": 2.0}, 256, seed), rows({"": length}, 256, seed + 9)) for seed in range(8)]
        return [(number, verdict.passes) for number, verdict in (looked(*pair) for pair in pairs)]

    assert scored(2.6) == [(32, True)] * 8
    assert scored(1.6) == [(32, False)] * 8
    small = scored(2.06)
    assert sum(number for number, _ in small) > 8 * 128
    assert sum(passes for _, passes in small) >= 5


def test_looking_several_times_does_not_let_chance_pass_more_often():
    """100 pairs of equally good heads, each judged at up to four looks at 256 rows."""
    config = GateConfig(min_gain=0.0, samples=600)
    pairs = [(rows({"": 2.0}, 256, seed), rows({"": 2.0}, 256, 1000 + seed)) for seed in range(100)]
    assert sum(looked(*pair, config)[1].passes for pair in pairs) <= 5


def test_fewer_rows_than_the_first_look_are_judged_once_with_the_whole_confidence():
    verdict = judge(rows({"": 2.0}, 24), rows({"": 2.5}, 24, seed=1))
    assert verdict.gains[0].confidence == 0.95
    assert judge(rows({"": 2.0}, 200), rows({"": 2.5}, 200, seed=1)).gains[0].confidence == 0.9875


def test_before_all_rows_a_segment_that_will_be_judged_must_have_been_seen_and_certainly_not_lose():
    def scored(rare: float, planned: int, seed: int) -> list[RowScore]:
        first, later = (
            rows({"sql": 3.0 if seed else 2.0}, 32 - planned // 4, seed),
            rows({"sql": 2.0}, 40, seed),
        )
        seldom = rows({"rare": rare}, planned, seed)
        later = [replace(row, prompt=f"later {row.prompt}") for row in later]
        return first + seldom[: planned // 4] + later + seldom[planned // 4 :]

    def early(rare: float, planned: int) -> Verdict:
        return gate.judge(replay_of(scored(2.0, planned, 0), scored(rare, planned, 1), 32))

    assert early(2.0, 4).passes  # too few for a judgement of its own, in all
    assert not early(2.0, 16).decided  # four of sixteen
    assert early(2.5, 40).passes
    for unsure in (2.0, 1.9):  # no significant loss, but it may become one
        assert not early(unsure, 40).decided
        assert not early(unsure, 40).passes


def test_looking_early_does_not_let_a_segment_lose_more_often():
    """40 candidates that gain a fifth, and lose 4 % in a segment with 96 of 256 rows."""
    config, unseen = GateConfig(samples=300), 0

    def mixed(rare: float, other: float, seed: int) -> list[RowScore]:
        made = rows({"rare": rare}, 96, seed) + rows({"sql": other}, 160, seed + 1)
        return [made[index] for index in np.random.default_rng(seed // 10).permutation(256)]

    for number in range(40):
        pair = mixed(2.0, 2.0, 10 * number), mixed(1.92, 2.4, 10 * number + 5)
        _, verdict = looked(*pair, config)
        unseen += verdict.passes and not gate.judge(replay_of(*pair), config=config).passes
    assert unseen <= 2


def test_a_replay_is_read_as_it_was_written():
    pair = rows({"a": 2.0, "b": 2.0}, 3), rows({"a": 2.2, "b": 2.1}, 3)
    replay = replay_of(*pair, 4)
    assert Replay.from_json(json.loads(json.dumps(asdict(replay)))) == replay
    assert replay.groups == {"a": 3, "b": 3}


def test_acceptance_is_told_by_segment_and_position():
    """Of four passes three accept the first drafted token, one of these three the second one too."""
    chat = RowScore("p", "chat", 5, 2, accepted=(1, 2)), RowScore("q", "chat", 3, 2, accepted=(0, 1))
    sql = RowScore("r", "sql", 4, 2, accepted=(2, 0))
    assert acceptance_by_position(chat) == [3 / 4, 1 / 3]
    assert acceptance_by_position([]) == []
    better = [replace(row, passes=1, accepted=(row.tokens - 1,)) for row in (*chat, sql)]
    lines = acceptance_lines(replay_of([*chat, sql], better))
    assert (
        lines[1]
        == "'chat': 2.00 -> 4.00 tokens per pass; accepted by position: 0.75 0.33 -> 1.00 1.00 0.50 1.00"
    )
    assert [line.split(":")[0] for line in lines] == ["all", "'chat'", "'sql'"]


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
    pair = [RowScore("a", "", 10, 4), RowScore("b", "", 6, 4)]
    assert tokens_per_pass(pair) == 2.0


def live(meter: Meter, steps: int, tokens: int, seconds: float, requests: int = 1, drafter="eagle3") -> None:
    for _ in range(steps):
        draft = DraftStats("r", "chat", drafter, nodes=5, depth=5, accepted=tokens - 1)
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
