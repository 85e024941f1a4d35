"""Planted bugs: negative controls, without which a test that compares proves nothing.

A control is worth something only if the bug was really in the run, and the run differed because of it: a
replacement that no longer fits, or a run that broke, would differ too. So a bug has the signature of what
it replaces, is counted when it runs, and the run must have ended without an error.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from operator import and_
from typing import Any, Protocol

import pytest

Function = Callable[..., Any]


class Ended(Protocol):
    """The part of a request that tells how it ended."""

    finish_reason: str | None
    error: Exception | None
    failed_drafters: set[str]


class Plant:
    """Plants bugs for the length of a test. The fixture `plant` (tests/conftest.py) is one."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self._runs: Counter[str] = Counter()

    def __call__(self, owner: Any, name: str, bug: Function) -> None:
        """Put a bug in place of a function or method, whose signature it must have."""
        self._patch.setattr(owner, name, self.instead_of(getattr(owner, name), bug))

    def instead_of(self, original: Function, bug: Function) -> Function:
        """The bug, checked against the original and counted, to be handed on in its place."""
        assert _parameters(bug) == _parameters(original), f"a bug must have the signature of {original}"
        name = f"{original.__qualname__} by {bug.__qualname__}"
        self._runs[name] = 0

        @functools.wraps(bug)
        def counted(*arguments: Any, **options: Any) -> Any:
            self._runs[name] += 1
            return bug(*arguments, **options)

        return counted

    def value(self, owner: Any, name: str, wrong: Any) -> None:
        """Put a wrong value in place of a constant."""
        right = getattr(owner, name)
        assert type(wrong) is type(right)
        assert wrong != right
        self._patch.setattr(owner, name, wrong)

    def assert_noticed(
        self,
        requests: Sequence[Ended],
        found: Sequence[object],
        truth: Sequence[object],
        beside: type[Exception] | None = None,
    ) -> None:
        """The requests ended well with the bug in their run, and some gave something else than the truth.

        `beside`: other requests may have ended by this error, where the bug also trips the engine itself.
        """
        self.assert_ran()
        well = [request.error is None for request in requests]
        for request in requests:
            assert request.error is None or type(request.error) is beside
            assert request.finish_reason in ("stop", "length") or request.error is not None
            assert not request.failed_drafters
        differing = [one != other for one, other in zip(found, truth, strict=True)]
        assert any(map(and_, well, differing)), "the planted bug was not noticed"

    def assert_ran(self) -> None:
        """Every bug was met, as far as functions were planted."""
        unused = [name for name, runs in self._runs.items() if not runs]
        assert not unused, f"planted, but never run: {', '.join(unused)}"


def _parameters(function: Function) -> list[tuple[str, object, object]]:
    parameters = inspect.signature(function).parameters.values()
    return [(one.name, one.kind, one.default) for one in parameters]
