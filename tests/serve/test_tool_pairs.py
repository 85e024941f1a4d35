"""Calls whose arguments are pairs (GLM, Qwen3-Coder) become JSON of the schema, however they are cut."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.serve.tools import FORMATS, Tool, Toolbox, ToolCall, ToolChoice, ToolPlan, read_whole
from tests.serve.echo import byte_tokenizer
from tests.serve.test_tools_grammar import accepts
from tests.serve.test_tools_parser import joined

NAMES = [name for name, format in FORMATS.items() if format.pairs]
SEARCH = Tool(
    "search",
    parameters={
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "limit": {"type": "integer"},
            "kinds": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["query"],
    },
)
NOW = Tool("now")
GLM = (
    'I look.\n<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>a "b"\n<c></arg_value>\n'
    "<arg_key>limit</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>"
)
QWEN = (
    'I look.\n<tool_call>\n<function=search>\n<parameter=query>\na "b"\n<c>\n</parameter>\n'
    "<parameter=limit>\n3\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=now>\n</function>\n</tool_call>"
)
OUTPUTS = {"glm45": GLM, "qwen3_coder": QWEN}
formats = pytest.mark.parametrize("name", NAMES)


def plan(name: str, choice: ToolChoice | None = None) -> ToolPlan:
    return Toolbox(byte_tokenizer(), name).plan([SEARCH, NOW], choice)


def calls_of(name: str, text: str) -> tuple[str, list[ToolCall]]:
    return read_whole(plan(name).parser(), text)


@formats
def test_an_output_as_the_models_write_it(name: str) -> None:
    content, calls = calls_of(name, OUTPUTS[name])
    assert content == "I look."
    assert [(call.name, json.loads(call.arguments), call.complete) for call in calls] == [
        ("search", {"query": 'a "b"\n<c>', "limit": 3}, True),
        ("now", {}, True),
    ]


@formats
def test_the_schema_says_what_is_a_text(name: str) -> None:
    written = FORMATS[name].write([("search", '{"query": "5", "kinds": ["a"], "other": "x", "more": 1.5}')])
    (call,) = calls_of(name, written)[1]
    assert call.arguments == '{"query": "5", "kinds": ["a"], "other": "x", "more": 1.5}'


@formats
def test_a_call_that_is_cut_off_is_given_as_far_as_it_goes(name: str) -> None:
    (call,) = calls_of(name, OUTPUTS[name][: OUTPUTS[name].index("<c>")])[1]
    assert (call.arguments, call.complete) == ('{"query": "a \\"b\\"\\n', False)
    (call,) = calls_of(name, OUTPUTS[name][: OUTPUTS[name].index("limit") + 2])[1]
    assert (call.arguments, call.complete) == ('{"query": "a \\"b\\"\\n<c>"', False)


@given(
    name=st.sampled_from(NAMES),
    after=st.sampled_from(["", " Done.", "<tool_", "</"]),
    end=st.integers(0, 260),
    cuts=st.lists(st.integers(0, 260), max_size=6),
)
def test_any_division_into_pieces_gives_the_same(name: str, after: str, end: int, cuts: list[int]) -> None:
    text = (OUTPUTS[name] + after)[:end]

    def read(pieces: list[str]) -> list[tuple[object, ...]]:
        parser = plan(name).parser()
        return joined([event for piece in pieces for event in parser.feed(piece)] + parser.finish())

    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    at_once = read([text])
    assert read([text[start:stop] for start, stop in itertools.pairwise(places)]) == at_once
    assert read(list(text)) == at_once


@formats
@pytest.mark.parametrize("kind", ["plain", "special"])
def test_the_grammar_follows_the_schema_and_leaves_texts_free(name: str, kind: str) -> None:
    tokenizer = byte_tokenizer(special=FORMATS[name].tokens if kind == "special" else ())
    allowed = Toolbox(tokenizer, name).plan([SEARCH, NOW], ToolChoice("required"))
    assert accepts(allowed, tokenizer, OUTPUTS[name].removeprefix("I look.\n"))
    write = FORMATS[name].write
    assert accepts(allowed, tokenizer, write([("search", '{"query": "x", "kinds": ["a", "b"]}')]))
    assert not accepts(allowed, tokenizer, write([("search", '{"limit": 3}')]))
    assert not accepts(allowed, tokenizer, write([("search", '{"query": "x", "limit": "three"}')]))
    assert not accepts(allowed, tokenizer, write([("search", '{"query": "x", "unknown": 1}')]))
