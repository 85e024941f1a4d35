"""The simulated model: it takes the priced time, and its drafters have the given acceptance."""

from __future__ import annotations

import pytest

from paceline.bench.simulate.costs import Call, PassSize
from paceline.bench.simulate.run import Length, Method, World, parse_methods, simulate
from paceline.bench.simulate.world import Acceptance
from paceline.bench.traffic.profiles import closed
from paceline.errors import ConfigError


class FlatCosts:
    """10 ms for a pass, and one for each of its requests and for each drafted level."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def pass_seconds(self, size: PassSize) -> float:
        self.rows.append(size.rows)
        return 0.01

    def overhead_seconds(self, size: PassSize) -> float:
        return 0.001 * size.requests

    def draft_seconds(self, call: Call) -> float:
        return 0.001 * call.levels


def world(
    *methods: str, acceptance: Acceptance | None = None, **options: object
) -> tuple[World, list[Method]]:
    found = parse_methods(",".join(methods), ["chain"])
    drafters = {"chain": [acceptance or Acceptance.constant(0.7, 16)]}
    costs = FlatCosts()
    settings = {"max_num_batched_tokens": 64} | options
    return World({method.label: costs for method in found}, drafters, **settings), found  # type: ignore[arg-type]


def test_plain_decoding_takes_what_its_passes_cost():
    here, methods = world("off")
    (row,) = simulate(here, methods, [Length(prompt=100, answer=11)], [closed(1)]).rows
    assert row.percentiles["ttft_ms"]["p99"] == pytest.approx(22)  # 100 tokens are two passes of 64 rows
    assert row.percentiles["tpot_ms"]["p50"] == pytest.approx(11)
    assert row.tokens_per_second == pytest.approx(11 / (0.022 + 10 * 0.011))


def test_requests_that_wait_for_others_wait_in_simulated_time():
    here, methods = world("off")
    (row,) = simulate(here, methods, [Length(64, 2)], [closed(32)]).rows
    times = row.percentiles["ttft_ms"]
    assert times["p50"] > 200  # one prompt fills a pass, and there are 32
    assert times["p99"] > times["p50"]


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_simulated_drafts_have_the_given_acceptance(alpha):
    here, methods = world("chain:4", acceptance=Acceptance.constant(alpha, 16))
    off, chain = simulate(here, methods, [Length(8, 80)], [closed(16)]).rows
    expected = 1 + sum(alpha**depth for depth in range(1, 5))
    assert chain.mean_acceptance_length == pytest.approx(expected, rel=0.05)
    assert chain.identical
    assert off.mean_acceptance_length == 1.0


def test_drafted_and_accepted_fractions_by_depth_are_met():
    acceptance = Acceptance(accepted=(0.5, 0.2, 0.1), drafted=(0.8, 0.6, 0.3))
    here, methods = world("chain:3", acceptance=acceptance)
    row = simulate(here, methods, [Length(8, 150)], [closed(16)]).rows[1]
    share = row.drafted_share or 0.0
    assert share == pytest.approx(0.8, rel=0.05)
    assert [share * one for one in row.acceptance_per_position] == pytest.approx([0.5, 0.2, 0.1], rel=0.1)
    assert [share * one for one in row.drafted_per_position] == pytest.approx([0.8, 0.6, 0.3], rel=0.1)


def test_acceptance_at_a_position_does_not_depend_on_the_draft_length():
    """So the same requests are hard for every method, and a run can be repeated."""
    here, methods = world("chain:1", "chain:2", "chain:4")
    first, again = (simulate(here, methods, [Length(8, 40)], [closed(8)]).rows for _ in range(2))
    assert [row.tokens_per_second for row in first] == [row.tokens_per_second for row in again]
    lengths = [row.mean_acceptance_length or 0.0 for row in first[1:]]
    assert lengths == sorted(lengths)


def test_the_controller_drafts_only_where_it_gains():
    good, methods = world("auto")
    gain = simulate(good, methods, [Length(16, 60)], [closed(4)])
    assert (gain.rows[1].speedup_vs_off or 0) > 1.4
    assert gain.decisions[1]["gain"] > 0
    assert not gain.decisions[0]
    bad, methods = world("auto", acceptance=Acceptance.constant(0.02, 16))
    assert (simulate(bad, methods, [Length(16, 60)], [closed(4)]).rows[1].speedup_vs_off or 0) > 0.9


def test_with_little_memory_requests_are_preempted_and_finish():
    here, methods = world("off", kv_tokens=512)
    roomy, _ = world("off")
    (short,) = simulate(here, methods, [Length(64, 64)], [closed(16)]).rows
    (room,) = simulate(roomy, methods, [Length(64, 64)], [closed(16)]).rows
    assert short.output_tokens == room.output_tokens == 32 * 64
    assert short.tokens_per_second < 0.8 * room.tokens_per_second


def test_a_request_that_can_never_fit_is_reported():
    here, methods = world("off", kv_tokens=64)
    with pytest.raises(ConfigError, match="does not fit"):
        simulate(here, methods, [Length(64, 64)], [closed(1)])


def test_requests_take_acceptances_in_turn():
    here, methods = world("chain:4")
    mixed = World(
        here.costs,
        {"chain": [Acceptance.constant(1.0, 4), Acceptance.constant(0.0, 4)]},
        max_num_batched_tokens=64,
    )
    row = simulate(mixed, methods, [Length(8, 41)], [closed(4)]).rows[1]
    assert row.tokens_per_pass == pytest.approx(80 / (40 + 8), rel=0.01)


def test_256_concurrent_requests_share_passes():
    here, methods = world("off", max_num_batched_tokens=512)
    costs = here.costs["off"]
    assert isinstance(costs, FlatCosts)
    (row,) = simulate(here, methods, [Length(2, 3)], [closed(256)]).rows
    assert row.output_tokens == 512 * 3
    assert max(costs.rows) == 512
    assert 256 in costs.rows


@pytest.mark.parametrize("wrong", ["eagle", "chain:0", "chain:x", "off,,auto"])
def test_unknown_methods_are_refused(wrong):
    with pytest.raises(ConfigError, match="chain"):
        parse_methods(wrong, ["chain"])


def test_methods_begin_with_plain_decoding():
    assert [method.label for method in parse_methods("auto,chain:5,chain", ["chain"])] == [
        *("off", "auto", "chain:5", "chain")
    ]
