"""StructuredOutputsParams: exactly one form, of the right type."""

from __future__ import annotations

import pytest

import paceline
from paceline import SamplingParams, StructuredOutputsParams
from paceline.errors import RequestError


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json", {"type": "object"}),
        ("json", '{"type": "object"}'),
        ("json_object", True),
        ("regex", "[0-9]+"),
        ("choice", ("yes", "no")),
        ("grammar", 'start: "a"'),
    ],
)
def test_one_of_five_forms_is_given(kind, value):
    params = SamplingParams(structured_outputs={kind: value})
    assert params.structured_outputs == StructuredOutputsParams(**{kind: value})
    assert params.structure is not None
    assert params.structure.kind == kind


def test_without_a_form_nothing_is_asked():
    assert SamplingParams().structure is None
    assert paceline.StructuredOutputsParams is StructuredOutputsParams


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "exactly one of json, json_object, regex, choice, grammar, got none"),
        ({"json_object": False}, "got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
        ({"regexp": "a"}, "did you mean 'regex'"),
        ({"json": 5}, "json must be a JSON schema"),
        ({"json_object": "yes"}, "json_object must be True or False"),
        ({"regex": ""}, "regex must be a text that is not empty"),
        ({"grammar": ["start"]}, "grammar must be a text"),
        ({"choice": "yes"}, "choice must be a list of texts"),
        ({"choice": []}, "choice must be a list of texts"),
        ({"choice": ["a", ""]}, "choice must be a list of texts"),
        ({"choice": ["a", 5]}, "choice must be a list of texts"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern is for JSON"),
        ("json", "structured_outputs must be an object"),
    ],
)
def test_invalid_combinations_are_refused(given, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(structured_outputs=given)


def test_a_choice_is_named_once():
    assert StructuredOutputsParams(choice=["a", "b", "a"]).choice == ("a", "b")
