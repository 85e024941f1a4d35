"""`paceline readiness`: one run on a tiny model, and what each check says about what could be measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from paceline.bench.readiness.checks import CHECKS, Check, Verdict, checks
from paceline.bench.readiness.measure import SHORT_ANSWER, DrafterStats, Measured, measure
from paceline.bench.readiness.view import readiness_result
from paceline.bench.report.page import html_page
from paceline.bench.run.contest import Contest, SpeculationOptions
from paceline.bench.run.speculation import OFF
from paceline.bench.traffic.profiles import closed
from paceline.bench.traffic.workloads import Prompt, Workload
from paceline.errors import ConfigError, HeadMismatchError

PROMPTS = tuple(Prompt(str(number), "ab"[number % 2], 6, text="abc" * (1 + number)) for number in range(4))


@pytest.fixture(scope="module")
def measured(tiny_file) -> Measured:
    options = SpeculationOptions(
        workloads=(Workload("traffic", PROMPTS),),
        methods={OFF: OFF, "ngram": "ngram"},
        model=str(tiny_file),
        rounds=1,
        profiles=(closed(1), closed(2)),
        threads=1,
    )
    return measure(options, "ngram", own_traffic=True)


def changed(contest: Contest, **changes) -> Contest:
    """The contest with other figures in the rows of drafting."""
    rows = [row if row.method == OFF else replace(row, **changes) for row in contest.rows]
    return replace(contest, rows=rows)


def found(measured: Measured, name: str) -> Check:
    (check,) = [check for check in checks(measured) if check.name.startswith(name)]
    return check


def test_everything_is_measured_once_and_shown_in_all_forms(measured):
    checked = checks(measured)
    assert len(checked) == len(CHECKS) == len({check.name for check in checked})
    assert found(measured, "same bytes").verdict is Verdict.PASS
    assert all(check.remedy for check in checked if check.verdict is not Verdict.PASS)
    result = readiness_result("tiny", "ngram", checked, measured)
    facts = json.loads(json.dumps(result.facts))
    assert [line["name"] for line in facts["checks"]] == [check.name for check in checked]
    assert {row["concurrency"] for row in facts["measured"]["rows"]} == {1, 2}
    assert [row[0] for row in result.tables[1].rows] == ["a", "b", "all"]
    page = html_page(result)
    assert "eady: " in page
    assert "Acceptance by position" in page or not measured.contest.rows[-1].acceptance_per_position


@pytest.mark.parametrize(
    ("speedup", "at_once", "at_twice"),
    [(1.2, "pass", "pass"), (1.0, "warn", "pass"), (0.96, "fail", "warn"), (0.5, "fail", "fail")],
)
def test_drafting_must_gain_and_must_not_cost_under_load(measured, speedup, at_once, at_twice):
    sure = {"speedup_vs_off": speedup, "speedup_interval": (speedup - 0.005, speedup + 0.005)}
    here = replace(measured, contest=changed(measured.contest, **sure))
    assert found(here, "speedup at 1 ").verdict.value == at_once
    assert found(here, "speedup at 2 ").verdict.value == at_twice
    short = replace(measured, short=changed(measured.short, **sure))
    assert found(short, "short answers").verdict.value == at_twice
    assert (found(here, "acceptance by segment").verdict is Verdict.WARN) == (speedup < 0.99)


@pytest.mark.parametrize(
    ("speedup", "interval", "verdict"),
    [
        (0.92, (0.75, 1.12), "warn"),
        (1.1, (0.9, 1.3), "warn"),
        (0.92, (0.9, 0.94), "fail"),
        (1.1, None, "pass"),
    ],
)
def test_an_interval_that_includes_the_limit_of_failing_is_not_sure(measured, speedup, interval, verdict):
    contest = changed(measured.contest, speedup_vs_off=speedup, speedup_interval=interval)
    check = found(replace(measured, contest=contest), "speedup at 2 ")
    assert check.verdict.value == verdict
    assert check.found.endswith("not sure") == (verdict == "warn")
    assert ("more prompts or --rounds" in check.remedy) == (verdict == "warn")


def test_auto_is_no_remedy_for_auto(measured):
    slow = {"speedup_vs_off": 0.5, "speedup_interval": (0.4, 0.6), "acceptance_per_position": []}
    fixed = replace(
        measured, contest=changed(measured.contest, **slow), short=changed(measured.short, **slow)
    )

    def told(here: Measured) -> list[str]:
        return [check.name for check in checks(here) if "use --draft auto" in check.remedy.lower()]

    assert told(fixed) == [
        "speedup at 2 at once",
        f"short answers ({SHORT_ANSWER} tokens)",
        "acceptance by segment",
    ]
    assert told(replace(fixed, auto=True)) == []
    assert "ngram found nothing" in found(fixed, "acceptance by position").remedy
    assert "auto found no gain" in found(replace(fixed, auto=True), "acceptance by position").remedy


@pytest.mark.parametrize(
    ("factor", "first", "gaps"), [(1, "pass", "pass"), (1.2, "warn", "pass"), (5, "fail", "fail")]
)
def test_latencies_are_compared_with_plain_decoding(measured, factor, first, gaps):
    off = measured.total(measured.contest)[0].percentiles
    slower = {
        name: values and {key: factor * value for key, value in values.items()}
        for name, values in off.items()
    }
    here = replace(measured, contest=changed(measured.contest, percentiles=slower))
    assert found(here, "first token").verdict.value == first
    assert found(here, "gaps").verdict.value == gaps


def test_a_byte_that_differs_fails_unless_the_rule_is_not_exact(measured):
    contest = changed(measured.contest, differing_prompts=["7"])
    check = found(replace(measured, contest=contest), "same bytes")
    assert (check.verdict, "such as 7" in check.found) == (Verdict.FAIL, True)
    inexact = replace(contest, inexact=frozenset({"ngram"}))
    assert found(replace(measured, contest=inexact), "same bytes").verdict is Verdict.WARN


@pytest.mark.parametrize(
    ("finished", "valid", "verdict"), [(4, 4, Verdict.PASS), (4, 3, Verdict.FAIL), (0, 0, Verdict.WARN)]
)
def test_structured_outputs_must_be_valid(measured, finished, valid, verdict):
    contest = changed(measured.contest, structured=4, finished=finished, valid=valid)
    here = replace(measured, contest=contest, structured=None, structured_error="")
    assert found(here, "structured outputs").verdict is verdict


def test_unfinished_answers_to_built_in_prompts_are_not_blamed_on_the_data(measured):
    contest = changed(measured.contest, structured=4, finished=0, valid=0)
    here = replace(measured, contest=contest, structured=None, structured_error="")
    assert found(here, "structured outputs").remedy == "Raise max_tokens in the data."
    for built_in in (replace(here, own_traffic=False), replace(here, structured=contest)):
        check = found(built_in, "structured outputs")
        assert check.found == "no answer to built-in prompts finished"
        assert check.remedy.startswith("Give prompts with a response_format")


@pytest.mark.parametrize(
    ("drafter", "head", "vocabulary", "memory"),
    [
        (DrafterStats("suffix", 0.0, 0, False, False, None), "pass", "pass", "pass"),
        (DrafterStats("eagle3", 0.1, 100, True, True, 0.99), "pass", "pass", "pass"),
        (DrafterStats("eagle3", 0.1, 200, True, False, 0.9), "warn", "warn", "warn"),
        (DrafterStats("eagle3", 0.9, 900, True, True, 0.7), "pass", "fail", "fail"),
    ],
)
def test_a_head_is_judged_by_target_vocabulary_and_size(measured, drafter, head, vocabulary, memory):
    here = replace(measured, drafters=(drafter,), target_bytes=1000)
    assert found(here, "head fits").verdict.value == head
    assert found(here, "vocabulary").verdict.value == vocabulary
    assert found(here, "memory").verdict.value == memory


def test_flags_of_the_kv_cache_mend_the_kv_cache_only(measured):
    def remedy(kv_share: float, weight_bytes: int) -> str:
        drafter = DrafterStats("eagle3", kv_share, weight_bytes, True, True, None)
        return found(replace(measured, drafters=(drafter,), target_bytes=1000), "memory").remedy

    assert "--max-num-seqs" not in remedy(0.1, 200)
    assert "--max-num-seqs" in remedy(0.3, 100)


def test_few_prompts_or_prompts_of_others_are_a_warning(measured):
    assert found(measured, "your own traffic").found == "4 prompts"
    assert found(replace(measured, own_traffic=False), "your own").found == "4 built-in prompts"
    many = replace(
        measured,
        contest=replace(measured.contest, rows=[replace(row, prompts=40) for row in measured.contest.rows]),
    )
    assert found(many, "your own traffic").verdict is Verdict.PASS


def test_the_command_ends_with_1_if_a_check_fails(paceline, tiny_gguf, monkeypatch, tmp_path, measured):
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "abc"}\n')
    ready = [Check("one", Verdict.WARN, "so", "Do this."), Check("two", Verdict.PASS, "good")]
    monkeypatch.setattr("paceline.bench.readiness.measure.measure", lambda *_: measured)
    monkeypatch.setattr("paceline.bench.readiness.checks.checks", lambda _: ready)
    arguments = ("readiness", tiny_gguf, "--data", data, "--draft", "ngram", "--concurrency", 1)
    code, out, _ = paceline(*arguments, "--html", tmp_path / "page.html")
    assert (code, "Ready: 1 pass, 1 warn." in out, "warn: one. Do this." in out) == (0, True, True)
    ready.append(Check("three", Verdict.FAIL, "bad", "Do that."))
    code, out, _ = paceline(*arguments, "--json", tmp_path / "facts.json")
    assert (code, "Not ready: 1 pass, 1 warn, 1 fail." in out) == (1, True)
    assert json.loads((tmp_path / "facts.json").read_text())["ready"] is False


def test_a_head_of_another_target_fails_that_check(paceline, tiny_gguf, monkeypatch, tmp_path):
    def refuse(*_):
        raise HeadMismatchError("the head was trained for another target. Use one for this target.")

    monkeypatch.setattr("paceline.bench.readiness.measure.measure", refuse)
    code, out, _ = paceline("readiness", tiny_gguf, "--limit", 1, "--draft", "ngram")
    assert (code, "fail: head fits the target. the head was trained" in out) == (1, True)


def test_one_draft_is_named(paceline, tiny_gguf):
    code, _, err = paceline("readiness", tiny_gguf, "--draft", "ngram,suffix")
    assert (code, "--draft must name one way to draft" in err) == (2, True)
    assert issubclass(HeadMismatchError, ConfigError)
