"""Speculation does not cost prefix hits: the same traffic finds the same pages, drafted or not."""

from __future__ import annotations

from functools import cache

import pytest

from paceline.draft.lookup.ngram import NgramDrafter
from tests.engine.mixed_requests import Hosted, alone, params
from tests.engine.test_exactness import prompt
from tests.toy import ToyBackend, drain, toy_engine
from tests.toy_drafter import ScriptedDrafter

PAGE = 4
SYSTEM = prompt(1, 4 * PAGE)  # that all prompts begin with


def conversation(number: int) -> list[int]:
    """The first question of a conversation."""
    return [*SYSTEM, *prompt(10 + number, 3 + number % PAGE)]


def options(number: int):
    return params(number, max_tokens=3 * PAGE + number % PAGE, ignore_eos=True)


def hits(
    drafter, on_device: bool, branching: int = 1, num_pages: int = 120
) -> tuple[list[int], list[list[int]]]:
    """Tokens found in the cache for each request, and the answers: six conversations of three turns."""
    engine = toy_engine(
        ToyBackend(page_size=PAGE, on_device=on_device),
        num_pages=num_pages,
        drafter=drafter,
        budget=5 if drafter else 0,
        branching=branching,
    )
    texts = [conversation(number) for number in range(6)]
    found, answers = [], []
    for _ in range(3):
        for first in (0, 3):  # three at once
            members = range(first, first + 3)
            requests = [engine.add_request(texts[n], options(n))[0] for n in members]
            drain(engine)
            for number, request in zip(members, requests, strict=True):
                found.append(request.num_cached_tokens)
                answers.append(request.output_token_ids)
                texts[number] = [*request.token_ids, *prompt(50 + number, 2)]
    return found, answers


@pytest.fixture(scope="module")
def plain() -> tuple[list[int], list[list[int]]]:
    return hits(None, on_device=False)


@cache
def truth() -> dict[tuple[int, ...], list[int]]:
    """The answer to every prompt of the conversations."""
    known = {}
    for number in range(6):
        text = conversation(number)
        for _ in range(3):
            answer = alone(text, options(number))[0]
            known[tuple(text)] = answer
            text = [*text, *answer, *prompt(50 + number, 2)]
    return known


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("style", ["right", "partly", "wrong"])
@pytest.mark.parametrize("kind", [ScriptedDrafter, Hosted])
def test_chains_find_as_much_as_plain_decoding(plain, kind, style, on_device):
    assert hits(kind(truth(), style), on_device) == plain


def test_trees_and_copies_find_as_much_as_plain_decoding(plain):
    assert hits(ScriptedDrafter(truth(), "tree"), on_device=False, branching=2) == plain
    assert hits(NgramDrafter(NgramDrafter.Options(prompt_lookup_min=1)), on_device=True) == plain


@pytest.mark.parametrize(("on_device", "pages_of_drafts"), [(False, 2), (True, 6)])
@pytest.mark.parametrize("style", ["right", "wrong"])
def test_where_pages_are_scarce_drafts_cost_no_more_than_the_pages_they_hold(
    style, on_device, pages_of_drafts
):
    """Of each of three requests: room for 5 tokens; on the device for two passes and what follows them."""
    drafted, _ = hits(Hosted(truth(), style), on_device, num_pages=60)
    smaller, _ = hits(None, on_device=False, num_pages=60 - 3 * pages_of_drafts)
    assert sum(drafted) >= sum(smaller)


def test_the_workload_has_prefix_hits(plain):
    found, _ = plain
    assert sum(found[6:]) > 0.7 * sum(len(conversation(n)) + 3 * PAGE for n in range(6)) * 2
