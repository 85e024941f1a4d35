"""An invalid parameter is refused, with its name, its value and what is allowed."""

from __future__ import annotations

import inspect

import pytest

from paceline import SamplingParams
from paceline.errors import RequestError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("min_p", -0.5),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", float("-inf")),
        ("logit_bias", {1: 101}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", [1, 2]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", "5"),
        ("bad_words", [""]),
        ("bad_words", [5]),
        ("seed", 2**64),
        ("seed", 1.0),
        ("n", 0),
        ("n", None),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", "12"),
        ("min_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", 2.0),
        ("ignore_eos", 1),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", True),
        ("skip_special_tokens", "yes"),
        ("include_stop_str_in_output", None),
    ],
)
def test_bad_values_are_refused_by_name(name, value):
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(RequestError, match="did you mean 'temperature'"):
        SamplingParams(temprature=1)


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(RequestError, match="at most max_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens, params.n) == (
        1.0,
        1.0,
        0,
        16,
        1,
    )


def test_values_are_normalized():
    params = SamplingParams(stop="x", top_k=-1, seed=-1, stop_token_ids=[3], temperature=1e-7)
    assert params.stop == ("x",)
    assert params.top_k == 0
    assert params.seed == 2**64 - 1
    assert params.stop_token_ids == (3,)
    assert params.temperature == 0.0


def test_the_signature_still_shows_every_option():
    assert "repetition_penalty" in inspect.signature(SamplingParams).parameters
