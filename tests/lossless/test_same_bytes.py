"""The promise: with speculation every byte is what it is without, on a real model.

Text, token ids, log-probabilities, reasons to end: of every drafter, as chain and as tree, alone and
in a mixed batch, with every option of sampling, whatever the scheduler does meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import cycle, islice
from typing import Any

import pytest

from paceline.build import LoadedModel
from paceline.engine.engine import Engine
from tests.large import LARGE, repeated
from tests.lossless.conftest import MODEL, TOKENS
from tests.lossless.subject import PLANS, SAMPLINGS, Case, Configs, Outcome, Truth, drafters, make_engine, run

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, configs: Configs) -> Iterator[Engine]:
    """All drafters, prefix reuse on; its caches fill while the tests run."""
    model = request.getfixturevalue("model_of_two_threads" if LARGE else "model")
    made = make_engine(MODEL, model, configs.values())
    yield made
    made.close()


def turned(by: int, cases: list[Case]) -> list[Any]:
    """A plan for each case, beginning with the by-th."""
    return list(islice(cycle(PLANS.values()), by, by + len(cases)))


def its_share(name: str, cases: list[Case]) -> list[Case]:
    """The cases that a method runs alone: all, or a greedy and a sampled one in turn.

    So every chain and every tree runs at temperature 0 and above it, and every way of sampling runs alone.
    """
    if LARGE:
        return cases
    turn = list(PLANS).index(name)
    greedy = [case for case in cases if SAMPLINGS[case.sampling]["temperature"] == 0]
    sampled = [case for case in cases if case not in greedy]
    return [greedy[turn % len(greedy)], sampled[turn % len(sampled)]]


def assert_something_happened(outcomes: list[Outcome]) -> None:
    """Drafts were made, some of their tokens were right and some wrong: else nothing was tested."""
    drafted = sum(outcome.count("num_draft_tokens") for outcome in outcomes)
    accepted = sum(outcome.count("num_accepted_draft_tokens") for outcome in outcomes)
    assert 0 < accepted < drafted
    assert not any(child.failed_drafters for outcome in outcomes for child in outcome.children)


@pytest.fixture(scope="module")
def engine_of(model: LoadedModel, configs: Configs) -> Callable[[str], Engine]:
    """An engine of each method, so that no other test has told its caches the answers."""
    return cache(lambda method: make_engine(MODEL, model, [configs[method]]))


@pytest.mark.parametrize("name", [name for name in PLANS if name != "off"])
def test_each_method_alone(
    engine_of: Callable[[str], Engine], truth: Truth, cases: list[Case], name: str
) -> None:
    engine = engine_of(name.removesuffix(" tree"))
    share = its_share(name, cases)
    outcomes = [run(engine, [case], [PLANS[name]])[0] for case in share]
    assert truth.differences(share, outcomes) == []
    assert_something_happened(outcomes)


# 6 has the methods that the test below does not batch
@pytest.mark.parametrize("turn", [6, *repeated(0, 3)])
def test_a_batch_of_eight_with_a_method_each(
    engine: Engine, truth: Truth, cases: list[Case], turn: int
) -> None:
    plans = turned(turn, cases)
    outcomes = run(engine, cases, plans)
    assert truth.differences(cases, outcomes) == []
    assert_something_happened(outcomes)


def test_requests_that_join_while_others_run(engine: Engine, truth: Truth, cases: list[Case]) -> None:
    outcomes = run(engine, cases, turned(1, cases), steps_between=2)
    assert truth.differences(cases, outcomes) == []
    assert_something_happened(outcomes)


def test_prompts_found_in_the_prefix_cache(engine: Engine, truth: Truth, cases: list[Case]) -> None:
    prompts = [replace(case, sampling="T 0", max_tokens=1) for case in cases]
    run(engine, prompts, ["off"] * len(cases))  # stores them
    again = run(engine, cases, turned(2, cases))
    assert truth.differences(cases, again) == []
    # log-probabilities of a prompt need all of it computed
    reused = [outcome.children[0].num_cached_tokens > 0 for outcome in again]
    assert reused == ["prompt_logprobs" not in SAMPLINGS[case.sampling] for case in cases]


def test_prompts_computed_in_small_chunks(
    model: LoadedModel, configs: Configs, truth: Truth, cases: list[Case]
) -> None:
    small = make_engine(MODEL, model, configs.values(), max_num_batched_tokens=28, max_num_seqs=8)
    some = cases if LARGE else cases[1::2]  # with log-probabilities of a prompt, and several outputs of one
    outcomes = run(small, some, turned(4, some))
    assert truth.differences(some, outcomes) == []
    assert_something_happened(outcomes)


def test_requests_preempted_in_the_middle_of_speculation(
    model: LoadedModel, truth: Truth, cases: list[Case]
) -> None:
    # none of these keeps many keys and values, so pages are easy to count
    configs = [drafters(None)[name] for name in ("ngram", "suffix", "hybrid", "eagle3")]
    names = ("ngram", "suffix", "eagle3", "hybrid tree", "suffix tree", "eagle3 tree")
    plans = [PLANS[name] for name in islice(cycle(names), len(cases))]
    longest = max(len(case.prompt) for case in cases) + TOKENS
    tight = make_engine(
        MODEL,
        model,
        configs,
        max_model_len=longest + 16,
        kv_cache_memory_bytes=3 * (longest // model.backend.page_size + 2) * model.backend.bytes_per_page(),
    )
    outcomes = run(tight, cases, plans)
    assert truth.differences(cases, outcomes) == []
    preempted = [
        child
        for outcome in outcomes
        for child in outcome.children
        if child.num_preemptions and child.speculative.num_accepted_draft_tokens
    ]
    assert preempted, "no request that had speculated was preempted"
