"""Routing policies: the cached prefix and the session first, load second, bounded memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.kv.hashing import page_hashes
from paceline.scale.remote.routing import (
    LeastLoadedRouting,
    PrefixRouting,
    RandomRouting,
    Routing,
    RoutingOptions,
)

POLICIES = [PrefixRouting, LeastLoadedRouting, RandomRouting]
NAMES = st.sampled_from("abc")
PROMPTS = st.lists(st.integers(0, 1), max_size=6).map(lambda tokens: page_hashes(tokens, 1))
SESSIONS = st.none() | st.sampled_from(["x", "y", "z"])
RECORDS = st.lists(st.tuples(NAMES, PROMPTS, SESSIONS), max_size=12)
LOADS = st.dictionaries(NAMES, st.integers(0, 5), min_size=1)
IDLE = {"a": 0, "b": 0, "c": 0}


def after(records: Sequence[tuple[str, Sequence[int], str | None]], **options: float) -> PrefixRouting:
    policy = PrefixRouting(RoutingOptions(**options))  # type: ignore[arg-type]
    for record in records:
        policy.record(*record)
    return policy


@pytest.mark.parametrize("make", POLICIES)
@given(records=RECORDS, prompt=PROMPTS, session=SESSIONS, loads=LOADS)
def test_every_policy_ranks_all_replicas_and_repeats_itself(
    make: type[Routing],
    records: list[tuple[str, list[int], str | None]],
    prompt: list[int],
    session: str | None,
    loads: dict[str, int],
) -> None:
    ranked = []
    for order in (loads, dict(reversed(loads.items()))):  # the order of the mapping does not matter
        policy = make()
        for record in records:
            policy.record(*record)
        ranked.append(policy.rank(prompt, session, order))
    assert ranked[0] == ranked[1]
    assert sorted(ranked[0]) == sorted(loads)


@given(RECORDS, PROMPTS, LOADS, st.integers(0, 4))
def test_a_score_counts_cached_pages_and_requests(
    records: list[tuple[str, list[int], str | None]], prompt: list[int], loads: dict[str, int], weight: int
) -> None:
    """The readable reference: prefixes as plain sets, none of which is full."""
    policy = after(records, pages_per_request=weight, session_pages=0)
    pages = {name: {page for to, sent, _ in records if to == name for page in sent} for name in loads}
    scores = {name: len(pages[name] & set(prompt)) - weight * load for name, load in loads.items()}
    ranked = [scores[name] for name in policy.rank(prompt, None, loads)]
    assert ranked == sorted(scores.values(), reverse=True)


@given(RECORDS, PROMPTS, st.integers(1, 4))
def test_memory_is_bounded_and_the_newest_prompt_is_remembered_from_its_start(
    records: list[tuple[str, list[int], str | None]], prompt: list[int], max_pages: int
) -> None:
    policy = after(records, pages_per_request=1, session_pages=0, max_pages=max_pages)
    policy.record("a", prompt, None)
    remembered = min(len(prompt), max_pages)
    fresh = "none of the others"
    assert policy.rank(prompt, None, {"a": remembered, fresh: 0})[0] == fresh  # worth that many requests,
    if remembered:
        assert policy.rank(prompt, None, {"a": remembered - 1, fresh: 0})[0] == "a"  # and no fewer


def test_a_session_returns_to_its_replica_until_others_are_much_less_loaded() -> None:
    policy = after([("b", [], "x"), ("a", [], "y"), ("c", [], None)], pages_per_request=4, session_pages=8)
    assert policy.rank([], "x", IDLE)[0] == "b"
    assert policy.rank([], "x", {"a": 0, "b": 1, "c": 0})[0] == "b"
    assert policy.rank([], "x", {"a": 0, "b": 3, "c": 0})[0] == "a"


def test_a_session_moves_with_its_last_request_and_the_oldest_is_forgotten() -> None:
    policy = after([("a", [], "x"), ("b", [], "x"), ("c", [], "y"), ("c", [], None)], max_sessions=2)
    assert policy.rank([], "x", IDLE)[0] == "b"
    policy.record("a", [], "z")
    assert policy.rank([], "x", IDLE) == policy.rank([], None, IDLE)
    assert policy.rank([], "y", IDLE)[0] == "c"


def test_new_prompts_go_round_idle_replicas() -> None:
    policy = PrefixRouting()
    used = []
    for number in range(6):
        used.append(policy.rank([number], None, IDLE)[0])
        policy.record(used[-1], [number], None)
    assert used == ["a", "b", "c"] * 2


def test_a_prefix_that_all_requests_share_spreads_over_replicas() -> None:
    policy, loads = PrefixRouting(), dict(IDLE)
    for _ in range(60):
        best = policy.rank(range(40), None, loads)[0]
        policy.record(best, range(40), None)
        loads[best] += 1
    assert set(loads.values()) == {20}


def test_a_forgotten_replica_is_like_a_new_one() -> None:
    policy = after([("b", [1, 2], "x")])
    assert policy.rank([1, 2], "x", IDLE)[0] == "b"
    policy.forget("b")
    assert policy.rank([1, 2], "x", IDLE) == ["a", "b", "c"]
    policy.forget("never seen")


def test_least_loaded_routing_looks_at_nothing_else() -> None:
    policy = LeastLoadedRouting()
    policy.record("a", [1, 2, 3], "x")
    assert policy.rank([1, 2, 3], "x", {"a": 1, "b": 0, "c": 2}) == ["b", "a", "c"]
    assert policy.rank([1, 2, 3], "x", IDLE) == ["b", "c", "a"]


def test_random_routing_is_even() -> None:
    policy = RandomRouting()
    chosen = [policy.rank([1], "x", {"a": 9, "b": 0})[0] for _ in range(1000)]
    assert 450 < chosen.count("a") < 550


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pages_per_request": -1}, "pages_per_request must be a number from 0"),
        ({"max_pages": 0}, "max_pages must be an integer from 1"),
        ({"max_sessions": 1.5}, "max_sessions must be an integer"),
        ({"pages_per_reqest": 1}, "did you mean 'pages_per_request'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RoutingOptions(**options)  # type: ignore[arg-type]
