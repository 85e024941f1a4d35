"""The arithmetic against numbers that can be worked out by hand."""

from __future__ import annotations

import json

import pytest

from paceline.bench.simulate.arithmetic import MAX_DRAFT_TOKENS, arithmetic, tokens_per_pass
from paceline.cli import app
from paceline.errors import ConfigError


def test_expected_tokens_are_the_geometric_sum():
    assert tokens_per_pass(0.7, 5) == pytest.approx((1 - 0.7**6) / (1 - 0.7))
    assert tokens_per_pass(0.0, 5) == 1.0
    assert tokens_per_pass(1.0, 5) == 6.0


def test_the_best_length_is_better_than_its_neighbours():
    found = arithmetic(0.7, 20, draft_cost=0.1, row_cost=0.05)
    best = found.best.num_speculative_tokens
    speeds = [length.speedup for length in found.lengths]  # of 1, 2, ...
    assert speeds[best - 1] == max(speeds)
    assert 1 < best < 20


def test_at_the_break_even_nothing_is_gained():
    for length in arithmetic(0.5, 8, draft_cost=0.2, row_cost=0.1).lengths:
        assert length.break_even_alpha is not None
        assert tokens_per_pass(length.break_even_alpha, length.num_speculative_tokens) == pytest.approx(
            length.cost
        )


def test_expensive_drafts_make_plain_decoding_best():
    found = arithmetic(0.99, 3, draft_cost=1.5)
    assert found.best.num_speculative_tokens == 0
    assert [length.break_even_alpha for length in found.lengths] == [None] * 3


def test_with_free_drafts_the_longest_is_best():
    assert arithmetic(0.9, 1, draft_cost=0.0, row_cost=0.0).best.num_speculative_tokens == MAX_DRAFT_TOKENS


@pytest.mark.parametrize("wrong", [{"alpha": 1.1}, {"gamma": 0}, {"gamma": 65}, {"draft_cost": -1.0}])
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        arithmetic(**({"alpha": 0.7, "gamma": 5} | wrong))


def test_the_command_prints_a_table_or_json(capsys):
    app(["simulate", "--alpha", "0.7", "--gamma", "5"], standalone_mode=False)
    assert "2.94" in capsys.readouterr().out  # tokens per pass of 5 drafted
    app(["simulate", "--alpha", "0.7", "--gamma", "5", "--json"], standalone_mode=False)
    assert len(json.loads(capsys.readouterr().out)["lengths"]) == 5
