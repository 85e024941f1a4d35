"""Requests for drafters that are tested without an engine."""

from __future__ import annotations

from typing import Any, cast

from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.sampling import SamplingState


def make_request(prompt, output=(), max_output=100, salt="") -> Request:
    """A running request with these tokens."""
    request = Request(
        request_id="r",
        child=0,
        arrival_order=(0, 0),
        prompt_token_ids=list(prompt),
        params=SamplingParams(),
        seed=0,
        max_output=max_output,
        ending_ids=frozenset(),
        sampling=SamplingState(SamplingParams(), 0, prompt, ()),
        detokenizer=cast(Any, None),
        arrival_time=0.0,
        cache_salt=salt,
    )
    request.token_ids.extend(output)
    return request


def chains(trees) -> list[list[int]]:
    """The tokens of trees that are chains."""
    found = []
    for number in range(trees.num_requests):
        tokens, parents = trees.tree_lists(number)
        assert parents == list(range(-1, len(tokens) - 1))
        found.append(tokens)
    return found
