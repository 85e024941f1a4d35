"""A planted bug that does not fit, never runs, or breaks the run is no control, and the helper fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import BackendError, GrammarError
from tests.planted import Plant


class Adder:
    LIMIT = 9

    def add(self, one: int, other: int = 1) -> int:
        return one + other


def ended(**fields: Any) -> Any:
    return SimpleNamespace(**({"error": None, "finish_reason": "stop", "failed_drafters": set()} | fields))


def test_a_planted_bug_runs_and_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        plant = Plant(patch)
        plant(Adder, "add", lambda self, one, other=1: one - other)
        assert Adder().add(5) == 4
        plant.assert_noticed([ended()], [Adder().add(5)], [6])
    assert Adder().add(5) == 6


@pytest.mark.parametrize(
    "bug",
    [
        lambda self, one: one,
        lambda self, one, another=1: one,
        lambda self, one, other=2: one,
        lambda self, one, other: one,
        lambda *arguments: 0,
    ],
)
def test_a_bug_of_another_signature_is_refused(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="the signature of"):
        Plant(monkeypatch)(Adder, "add", bug)


def test_what_does_not_exist_cannot_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttributeError):
        Plant(monkeypatch)(Adder, "subtract", lambda self: 0)


def test_a_planted_bug_that_did_not_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    plant = Plant(monkeypatch)
    plant(Adder, "add", lambda self, one, other=1: one)
    with pytest.raises(AssertionError, match=r"never run: Adder\.add"):
        plant.assert_noticed([ended()], [1], [2])


@pytest.mark.parametrize(
    "request_of_run",
    [ended(error=TypeError("planted")), ended(finish_reason="error"), ended(failed_drafters={"ngram"})],
)
def test_a_run_that_raises_does_not_count_as_detection(
    request_of_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = Plant(monkeypatch)
    with pytest.raises(AssertionError):
        plant.assert_noticed([ended(), request_of_run], [1, 1], [2, 2])


def test_the_same_outcome_does_not_count_as_detection(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="was not noticed"):
        Plant(monkeypatch).assert_noticed([ended()], [1], [1])


def test_an_expected_error_does_not_count_as_detection(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [ended(error=GrammarError("planted"), finish_reason="error"), ended()]
    Plant(monkeypatch).assert_noticed(requests, [1, 1], [2, 2], beside=GrammarError)
    with pytest.raises(AssertionError, match="was not noticed"):
        Plant(monkeypatch).assert_noticed(requests, [1, 2], [2, 2], beside=GrammarError)
    with pytest.raises(AssertionError):
        Plant(monkeypatch).assert_noticed(requests, [1, 1], [2, 2], beside=BackendError)


def test_a_planted_value_must_differ_and_have_the_same_type(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (9, "9", None):
        with pytest.raises(AssertionError):
            Plant(monkeypatch).value(Adder, "LIMIT", wrong)
    Plant(monkeypatch).value(Adder, "LIMIT", 8)
    assert Adder.LIMIT == 8
