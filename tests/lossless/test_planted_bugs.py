"""Negative controls: one bug for each mechanism, planted, must change bytes that the tests compare.

The drafts here are trees that are always partly right, so that rows are kept, moved and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.build import LoadedModel
from paceline.control.controller import FixedController
from paceline.core.sampling import SamplingState
from paceline.core.trees import DraftPlan
from paceline.core.verdict import Verdict
from paceline.engine.admission import Limits
from paceline.engine.executors.batch import BatchBuilder
from paceline.kv.cache import KVCache
from paceline.verify.pathwise import verify_pathwise
from paceline.verify.sampling import Sampler
from paceline.verify.verdict import Case as VerifiedCase
from paceline.verify.verdict import Rule
from tests.engines import new_engine
from tests.lossless.conftest import TOKENS
from tests.lossless.subject import Case, Outcome, Truth, run
from tests.planted import Plant
from tests.toy_drafter import ScriptedDrafter

pytestmark = pytest.mark.real

Bug = Callable[[Plant], Rule | None]  # plants itself, or gives a rule with a bug


def drafted(
    model: LoadedModel, truth: Truth, cases: Sequence[Case], rule: Rule = verify_pathwise
) -> list[Outcome]:
    """The cases with a drafter that knows the truth and puts a wrong sibling beside every right node."""
    answers = {case.prompt: truth.of(case)[0][1] for case in cases}
    engine = new_engine(
        model.backend,
        model.tokenizer,
        Limits(model.config.vocab_size, 1024, 8, 256),
        num_pages=256,
        controller=FixedController(DraftPlan("scripted", 8, branching=2)),
        drafters={"scripted": ScriptedDrafter(answers, "tree")},
        rule=rule,
    )
    return run(engine, cases, [None] * len(cases))


@pytest.fixture(scope="module")
def few(cases: list[Case], truth: Truth) -> list[Case]:
    """A greedy and a sampled case, both with penalties; the truth is known before bugs are planted."""
    wanted = {"write": "T 0, penalties, bias", "extract": "T 0.7, penalties"}
    prompts = {case.name: case for case in cases}
    # bugs are planted in what follows a prompt: the end of one, more than a page, is enough
    chosen = [
        replace(prompts[name], sampling=sampling, prompt=prompts[name].prompt[-24:])
        for name, sampling in wanted.items()
    ]
    for case in chosen:
        truth.of(case)
    return chosen


def test_without_a_bug_all_agree(model: LoadedModel, truth: Truth, few: list[Case]) -> None:
    outcomes = drafted(model, truth, few)
    assert truth.differences(few, outcomes) == []
    # more than half of each answer was drafted
    assert all(outcome.count("num_accepted_draft_tokens") > 0.56 * TOKENS for outcome in outcomes)


def rows_are_not_moved(plant: Plant) -> None:
    plant(KVCache, "_compact", lambda self, sequence, in_place, accepted_rows: None)


def the_wrong_rows_are_moved(plant: Plant) -> None:
    move = KVCache._compact

    def one_before(self: KVCache, sequence: Any, in_place: int, accepted_rows: Sequence[int]) -> None:
        move(self, sequence, in_place, [row - 1 for row in accepted_rows])

    plant(KVCache, "_compact", one_before)


def positions_of_drafted_rows_are_off_by_one(plant: Plant) -> None:
    add_tree = BatchBuilder._add_tree

    def shifted(self: BatchBuilder, tree: Any, start: int, end: int) -> int:
        stop = add_tree(self, tree, start, end)
        self._positions[end:stop] += 1
        return stop

    plant(BatchBuilder, "_add_tree", shifted)


def nodes_see_their_siblings(plant: Plant) -> None:
    add_tree = BatchBuilder._add_tree

    def chained(self: BatchBuilder, tree: Any, start: int, end: int) -> int:
        chain = np.arange(-1, len(tree[0]) - 1, dtype=np.int32)
        return add_tree(self, (tree[0], chain), start, end)

    plant(BatchBuilder, "_add_tree", chained)


def penalties_do_not_follow_the_path(plant: Plant) -> None:
    plant(SamplingState, "advance", lambda self, token: None)


def noise_is_of_the_step_and_not_of_the_position(plant: Plant) -> Rule:
    class Stuck:
        def __init__(self, sampler: Sampler, position: int) -> None:
            self._sampler, self._position = sampler, position

        def sample(self, state: SamplingState, row: Any, position: int, num_output: int) -> int:
            return self._sampler.sample(state, row, self._position, num_output)

    def stuck(cases: Sequence[VerifiedCase], sampler: Sampler) -> list[Verdict]:
        return [verify_pathwise([case], Stuck(sampler, case.position))[0] for case in cases]

    return plant.instead_of(verify_pathwise, stuck)


def logprobs_are_those_of_the_first_token(plant: Plant) -> Rule:
    def repeated(cases: Sequence[VerifiedCase], sampler: Sampler) -> list[Verdict]:
        verdicts = verify_pathwise(cases, sampler)
        return [replace(one, logprobs=one.logprobs[:1] * len(one.logprobs)) for one in verdicts]

    return plant.instead_of(verify_pathwise, repeated)


def a_drafted_token_is_taken_though_the_target_said_another(plant: Plant) -> Rule:
    def gullible(cases: Sequence[VerifiedCase], sampler: Sampler) -> list[Verdict]:
        verdicts = verify_pathwise(cases, sampler)
        return [
            replace(verdict, tokens=(*verdict.tokens[:-1], case.tokens[0])) if case.tokens else verdict
            for case, verdict in zip(cases, verdicts, strict=True)
        ]

    return plant.instead_of(verify_pathwise, gullible)


@pytest.mark.parametrize(
    "bug",
    [
        rows_are_not_moved,
        the_wrong_rows_are_moved,
        positions_of_drafted_rows_are_off_by_one,
        nodes_see_their_siblings,
        penalties_do_not_follow_the_path,
        noise_is_of_the_step_and_not_of_the_position,
        logprobs_are_those_of_the_first_token,
        a_drafted_token_is_taken_though_the_target_said_another,
    ],
    ids=lambda bug: bug.__name__,
)
def test_a_planted_bug_is_noticed(
    model: LoadedModel, truth: Truth, few: list[Case], plant: Plant, bug: Bug
) -> None:
    outcomes = drafted(model, truth, few, bug(plant) or verify_pathwise)
    requests = [child for outcome in outcomes for child in outcome.children]
    plant.assert_noticed(requests, [one.bytes() for one in outcomes], [truth.of(case) for case in few])
