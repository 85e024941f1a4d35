"""Sliding windows free pages, whatever the window, the chunks, the drafts and the number of pages.

The toy model's logits are a hash of the last positions of a path, read through the page table: a page that
is released too early is taken by another request or filled with garbage, and changes the output.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.params import SamplingParams
from paceline.engine.engine import Engine
from tests.engine.test_exactness import prompt
from tests.toy import ToyBackend, drain, scribble_free_pages, toy_engine
from tests.toy_drafter import ScriptedDrafter

PAGE, MAX_LENGTH = 4, 96
SHARED = prompt(0, 21)  # the beginning of some prompts
PROMPTS = [*(prompt(number, 1 + 9 * number) for number in range(4)), SHARED, [*SHARED, 7, 8], [*SHARED, 9]]
REQUESTS = [
    (ids, SamplingParams(temperature=number % 2, seed=number, max_tokens=10 + 11 * (number % 4)))
    for number, ids in enumerate(PROMPTS)
]
STYLES = ["right", "wrong", "partly", "tree"]


class Windowed(ToyBackend):
    """The toy, whose rows see the last `window` positions; the engine is told of `attention_window`."""

    def __init__(self, window: int, **options: object) -> None:
        super().__init__(page_size=PAGE, **options)
        self.window = self.attention_window = window

    def logits_of(self, tokens, positions):
        return super().logits_of(tokens[-self.window :], positions[-self.window :])


@cache
def expected(window: int, number: int) -> list[int]:
    """The tokens of a request alone, with all of its pages."""
    backend = Windowed(window)
    backend.attention_window = None
    engine = toy_engine(backend, max_model_len=MAX_LENGTH)
    (request,) = engine.add_request(*REQUESTS[number])
    drain(engine)
    return request.output_token_ids


class Answers(dict[tuple[int, ...], list[int]]):
    """The tokens that follow each prompt, computed when they are asked for."""

    def __init__(self, answer: Callable[[int], list[int]]) -> None:
        self._answer = answer

    def __missing__(self, prompt_ids: tuple[int, ...]) -> list[int]:
        return self._answer(PROMPTS.index([*prompt_ids]))


def windowed_engine(window, rows, num_pages, style, caching, on_device, told=None) -> Engine:
    """An engine of 4 requests at a time; `told`: the window that it knows of, if it is another one."""
    truth = Answers(partial(expected, window))
    backend = Windowed(window, max_rows=rows, on_device=on_device)
    backend.attention_window = told or window
    return toy_engine(
        backend,
        max_model_len=MAX_LENGTH,
        max_num_seqs=4,
        max_num_batched_tokens=rows,
        num_pages=num_pages,
        enable_prefix_caching=caching,
        drafter=ScriptedDrafter(truth, style) if style else None,
        budget=5,
        branching=2 if style == "tree" else 1,
    )


def first_page_seen(window: int, length: int) -> int:
    """The first page that a row after `length` tokens attends to, or the last full one before it."""
    return max(min(length - window + 1, length - PAGE), 0) // PAGE


def check_pages(engine: Engine, window: int, requests) -> None:
    """Exactly the pages from the first in each window on are held."""
    slots = [request.slot for request in requests if request.slot >= 0]
    held: set[int] = set()
    for slot in slots:
        pages = engine.kv.page_tables[slot, : engine.kv.num_pages(slot)]
        held |= set(pages[first_page_seen(window, engine.kv.length(slot)) :].tolist())
    assert engine.kv.pages.num_pages - engine.kv.pages.num_available == len(held)


def serve(engine: Engine, window: int, numbers) -> list[list[int]]:
    """The tokens of these requests, added one after the other while others run."""
    added = []
    for number in numbers:
        added.append(engine.add_request(*REQUESTS[number])[0])
        for _ in range(3):
            engine.step()
            scribble_free_pages(engine)
            check_pages(engine, window, added)
    while engine.has_unfinished:
        engine.step()
        scribble_free_pages(engine)
        check_pages(engine, window, added)
    assert engine.kv.usage == 0
    return [request.output_token_ids for request in added]


@settings(max_examples=30)
@given(
    window=st.integers(1, 30),
    rows=st.integers(6, 32),
    num_pages=st.integers(MAX_LENGTH // PAGE, 60),
    style=st.sampled_from([None, *STYLES]),
    caching=st.booleans(),
    on_device=st.booleans(),
    numbers=st.lists(st.integers(0, len(REQUESTS) - 1), min_size=1, max_size=8),
)
def test_texts_stay_the_same_and_pages_outside_of_windows_are_free(
    window, rows, num_pages, style, caching, on_device, numbers
):
    engine = windowed_engine(window, rows, num_pages, style, caching, on_device)
    assert serve(engine, window, numbers) == [expected(window, number) for number in numbers]


@pytest.mark.parametrize("style", [None, "tree"])
def test_preempted_requests_and_shared_beginnings_have_the_same_texts(style):
    numbers = [3, 5, 6, 3, 4, 5]
    engine = windowed_engine(30, 16, MAX_LENGTH // PAGE, style, caching=True, on_device=False)
    assert serve(engine, 30, numbers) == [expected(30, number) for number in numbers]
    assert engine.scheduler.num_preemptions > 0
    assert engine.kv.prefix_hits > 0


@pytest.mark.parametrize("style", [None, "tree"])
def test_a_page_released_too_early_is_noticed(style):
    numbers = [3, 5, 6, 3, 4, 5]
    engine = windowed_engine(14, 16, 24, style, caching=False, on_device=False, told=14 - PAGE)
    assert serve(engine, 14 - PAGE, numbers) != [expected(14, number) for number in numbers]
