"""What only repeats: `make test-large` runs it too, `make test` does not."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from typing import Any

import pytest

LARGE = os.environ.get("PACELINE_TEST_LARGE") == "1"
REPEATS = pytest.mark.skipif(not LARGE, reason="repeats what others try: run it with `make test-large`")


def repeated(*values: Any) -> list[Any]:
    """Parameters that try again, with other values, what a test has already tried."""
    return [pytest.param(value, marks=REPEATS) for value in values]


def in_turn(*choices: Mapping[str, Any] | Iterable[Enum], repeats: Collection[str] = ()) -> list[Any]:
    """Parameters with a value of each of the choices: all combinations, most of which only repeat.

    `make test` has as many as the longest has values: the first values, the second ones, and so on, the
    shorter ones beginning again. So every value is tried, except those named in `repeats`: they are tried
    elsewhere too.
    """
    named = [
        list(choice.items() if isinstance(choice, Mapping) else ((own.name.lower(), own) for own in choice))
        for choice in choices
    ]
    tried = {tuple(turn % len(values) for values in named) for turn in range(max(map(len, named)))}
    found = []
    for places in itertools.product(*(range(len(values)) for values in named)):
        names, values = zip(*(own[place] for own, place in zip(named, places, strict=True)), strict=True)
        marks = REPEATS if places not in tried or not set(names).isdisjoint(repeats) else []
        found.append(pytest.param(*values, id="-".join(names), marks=marks))
    return found
