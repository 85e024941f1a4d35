"""What virtual models decide: pure functions of a request or of an answer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from paceline.core.structured_outputs import StructuredOutputsParams
from paceline.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, SpeculativeMetrics
from paceline.serve.routes.kinds import CascadeRoute, RequestProfile, Rule, RuleRoute, WeightRoute


@pytest.mark.parametrize(
    ("rule", "matching", "other"),
    [
        ({"min_prompt_tokens": 5}, {"num_prompt_tokens": 5}, {"num_prompt_tokens": 4}),
        ({"max_prompt_tokens": 5}, {"num_prompt_tokens": 5}, {"num_prompt_tokens": 6}),
        ({"segments": ["a", "b"]}, {"segment": "b"}, {"segment": "c"}),
        ({"structured": True}, {"structured": True}, {"structured": False}),
        ({"structured": False}, {"structured": False}, {"structured": True}),
        ({"keywords": r"\bSQL\b"}, {"text": "some SQL"}, {"text": "some sql"}),
        ({"segments": ["a"], "keywords": "x"}, {"segment": "a", "text": "x"}, {"segment": "a", "text": "y"}),
    ],
)
def test_a_rule_matches_if_all_its_conditions_hold(
    rule: dict[str, Any], matching: dict[str, Any], other: dict[str, Any]
) -> None:
    tried = Rule(to="there", **rule)
    assert tried.matches(RequestProfile(**{"segment": "", **matching}))
    assert not tried.matches(RequestProfile(**{"segment": "", **other}))


def test_the_first_rule_wins_and_the_default_is_last() -> None:
    route = RuleRoute("rest", (Rule("long", min_prompt_tokens=10), Rule("vip", segments=["vip"])))
    assert route.choose(RequestProfile("vip", num_prompt_tokens=20)) == "long"
    assert route.choose(RequestProfile("vip", num_prompt_tokens=9)) == "vip"
    assert route.choose(RequestProfile("", num_prompt_tokens=9)) == "rest"


def test_weights_are_shares_of_users_and_routes_split_them_differently() -> None:
    route = WeightRoute({"a": 3, "b": 1})
    users = [f"user-{number}" for number in range(4000)]
    chosen = [route.choose("first", user) for user in users]
    assert 0.72 < Counter(chosen)["a"] / len(users) < 0.78
    assert chosen == [route.choose("first", user) for user in users]
    assert chosen != [route.choose("second", user) for user in users]


def test_a_larger_share_keeps_the_users_it_had() -> None:
    users = [f"user-{number}" for number in range(300)]
    before = {user for user in users if WeightRoute({"new": 10, "old": 90}).choose("r", user) == "new"}
    after = {user for user in users if WeightRoute({"new": 30, "old": 70}).choose("r", user) == "new"}
    assert before < after


def answer(text: str = "fine", reason: str = "stop", logprob: float = -0.1, tokens: int = 2) -> RequestOutput:
    """An answer whose tokens have this log-probability on average."""
    made = CompletionOutput(0, text, [1] * tokens, reason, None, None, logprob * tokens)
    metrics = RequestMetrics(0.0, 0.0, 0.0, 0.0, 0, 0, SpeculativeMetrics())
    return RequestOutput("x", None, [1], None, [made], True, metrics)


JSON = StructuredOutputsParams(json={"type": "object"})
REGEX = StructuredOutputsParams(regex="a+")


@pytest.mark.parametrize(
    ("criterion", "good", "bad"),
    [
        ({"min_logprob": -0.5}, answer(logprob=-0.5), answer(logprob=-0.51)),
        ({"verify": ["finished"]}, answer(), answer(reason="length")),
        ({"verify": ["schema"]}, answer("{}"), answer("{}", reason="length")),
        ({"verify": ["schema"]}, answer('{"a": 1}'), answer('{"a": ')),
        ({"must_match": "^[a-z]+$"}, answer("abc"), answer("ABC")),
        ({"must_not_match": "(?i)i do not know"}, answer("It is 4."), answer("I do not know.")),
    ],
)
def test_a_cascade_accepts_what_meets_its_criterion(criterion: Any, good: Any, bad: Any) -> None:
    route = CascadeRoute(["small", "large"], **criterion)
    assert route.accepts([good], JSON)
    assert not route.accepts([bad], JSON)
    assert not route.accepts([good, bad], JSON)


def test_the_schema_verifier_is_of_structured_answers_only() -> None:
    route = CascadeRoute(["small", "large"], verify=["schema"])
    assert route.accepts([answer("no JSON", reason="length")], None)
    assert route.accepts([answer("aaa")], REGEX)
    assert not route.accepts([answer("aaa", reason="length")], REGEX)
