"""Speculation does not cost prefix hits: conversations find the same pages, however they are drafted.

A draft writes keys and values after the committed tokens, and the next turn must find a page that it touched
as if nothing had been drafted. tests/engine/test_prefix_hits.py does the same on the device, and where pages
are scarce.
"""

from __future__ import annotations

from typing import Any

import pytest

from paceline.build import LoadedModel
from paceline.core.params import SamplingParams
from tests.large import repeated
from tests.lossless.conftest import MODEL, TOKENS
from tests.lossless.subject import PLANS, Case, Configs, make_engine

pytestmark = pytest.mark.real

TURNS = 2
Turns = list[tuple[int, list[int]]]  # of all conversations: tokens found in the cache, and the answer


def conversations(model: LoadedModel, configs: Configs, cases: list[Case], name: str) -> tuple[Turns, float]:
    """Two conversations at once, one greedy and one sampled: their turns, and the hit rate."""
    method = name.removesuffix(" tree")
    engine = make_engine(MODEL, model, [configs[method]] if method in configs else [])
    more = model.tokenizer.encode("\nPlease tell me more about it.\n", add_special_tokens=False)
    texts: list[list[int]] = [list(case.prompt) for case in cases[:2]]
    turns = []
    for _ in range(TURNS):
        requests = [
            engine.add_request(text, params(number, PLANS[name]))[0] for number, text in enumerate(texts)
        ]
        while engine.has_unfinished:
            engine.step()
        turns += [(request.num_cached_tokens, request.output_token_ids) for request in requests]
        texts = [[*request.token_ids, *more] for request in requests]
        assert not any(request.error or request.failed_drafters for request in requests)
    assert name == "off" or sum(request.speculative.num_draft_tokens for request in requests) > 0
    rate = engine.kv.prefix_hits / engine.kv.prefix_queries
    engine.close()
    return turns, rate


def params(number: int, plan: Any) -> SamplingParams:
    temperature = [0.0, 0.8][number % 2]
    return SamplingParams(
        temperature=temperature, seed=number, max_tokens=TOKENS, ignore_eos=True, speculative=plan
    )


@pytest.fixture(scope="module")
def plain(model: LoadedModel, configs: Configs, cases: list[Case]) -> tuple[Turns, float]:
    return conversations(model, configs, cases, "off")


# a lookup, and what reads or writes keys and values or the target's features, as a chain or as a tree
ONCE = ("suffix tree", "draft_model", "eagle3 tree", "medusa", "layerskip tree")


@pytest.mark.parametrize("name", [*ONCE, *repeated(*(name for name in PLANS if name not in (*ONCE, "off")))])
def test_every_drafter_finds_as_much_as_plain_decoding(
    model: LoadedModel, configs: Configs, cases: list[Case], plain: tuple[Turns, float], name: str
) -> None:
    assert conversations(model, configs, cases, name) == plain


def test_later_turns_find_the_pages_of_prompts_and_answers(
    model: LoadedModel, cases: list[Case], plain: tuple[Turns, float]
) -> None:
    page, (turns, _) = model.backend.page_size, plain
    for case, (found, _) in zip(cases[:2], turns[2:], strict=True):
        computed = len(case.prompt) + TOKENS - 1  # the last token of an answer has no keys and values yet
        assert found == computed // page * page > len(case.prompt) // page * page
