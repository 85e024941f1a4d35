"""Hashes of prompt pages: one for each whole page, equal where the prompts are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.kv.hashing import page_hashes

PROMPTS = st.lists(st.integers(0, 3), max_size=24)


@given(PROMPTS, PROMPTS, st.integers(1, 5))
def test_as_many_hashes_are_equal_as_leading_whole_pages(
    first: list[int], second: list[int], page_size: int
) -> None:
    one, other = page_hashes(first, page_size), page_hashes(second, page_size)
    assert len(one) == len(first) // page_size
    for number, (left, right) in enumerate(zip(one, other, strict=False), 1):
        end = number * page_size
        assert (left == right) == (first[:end] == second[:end])


def test_salts_share_no_page_and_every_process_agrees() -> None:
    assert not set(page_hashes([1] * 8, 4, "a")) & set(page_hashes([1] * 8, 4))
    assert page_hashes([1, 2, 3, 4], 2) == [14340416249043421609, 14314149598557683587]
