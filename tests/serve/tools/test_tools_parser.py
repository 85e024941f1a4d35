"""The parser: text in any pieces gives the same content and calls, and nothing of the text is lost."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from paceline.serve.tools.events import (
    Arguments,
    CallEnded,
    CallStarted,
    Content,
    Event,
    OutputParser,
    Reasoning,
    ToolCall,
    read_output,
)
from paceline.serve.tools.formats import FORMATS
from paceline.serve.tools.parser import ToolParser
from paceline.serve.tools.repeats import DistinctCalls
from paceline.serve.tools.tool_format import FENCE_END, FENCE_NAME_END, FENCE_START, ToolFormat

WEATHER = ("weather", '{"city": "Bern", "days": [1, 2]}')
NOW = ("now", "{}")
TRICKY = ("echo", '{"text": "}}] \\" {\\"name\\": \\"x\\" </tool_call>\\\\"}')

JSON_FORMATS = {name: format for name, format in FORMATS.items() if format.notation is None}

every_format = pytest.mark.parametrize("format", JSON_FORMATS.values(), ids=JSON_FORMATS)


def read_whole(parser: OutputParser, text: str) -> tuple[str, list[ToolCall]]:
    """The content and the calls of a complete output."""
    return read_output(parser, text)[:2]


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
            case Reasoning(text=text):
                fact = ("reasoning", None, text)
        if facts and fact[0] in ("content", "reasoning", "arguments") and facts[-1][:2] == fact[:2]:
            fact = (fact[0], fact[1], f"{facts.pop()[2]}{fact[2]}")
        facts.append(fact)
    return facts


def events_of(parser: ToolParser, pieces: list[str]) -> list[Event]:
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish()


def test_calls_of_kimi_have_ids_of_their_name_and_number() -> None:
    format = FORMATS["kimi_k2"]
    text = "Well. " + format.write([WEATHER, NOW]).replace(":0<", ":19<").replace(":1<", ":20<")
    assert "functions.weather:19<|" in text
    content, calls = read_whole(ToolParser(format), text)
    assert content == "Well."
    assert [(call.name, call.arguments) for call in calls] == [WEATHER, NOW]
    assert [call.id for call in calls] == ["functions.weather:19", "functions.now:20"]


@every_format
def test_calls_as_the_format_writes_them_are_read_back(format: ToolFormat) -> None:
    written = [WEATHER, NOW, TRICKY]
    content, calls = read_whole(ToolParser(format), format.write(written))
    assert content == ""
    assert [(call.name, call.arguments) for call in calls] == written
    assert all(call.complete and json.loads(call.arguments) is not None for call in calls)


@every_format
def test_each_call_has_a_unique_id(format: ToolFormat) -> None:
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


def test_a_fenced_json_block_is_a_call_if_it_starts_the_answer_and_names_a_tool() -> None:
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


def test_a_possible_marker_is_held_back_until_it_is_decided() -> None:
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
def test_a_truncated_call_gives_its_partial_arguments(
    text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    found, cut = read_whole(ToolParser(FORMATS["hermes"]), text)
    assert found == content
    assert [(call.name, call.arguments) for call in cut] == calls
    assert not any(call.complete for call in cut)


HERMES_NOW = FORMATS["hermes"].write([NOW])
MISTRAL_NOW = '[TOOL_CALLS] [{"name": "now", "arguments": {}}'


@pytest.mark.parametrize(
    ("format", "text", "content"),
    [
        # a call that was cut off before its name is known: content, with the white space before it
        ("mistral", ':: [TOOL_CALLS] [{"name": "0', ':: [TOOL_CALLS] [{"name": "0'),
        ("hermes", 'a\n\n<tool_call>\n{"name": "', 'a\n\n<tool_call>\n{"name": "'),
        ("hermes", HERMES_NOW + '\n<tool_call>\n{"name": "wea', '\n<tool_call>\n{"name": "wea'),
        ("hermes", HERMES_NOW + "\n<tool_c", "\n<tool_c"),
        ("mistral", MISTRAL_NOW + ', {"name": "wea', ', {"name": "wea'),
        ("mistral", MISTRAL_NOW + ', {"na', ', {"na'),
        ("mistral_args", "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]wea", "[TOOL_CALLS]wea"),
        ("llama3_json", '{"name": "now", "parameters": {}}; {"name": "wea', '; {"name": "wea'),
        # the end of a call that was cut off: no content, the call is complete
        ("hermes", HERMES_NOW[:-3], ""),
        ("mistral", MISTRAL_NOW, ""),
        # what follows calls and is neither another nor their end
        ("hermes", HERMES_NOW + "\n\nDone.\n", "\n\nDone.\n"),
        ("hermes", HERMES_NOW[:-3] + "-box>", "\n</tool_ca-box>"),
        ("mistral", MISTRAL_NOW + "] Done.", " Done."),
        ("mistral", MISTRAL_NOW + ", done.", ", done."),
        ("mistral_args", "[TOOL_CALLS]now[ARGS]{} Done.", " Done."),
        ("llama3_json", '{"name": "now", "parameters": {}} Done.', " Done."),
    ],
)
def test_text_after_calls_is_content(format: str, text: str, content: str) -> None:
    found, calls = read_whole(ToolParser(FORMATS[format]), text)
    assert found == content
    assert [(call.name, call.arguments, call.complete) for call in calls] == [("now", "{}", True)] * (
        "now" in text
    )


def test_a_name_without_arguments_is_content() -> None:
    text = '<tool_call>\n{"name": "now", "args": {}}'
    content, calls = read_whole(ToolParser(FORMATS["hermes"]), text)
    assert content == '", "args": {}}'
    assert calls == [ToolCall(calls[0].id, "now", "", complete=False)]


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
texts = st.text(alphabet="ab <>{}[]\n_tolcTOLCAS\"':;,`", max_size=20)
TOOLS = ("weather", "weathers")


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, str]:
    """A format's name and a text: content, calls and content, cut off anywhere."""
    name = draw(st.sampled_from(sorted(JSON_FORMATS)))
    calls = draw(calls_of)
    written = FORMATS[name].write(calls) if calls else draw(st.sampled_from(["", FENCED]))
    whole = draw(texts) + written + draw(texts)
    return name, whole[: draw(st.integers(0, len(whole)))]


def as_pattern(format: ToolFormat, facts: list[tuple[object, ...]]) -> str:
    """A regular expression for the texts that these events may have been read from.

    What is not in an event is what the format says, and white space before a call.
    """
    quoted = re.escape
    written = format.written_id
    written_id = f'[^<"]*{quoted(written.end)}' if written else ""
    starts = [r"\s*" + quoted(format.opening) + written_id]
    starts += [quoted(format.between + format.call_start) + written_id, quoted(FENCE_START)]
    last = format.call_end + format.end
    ends = [quoted(last), quoted(format.call_end), quoted(FENCE_END)]
    cut_ends = [quoted(end[:size]) for end in (last, FENCE_END) for size in range(len(end))]
    name_ends = (format.name_end, FENCE_NAME_END)
    cut_name_ends = [quoted(end[:size]) for end in name_ends for size in range(len(end) + 1)]
    number = "(:[0-9]+)?" if format.counted else ""
    pattern = ""
    for (kind, _, value), following in itertools.zip_longest(facts, facts[1:]):
        match kind:
            case "call":
                pattern += f"({'|'.join(starts)}){quoted(str(value))}{number}"
                if following is not None and following[0] == "arguments":
                    pattern += f"({'|'.join(map(quoted, name_ends))})"
                else:  # cut off, or other text follows
                    pattern += f"(({'|'.join(cut_name_ends)})\\Z)?"
            case "end":
                pattern += f"({'|'.join(ends)}|({'|'.join(cut_ends)})\\Z|(?=\n))" if value else ""
            case _:
                pattern += quoted(str(value))
    return pattern


@settings(max_examples=200)
@given(answer=answers(), cuts=st.lists(st.integers(0, 200), max_size=8), anywhere=st.booleans())
@example(answer=("mistral", ':: [TOOL_CALLS] [{"name": "0'), cuts=[], anywhere=True)
@example(answer=("hermes", HERMES_NOW + '\n<tool_call>\n{"name": "wea'), cuts=[], anywhere=True)
@example(answer=("mistral", MISTRAL_NOW + ', {"name": "wea'), cuts=[], anywhere=True)
@example(answer=("mistral", MISTRAL_NOW + ', {"na'), cuts=[], anywhere=False)
@example(answer=("llama3_json", '{"name": "now", "parameters": {}}; {"name": "w'), cuts=[], anywhere=False)
@example(answer=("hermes", HERMES_NOW + " a \n" + HERMES_NOW), cuts=[], anywhere=True)
@example(answer=("hermes", '<tool_call>\n{"name": "now"}'), cuts=[], anywhere=True)
@example(answer=("hermes", FENCED + "\nb"), cuts=[], anywhere=True)
@example(answer=("hermes", FENCED[:-5] + "b"), cuts=[], anywhere=True)
def test_any_division_into_pieces_gives_the_same_events(
    answer: tuple[str, str], cuts: list[int], anywhere: bool
) -> None:
    format, text = FORMATS[answer[0]], answer[1]

    def read(pieces: list[str]) -> list[tuple[object, ...]]:
        return joined(events_of(ToolParser(format, anywhere, TOOLS), pieces))

    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    at_once = read([text])
    assert read([text[start:end] for start, end in itertools.pairwise(places)]) == at_once
    assert read(list(text)) == at_once
    assert re.fullmatch(as_pattern(format, at_once), text, re.DOTALL)


@given(name=st.sampled_from(sorted(JSON_FORMATS)), text=texts, calls=calls_of.filter(bool), after=texts)
def test_calls_after_text_are_read_back(
    name: str, text: str, calls: list[tuple[str, str]], after: str
) -> None:
    format = FORMATS[name]
    assume(format.marker or not text)
    assume(not (format.end + after).startswith(format.between))
    content, read = read_whole(ToolParser(format), text + format.write(calls) + after)
    assert content == text.rstrip() + after
    assert [(call.name, call.arguments) for call in read] == calls
    assert all(call.complete for call in read)


@every_format
@settings(max_examples=20)
@given(cuts=st.lists(st.integers(0, 400), max_size=6))
def test_what_follows_the_first_repeat_is_left_out_however_the_text_is_cut(
    format: ToolFormat, cuts: list[int]
) -> None:
    text = format.write([NOW, WEATHER, ("weather", '{"city": "Bern", "days": [1, 3]}'), NOW, TRICKY])
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parser = DistinctCalls(ToolParser(format))
    events = [event for start, end in itertools.pairwise(ends) for event in parser.feed(text[start:end])]
    called = [fact[2] for fact in joined(events + parser.finish()) if fact[0] == "call"]
    assert called == ["now", "weather", "weather"]
    assert parser.repeated


@every_format
def test_a_call_that_is_cut_off_within_a_repeat_is_given_as_far_as_it_goes(format: ToolFormat) -> None:
    text = format.write([WEATHER, WEATHER])
    text = text[: text.rindex('"days"')]
    expected = joined(events_of(ToolParser(format), [text]))
    parser = DistinctCalls(ToolParser(format))
    assert joined([*parser.feed(text), *parser.finish()]) == expected
    assert not parser.repeated
