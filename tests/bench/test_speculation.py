"""The comparison of methods: turns are fair, no contestant learns from another, and sums are right."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.run.contest import Contest, SpeculationOptions
from paceline.bench.run.engine_runner import EngineRunner, Task
from paceline.bench.run.rows import rows
from paceline.bench.run.speculation import COLD, OFF, ONE_BY_ONE, WARM, Runs, measure_workload, parse_methods
from paceline.bench.run.turns import Answer, Turn
from paceline.bench.run.view import contest_result
from paceline.bench.traffic.profiles import closed
from paceline.bench.traffic.schemas import fits_schema
from paceline.constrain import StructuredOutputsParams
from paceline.core.params import SamplingParams
from paceline.core.request import Request, SpeculativeCounts
from paceline.core.trees import DraftPlan, DraftTrees
from paceline.draft.base import Drafter
from paceline.errors import ConfigError
from tests.bench.cli import run
from tests.toy import toy_engine


class Memory(Drafter):
    """Drafts the whole answer to a prompt that it has seen before."""

    name = "memory"

    def __init__(self) -> None:
        self.known: dict[tuple[int, ...], list[int]] = {}

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        chains = [
            self.known.get(tuple(request.prompt_token_ids), [])[request.num_output :][: plan.budget]
            for request, plan in zip(requests, plans, strict=True)
        ]
        return DraftTrees.chains(chains)

    def forget(self, request: Request) -> None:
        self.known[tuple(request.prompt_token_ids)] = request.output_token_ids


def tasks(count: int = 3, segments: str = "aaa") -> list[Task]:
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    return [Task(f"task {i}", segments[i], [5 + i, 6, 7, 8], params) for i in range(count)]


def off_engine() -> EngineRunner:
    return EngineRunner(toy_engine(enable_prefix_caching=False))


def memory_engine() -> EngineRunner:
    return EngineRunner(toy_engine(enable_prefix_caching=False, drafter=Memory(), budget=4))


MAKERS = {OFF: off_engine, "memory": memory_engine}


def test_a_cold_drafter_knows_no_other_answers_and_a_warm_one_its_own() -> None:
    runs = measure_workload(MAKERS, tasks(), rounds=3, passes=(COLD, WARM))
    off_cold, memory_cold, off_warm, memory_warm = rows("toy", runs)
    assert (off_cold.cache, memory_cold.cache, off_warm.cache, memory_warm.cache) == (COLD, COLD, WARM, WARM)
    assert memory_cold.draft_tokens_per_step == 0
    assert memory_cold.tokens_per_pass == off_cold.tokens_per_pass == off_warm.tokens_per_pass == 1
    assert memory_warm.tokens_per_pass == 4  # 8 tokens after the first, at most 5 a pass
    assert memory_warm.mean_acceptance_length > 4
    assert memory_cold.identical
    assert memory_warm.identical
    assert memory_warm.output_tokens == off_cold.output_tokens == 27


def test_all_methods_answer_a_prompt_before_anyone_sees_the_next() -> None:
    seen: list[str] = []
    measure_workload(MAKERS, tasks(2), rounds=2, on_turn=seen.append)
    order = [text.rpartition(" ")[2] for text in seen]
    assert [set(order[start : start + 2]) for start in range(0, 8, 2)] == [{OFF, "memory"}] * 4


@pytest.mark.parametrize(("warm_up", "engines"), [(True, 4), (False, 3)])
def test_engines_are_new_in_every_round_and_others_warm_up(warm_up: bool, engines: int) -> None:
    made: list[EngineRunner] = []

    def make() -> EngineRunner:
        made.append(off_engine())
        return made[-1]

    measure_workload({OFF: make}, tasks(1), rounds=3, warm_up=warm_up)
    assert len(made) == engines


def test_concurrent_requests_share_a_turn_within_their_segment() -> None:
    runs = measure_workload(MAKERS, tasks(3, "aab"), rounds=1, profile=closed(2))
    assert [[task.id for task in group] for group in runs.groups] == [["task 0", "task 1"], ["task 2"]]
    found = rows("toy", runs)
    assert [(row.segment, row.method, row.prompts) for row in found] == [
        ("a", OFF, 2),
        ("a", "memory", 2),
        ("b", OFF, 1),
        ("b", "memory", 1),
        ("all", OFF, 3),
        ("all", "memory", 3),
    ]
    assert all(row.concurrency == 2 for row in found)


def answer(tokens: Sequence[int], first: float, rest: float, gains: tuple[int, ...], **counts: Any) -> Answer:
    times = (first, *(first + rest for _ in gains[1:]))
    speculative = SpeculativeCounts(**counts)
    return Answer(list(tokens), len(tokens), times, first + rest, gains=gains, speculative=speculative)


def made_up_runs(lookup_tokens: Sequence[int] = (1, 2, 3, 4, 5)) -> Runs:
    """Two prompts, two rounds; the second prompt's answer by `lookup` can be given."""

    def turn(tokens: Sequence[int], first: float, rest: float, gains: tuple[int, ...], **counts: Any) -> Turn:
        return Turn(first + rest, [answer(tokens, first, rest, gains, **counts)])

    one, two = (1, 2, 3), (1, 2, 3, 4, 5)
    plain = [
        [turn(one, 1.0, 4.0, (1, 1, 1)), turn(two, 1.0, 8.0, (1,) * 5)],
        [turn(one, 1.5, 3.0, (1, 1, 1)), turn(two, 1.0, 9.0, (1,) * 5)],
    ]
    drafts = {("lookup", 2, 2, 1): 1, ("lookup", 3, 3, 2): 1}  # by drafter, nodes, depth and accepted nodes
    counts = {"drafts": drafts, "draft_time": 1e-5}
    lookup = [
        [turn(one, 1.0, 2.0, (1, 1, 1)), turn(two, 1.0, 2.0, (1, 2, 2), **counts)],
        [turn(one, 1.0, 1.5, (1, 1, 1)), turn(lookup_tokens, 1.0, 4.0, (1, 2, 2), **counts)],
    ]
    return Runs([[task] for task in tasks(2)], ONE_BY_ONE, {(COLD, OFF): plain, (COLD, "lookup"): lookup})


def test_times_are_means_over_the_rounds_and_ratios_are_of_sums() -> None:
    off, lookup = rows("toy", made_up_runs())
    assert (off.decode_seconds, lookup.decode_seconds) == (3.5 + 8.5, 1.75 + 3.0)
    assert (off.seconds, lookup.seconds) == (4.75 + 9.5, 2.75 + 4.0)
    assert lookup.decode_speedup_vs_off == 12.0 / 4.75
    assert lookup.speedup_vs_off == pytest.approx(14.25 / 6.75)
    assert lookup.median_decode_speedup_vs_off == (3.5 / 1.75 + 8.5 / 3.0) / 2
    assert (off.speedup_vs_off, off.median_decode_speedup_vs_off) == (1.0, 1.0)
    assert lookup.decode_tokens_per_second == (2 + 4) / 4.75
    assert lookup.tokens_per_second == 8 / 6.75
    assert lookup.tpot_ms == 1e3 * 4.75 / 6
    assert lookup.ttft_ms == 1e3
    assert lookup.mean_acceptance_length == 1 + 3 / 2
    assert lookup.draft_acceptance_rate == 3 / 5
    assert lookup.acceptance_per_position == [1.0, 0.5, 0.0]
    assert lookup.draft_tokens_per_step == 5 / 2
    assert lookup.tokens_per_pass == (2 + 4) / (2 + 2)
    assert lookup.drafted_share == 2 / 4
    assert math.isclose(lookup.draft_us_per_pass, 10 / 4)


def test_a_differing_token_in_any_round_fails_the_bench() -> None:
    found = rows("toy", made_up_runs(lookup_tokens=(1, 2, 9, 4, 5)))
    assert [row.identical for row in found] == [True, False]
    assert found[1].differing_prompts == ["task 1"]
    contest = Contest(SpeculationOptions((), {OFF: None, "lookup": "x"}), 2, "native", found)
    assert not contest.identical
    notes = contest_result(contest).notes
    assert any("tokens differ from plain decoding for task 1" in note for note in notes)


@pytest.mark.parametrize(("sliced", "said"), [(True, "in slices of 20 ms"), (False, "take turns")])
def test_the_notes_say_how_methods_shared_the_machine(sliced: bool, said: str) -> None:
    options = SpeculationOptions((), {OFF: None, "lookup": "x"})
    notes = contest_result(Contest(options, 2, "native", rows("toy", made_up_runs()), sliced=sliced)).notes
    assert sum("slices" in note or "take turns" in note for note in notes) == 1
    assert any(said in note for note in notes)


def test_every_column_has_a_name_of_its_own() -> None:
    options = SpeculationOptions((), {OFF: None, "lookup": "x"})
    for table in contest_result(Contest(options, 2, "native", rows("toy", made_up_runs()))).tables:
        names = [column.partition("(")[0].strip() for column in table.columns]
        assert len(set(names)) == len(names), table.title


def test_an_inexact_rule_may_give_other_tokens() -> None:
    found = rows("toy", made_up_runs(lookup_tokens=(1, 2, 9, 4, 5)))
    options = SpeculationOptions((), {OFF: None, "lookup": "x"})
    contest = Contest(options, 2, "native", found, inexact=frozenset({"lookup"}))
    assert contest.identical
    notes = contest_result(contest).notes
    assert any("lookup: this verification rule preserves the distribution" in note for note in notes)
    assert not any("other tokens" in note for note in notes)


def test_answers_that_violate_their_schema_fail_the_bench() -> None:
    structure = StructuredOutputsParams(json='{"enum": [1, 2]}')
    texts = {"1": True, "3": False, "[1": False}
    assert {text: fits_schema(text, structure) for text in texts} == texts
    assert fits_schema("1", None) is None
    assert fits_schema("1", StructuredOutputsParams(regex="1")) is None

    def contest(*verdicts: tuple[bool, bool | None]) -> Contest:
        runs = made_up_runs()
        for turns in runs.turns.values():
            for one_round in turns:
                for place, (turn, (finished, valid)) in enumerate(zip(one_round, verdicts, strict=True)):
                    answers = [replace(one, finished=finished, valid=valid) for one in turn.answers]
                    one_round[place] = replace(turn, answers=answers)
        return Contest(SpeculationOptions((), {OFF: OFF, "lookup": "x"}), 2, "native", rows("toy", runs))

    fine = contest((True, True), (False, False))  # the second was cut
    assert [(row.structured, row.finished, row.valid) for row in fine.rows] == [(4, 2, 2)] * 2  # two rounds
    assert fine.valid
    notes = contest_result(fine).notes
    assert any("4 answers with a schema, 2 finished, 2 of these valid" in note for note in notes)
    assert not contest((True, True), (True, False)).valid
    assert contest((True, None), (False, None)).valid


def test_methods_are_short_forms_or_objects_and_off_is_always_among_them() -> None:
    assert parse_methods(["ngram,suffix"]) == {OFF: OFF, "ngram": "ngram", "suffix": "suffix"}
    config = '{"method": "ngram", "num_speculative_tokens": 4}'
    assert parse_methods(["off,ngram", config]) == {
        OFF: OFF,
        "ngram": "ngram",
        "ngram num_speculative_tokens=4": config,
    }
    both = '["suffix", {"method": "ngram", "num_speculative_tokens": 4}]'
    assert parse_methods([both]) == {OFF: OFF, "suffix + ngram num_speculative_tokens=4": both}
    for given, message in (
        (["off"], "nothing to compare"),
        (["ngrams"], "names no drafting method"),
        (['{"method": "ngram", "length": 3}'], "unknown option 'length'"),
        (['{"method": "suffix", "suffix_cache_path": "x"}'], "never cold"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_methods(given)


def test_the_command_prints_tables_and_writes_rows(tmp_path: Path, tiny_gguf: Path) -> None:
    prompts = [{"prompt": "abcabcabc", "max_tokens": 12}, {"prompt": "ababab", "max_tokens": 12}]
    (tmp_path / "letters.jsonl").write_text("\n".join(json.dumps(prompt) for prompt in prompts))
    output = run(
        *("speculation", str(tiny_gguf), "--workload", str(tmp_path / "letters.jsonl"), "--warm"),
        *("--methods", "off,ngram,suffix", "--rounds", "1", "--threads", "1", "--concurrency", "1,2"),
        *("--json", str(tmp_path / "facts.json")),
    )
    assert "cold: drafters start each pass over a workload empty" in output
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["identical"]
    keys = [(row["concurrency"], row["cache"], row["method"]) for row in facts["rows"]]
    assert keys == list(itertools.product([1, 2], [COLD, WARM], [OFF, "ngram", "suffix"]))
    wanted = {"workload", "segment", "concurrency", "method", "output_tokens", "seconds", "tokens_per_second"}
    wanted |= {
        "speedup_vs_off",
        "mean_acceptance_length",
        "draft_acceptance_rate",
        "ttft_ms",
        "tpot_ms",
        "e2e_ms",
    }
    assert all(wanted <= set(row) for row in facts["rows"])
