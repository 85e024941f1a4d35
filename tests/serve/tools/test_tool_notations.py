"""Arguments that are no JSON (GLM, Qwen3-Coder, Gemma, LFM2) become JSON of the schema, however cut."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.params import SamplingParams
from paceline.serve.tools.declared import Tool, ToolChoice
from paceline.serve.tools.events import ToolCall, read_output
from paceline.serve.tools.formats import FORMATS
from paceline.serve.tools.parser import ToolParser
from paceline.serve.tools.reasoning import REASONING_FORMATS
from paceline.serve.tools.toolbox import Toolbox, ToolPlan
from tests.serve.echo import PLAIN_TEMPLATE, byte_tokenizer
from tests.serve.tools.test_tools_grammar import accepts
from tests.serve.tools.test_tools_parser import joined, read_whole

NAMES = [name for name, format in FORMATS.items() if format.notation]
SEARCH = Tool(
    "search",
    parameters={
        "type": "object",
        "properties": {
            "about": {"type": "string"},
            "count": {"type": "integer"},
            "kinds": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["about"],
    },
)
NOW = Tool("now")
GLM = (
    'I look.\n<tool_call>search\n<arg_key>about</arg_key>\n<arg_value>a "b"\n<c></arg_value>\n'
    "<arg_key>count</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>"
)
GLM_47 = (
    'I look.\n<tool_call>search<arg_key>about</arg_key><arg_value>a "b"\n<c></arg_value>'
    "<arg_key>count</arg_key><arg_value>3</arg_value></tool_call><tool_call>now</tool_call>"
)
QWEN = (
    'I look.\n<tool_call>\n<function=search>\n<parameter=about>\na "b"\n<c>\n</parameter>\n'
    "<parameter=count>\n3\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=now>\n</function>\n</tool_call>"
)
SEED = (
    'I look.\n<seed:tool_call>\n<function=search>\n<parameter=about>a "b"\n<c></parameter>\n'
    "<parameter=count>3</parameter>\n</function>\n</seed:tool_call>\n"
    "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>"
)
MINIMAX = (
    'I look.\n<minimax:tool_call>\n<invoke name="search">\n<parameter name="about">a "b"\n<c></parameter>\n'
    '<parameter name="count">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>'
)
HUNYUAN = (
    GLM.replace("<tool_call>search", "<tool_call>search<tool_sep>")
    .replace("<tool_call>now", "<tool_call>now<tool_sep>")
    .replace("I look.\n", "I look.\n<tool_calls>\n")
    + "\n</tool_calls>"
)
for mark in ("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value"):
    HUNYUAN = HUNYUAN.replace(f"{mark}>", f"{mark}:opensource>")
GEMMA = (
    'I look.\n<|tool_call>call:search{about:<|"|>a "b"\n<c><|"|>,count:3}<tool_call|>'
    "<|tool_call>call:now{}<tool_call|>"
)
FUNCTION_GEMMA = (
    'I look.\n<start_function_call>call:search{about:<escape>a "b"\n<c><escape>,count:3}<end_function_call>'
    "<start_function_call>call:now{}<end_function_call>"
)
LFM2 = 'I look.\n<|tool_call_start|>[search(about="a \\"b\\"\\n<c>", count=3), now()]<|tool_call_end|>'
PYTHONIC = '[search(about="a \\"b\\"\\n<c>", count=3), now()]'
OUTPUTS = {
    "lfm2": LFM2,
    "pythonic": PYTHONIC,
    "llama4_pythonic": f"<|python_start|>{PYTHONIC}<|python_end|>",
    "glm45": GLM,
    "glm47": GLM_47,
    "qwen3_coder": QWEN,
    "seed_oss": SEED,
    "minimax_m2": MINIMAX,
    "hy_v3": HUNYUAN,
    "gemma4": GEMMA,
    "functiongemma": FUNCTION_GEMMA,
}
THINKS = [
    ("hermes", "<think>", "</think>"),
    ("seed_oss", "<seed:think>", "</seed:think>"),
    ("hy_v3", "<think:opensource>", "</think:opensource>"),
    ("mistral", "[THINK]", "[/THINK]"),
]
formats = pytest.mark.parametrize("name", NAMES)


def plan(name: str, choice: ToolChoice | None = None) -> ToolPlan:
    return Toolbox(byte_tokenizer(), name).plan([SEARCH, NOW], choice)


def calls_of(name: str, text: str) -> tuple[str, list[ToolCall]]:
    return read_whole(plan(name).parser(), text)


@formats
def test_an_output_as_the_models_write_it(name: str) -> None:
    content, calls = calls_of(name, OUTPUTS[name])
    assert content == ("I look." if FORMATS[name].marker else "")  # else it must be calls from its start
    assert [(call.name, json.loads(call.arguments), call.complete) for call in calls] == [
        ("search", {"about": 'a "b"\n<c>', "count": 3}, True),
        ("now", {}, True),
    ]


@formats
def test_the_schema_says_what_is_a_text(name: str) -> None:
    written = FORMATS[name].write([("search", '{"about": "5", "kinds": ["a"], "more": 1.5, "other": "x"}')])
    (call,) = calls_of(name, written)[1]
    assert call.arguments == '{"about": "5", "kinds": ["a"], "more": 1.5, "other": "x"}'


@formats
def test_a_call_that_is_cut_off_is_given_as_far_as_it_goes(name: str) -> None:
    (call,) = calls_of(name, OUTPUTS[name][: OUTPUTS[name].index("<c>")])[1]
    assert (call.arguments, call.complete) == ('{"about": "a \\"b\\"\\n', False)
    (call,) = calls_of(name, OUTPUTS[name][: OUTPUTS[name].index("count") + 2])[1]
    assert (call.arguments, call.complete) == ('{"about": "a \\"b\\"\\n<c>"', False)


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
    assert accepts(allowed, tokenizer, write([("search", '{"about": "x", "kinds": ["a", "b"]}')]))
    assert not accepts(allowed, tokenizer, write([("search", '{"count": 3}')]))
    assert not accepts(allowed, tokenizer, write([("search", '{"about": "x", "count": "three"}')]))
    assert not accepts(allowed, tokenizer, write([("search", '{"about": "x", "unknown": 1}')]))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab"\\{}[]<|>,:é\n', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab_", min_size=1), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(arguments=st.dictionaries(st.text("ab_", min_size=1), values, max_size=3), end=st.integers(0, 99))
def test_gemmas_nested_values_are_read_back_and_given_as_they_come(
    arguments: dict[str, object], end: int
) -> None:
    format = FORMATS["gemma4"]
    text = format.write([("f", json.dumps(arguments))])
    (call,) = read_whole(ToolParser(format), text)[1]
    assert json.loads(call.arguments) == arguments
    cut = read_whole(ToolParser(format), text[:end])[1]
    assert not cut or call.arguments.startswith(cut[0].arguments)


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("""x='it is "so"', y='a, b)'""", {"x": 'it is "so"', "y": "a, b)"}),
        ("x=True, y=None, z=-1.5", {"x": True, "y": None, "z": -1.5}),
        ("x=['a', {'b': False}], y={}", {"x": ["a", {"b": False}], "y": {}}),
        ("x=true, y=null", {"x": True, "y": None}),
        ("x={1}, y=some words", {"x": "{1}", "y": "some words"}),
        (r'x="\ud83d\ude00 \/"', {"x": "\U0001f600 /"}),
    ],
)
def test_lfm2s_values_are_json_or_literals_of_python(written: str, arguments: dict[str, object]) -> None:
    text = f"<|tool_call_start|>[f({written})]<|tool_call_end|>"
    (call,) = read_whole(ToolParser(FORMATS["lfm2"]), text)[1]
    assert (json.loads(call.arguments), call.complete) == (arguments, True)


@pytest.mark.parametrize(
    ("written", "is_allowed"),
    [
        ("a=True", True),
        ("a=False, b=None, c=2", True),
        ("a=True, c=2", True),
        ('a=True, b="x"', True),
        ("a=1", False),
        ("b=None", False),
        ("a=True, c=None", False),
        ("c=2, a=True", False),
        ("a=True, d=1", False),
    ],
)
def test_lfm2s_grammar_follows_the_schema(written: str, is_allowed: bool) -> None:
    kinds = {"a": "boolean", "b": ["string", "null"], "c": "integer"}
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in kinds.items()}}
    tool = Tool("f", parameters={**schema, "required": ["a"]})
    tokenizer = byte_tokenizer()
    plan = Toolbox(tokenizer, "lfm2").plan([tool], ToolChoice("required"))
    assert accepts(plan, tokenizer, f"<|tool_call_start|>[f({written})]<|tool_call_end|>") == is_allowed


@given(arguments=st.dictionaries(st.text("ab_", min_size=1), values, max_size=3))
def test_lfm2s_nested_values_are_read_back(arguments: dict[str, object]) -> None:
    text = FORMATS["lfm2"].write([("f", json.dumps(arguments))])
    (call,) = read_whole(ToolParser(FORMATS["lfm2"]), text)[1]
    assert json.loads(call.arguments) == arguments


PLACE: dict[str, object] = {
    "type": "object",
    "properties": {
        "at": {"$ref": "#/$defs/Point"},
        "kind": {"enum": ["é", 1, None]},
        "names": {"type": "array", "items": {"type": ["string", "null"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["at"],
    "$defs": {
        "Point": {
            "type": "object",
            "properties": {"next": {"$ref": "#/$defs/Point"}, "x": {"type": "integer"}},
            "required": ["x"],
        }
    },
}


@pytest.mark.parametrize(
    ("arguments", "is_allowed"),
    [
        ({"at": {"x": 1}}, True),
        ({"at": {"x": 1, "next": {"x": 2, "next": {"x": 3}}}, "kind": "é", "names": ["a", None]}, True),
        ({"at": {"x": 1}, "kind": 1}, True),
        ({"at": {"x": 1, "next": {}}}, False),
        ({"at": {"x": 1.5}}, False),
        ({"at": {"x": 1}, "kind": "e"}, False),
        ({"at": {"x": 1}, "names": []}, False),
        ({"at": {"x": 1}, "names": ["a", "b", "c"]}, False),
        ({"names": ["a"]}, False),
    ],
)
def test_gemmas_grammar_follows_nested_schemas(arguments: dict[str, object], is_allowed: bool) -> None:
    tokenizer = byte_tokenizer()
    allowed = Toolbox(tokenizer, "gemma4").plan([Tool("place", parameters=PLACE)], ToolChoice("required"))
    text = FORMATS["gemma4"].write([("place", json.dumps(arguments))])
    assert accepts(allowed, tokenizer, text) == is_allowed


@pytest.mark.parametrize(("name", "begin", "end"), [("gemma4", "<|channel>thought\n", "<channel|>"), *THINKS])
def test_a_model_may_think_in_special_tokens_before_it_calls(name: str, begin: str, end: str) -> None:
    clues = next(format.clues for format in REASONING_FORMATS if format.begin == begin.strip())
    template = PLAIN_TEMPLATE + "{# " + begin.strip() + end + " ".join(clues) + " #}"
    marks = ("<|channel>",) if name == "gemma4" else (begin,)
    tokenizer = byte_tokenizer(template, special=(*FORMATS[name].tokens, *marks, end))
    toolbox = Toolbox(tokenizer, name)
    allowed = toolbox.plan([NOW])
    text = f"{begin}Hm.{end}I look.{FORMATS[name].write([('now', '{}')])}"
    assert accepts(allowed, tokenizer, text)
    assert not accepts(allowed, tokenizer, text.replace("now", "then"))
    output = read_output(toolbox.reading(allowed, [], SamplingParams()).parser(), text)
    assert (output.reasoning, output.content, output.calls[0].name) == ("Hm.", "I look.", "now")
