"""The parser: text in any pieces gives the same content and calls, and nothing of a marker as content."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.serve.tools import (
    FORMATS,
    Arguments,
    CallEnded,
    CallStarted,
    Content,
    Event,
    ToolCall,
    ToolFormat,
    ToolParser,
    read_whole,
)

WEATHER = ("weather", '{"city": "Bern", "days": [1, 2]}')
NOW = ("now", "{}")
TRICKY = ("echo", '{"text": "}}] \\" {\\"name\\": \\"x\\" </tool_call>\\\\"}')

every_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)


def joined(events: list[Event]) -> list[tuple[object, ...]]:
    """Events with neighbours of one kind joined, and without ids."""
    facts: list[tuple[object, ...]] = []
    for event in events:
        match event:
            case Content(text=text):
                fact: tuple[object, ...] = ("content", None, text)
            case CallStarted(index=index, name=name):
                fact = ("call", index, name)
            case Arguments(index=index, text=text):
                fact = ("arguments", index, text)
            case CallEnded(index=index, complete=complete):
                fact = ("end", index, complete)
        if facts and fact[0] in ("content", "arguments") and facts[-1][:2] == fact[:2]:
            fact = (fact[0], fact[1], f"{facts.pop()[2]}{fact[2]}")
        facts.append(fact)
    return facts


def events_of(parser: ToolParser, pieces: list[str]) -> list[Event]:
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish()


@every_format
def test_calls_as_the_format_writes_them_are_read_back(format: ToolFormat) -> None:
    written = [WEATHER, NOW, TRICKY]
    content, calls = read_whole(ToolParser(format), format.write(written))
    assert content == ""
    assert [(call.name, call.arguments) for call in calls] == written
    assert all(call.complete and json.loads(call.arguments) is not None for call in calls)


@every_format
def test_each_call_has_an_id_of_its_own(format: ToolFormat) -> None:
    _, calls = read_whole(ToolParser(format), format.write([NOW] * 20))
    assert len({call.id for call in calls}) == 20
    assert all(call.id.startswith(format.id_prefix) for call in calls)


def test_text_before_a_call_is_content_without_the_space_between() -> None:
    text = "I will look.\n\n" + FORMATS["hermes"].write([NOW])
    content, calls = read_whole(ToolParser(FORMATS["hermes"]), text)
    assert content == "I will look."
    assert [call.name for call in calls] == ["now"]


def test_a_format_without_a_marker_has_calls_only_at_the_start() -> None:
    text = "See: " + FORMATS["llama3_json"].write([NOW])
    assert read_whole(ToolParser(FORMATS["llama3_json"]), text) == (text, [])


def test_an_answer_that_is_calls_or_json_has_no_calls_inside_its_json() -> None:
    text = json.dumps({"quoted": FORMATS["hermes"].write([NOW])})
    assert read_whole(ToolParser(FORMATS["hermes"], anywhere=False), text) == (text, [])


FENCED = '```json\n{\n  "name": "weather",\n  "arguments": {"city": "Bern", "days": [1, 2]}\n}\n```'


def test_a_call_in_a_block_of_json_is_one_if_it_starts_the_answer_and_names_a_tool() -> None:
    def read(text: str, names: tuple[str, ...] = ("now", "weather")) -> tuple[str, list[tuple[str, str]]]:
        content, calls = read_whole(ToolParser(FORMATS["hermes"], names=names), text)
        return content, [(call.name, call.arguments) for call in calls]

    assert read(FENCED) == ("", [WEATHER])
    assert read(FENCED, ("now",)) == (FENCED, [])
    assert read("Like this:\n" + FENCED) == ("Like this:\n" + FENCED, [])
    assert read(FENCED[:25]) == (FENCED[:25], [])
    assert read('```json\n{"a": 1}\n```') == ('```json\n{"a": 1}\n```', [])


def test_without_tools_everything_is_content_at_once() -> None:
    parser = ToolParser(None)
    assert parser.feed("<tool_") == [Content("<tool_")]
    assert parser.feed(" ") == [Content(" ")]
    assert parser.finish() == []


def test_arguments_stream_as_the_model_writes_them() -> None:
    parser = ToolParser(FORMATS["hermes"])
    assert parser.feed('<tool_call>\n{"name": "wea') == []
    (started,) = parser.feed('ther", "argu')
    assert isinstance(started, CallStarted)
    assert (started.index, started.name) == (0, "weather")
    assert parser.feed('ments": {"city": "Be') == [Arguments(0, '{"city": "Be')]
    assert parser.feed('rn"') == [Arguments(0, 'rn"')]
    assert parser.feed("}}\n</tool") == [Arguments(0, "}"), CallEnded(0, complete=True)]
    assert parser.feed("_call>") == []
    assert parser.finish() == []


def test_half_a_marker_is_held_back_until_it_is_none() -> None:
    parser = ToolParser(FORMATS["hermes"])
    assert parser.feed("a <tool_call>\n{") == [Content("a")]
    assert parser.feed("}") == [Content(" <tool_call>\n{}")]
    assert parser.feed("b \n") == [Content("b")]
    assert parser.finish() == [Content(" \n")]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hi <tool_c", "Hi <tool_c", []),
        ('<tool_call>\n{"name": "no', '<tool_call>\n{"name": "no', []),
        ('<tool_call>\n{"name": "now"', "", [("now", "")]),
        ('<tool_call>\n{"name": "now", "arguments": ', "", [("now", "")]),
        ('<tool_call>\n{"name": "echo", "arguments": {"text": "a\\', "", [("echo", '{"text": "a\\')]),
    ],
)
def test_what_there_is_of_a_call_that_was_cut_off_is_given(
    text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    found, cut = read_whole(ToolParser(FORMATS["hermes"]), text)
    assert found == content
    assert [(call.name, call.arguments) for call in cut] == calls
    assert not any(call.complete for call in cut)


def test_a_second_call_that_was_cut_off_before_its_name_is_not_content() -> None:
    text = FORMATS["hermes"].write([NOW]) + '\n<tool_call>\n{"name": "wea'
    content, calls = read_whole(ToolParser(FORMATS["hermes"]), text)
    assert content == ""
    assert calls == [ToolCall(calls[0].id, "now", "{}", complete=True)]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab"\\{}[]<>é\n', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
calls_of = st.lists(
    st.tuples(
        st.from_regex(r"[A-Za-z0-9_.-]{1,8}", fullmatch=True),
        st.dictionaries(st.text(max_size=3), values, max_size=3).map(json.dumps),
    ),
    max_size=3,
)
texts = st.text(alphabet="ab <>{}[]\n_tolcTOLCAS\"':", max_size=20)


@settings(max_examples=150, deadline=None)
@given(
    format=st.sampled_from(list(FORMATS.values())),
    text=texts,
    calls=calls_of,
    fenced=st.booleans(),
    keep=st.floats(0, 1),
    anywhere=st.booleans(),
    data=st.data(),
)
def test_pieces_do_not_matter(
    format: ToolFormat,
    text: str,
    calls: list[tuple[str, str]],
    fenced: bool,
    keep: float,
    anywhere: bool,
    data: st.DataObject,
) -> None:
    whole = FENCED if fenced else text + (format.write(calls) if calls else "")
    whole = whole[: round(len(whole) * keep)]  # cut off anywhere
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    pieces = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    names = ("weather", "weathers")
    at_once = joined(events_of(ToolParser(format, anywhere, names), [whole]))
    assert joined(events_of(ToolParser(format, anywhere, names), pieces)) == at_once
    assert joined(events_of(ToolParser(format, anywhere, names), list(whole))) == at_once
    if not any(fact[0] == "call" for fact in at_once):  # then nothing may be lost
        assert "".join(str(fact[2]) for fact in at_once) == whole
