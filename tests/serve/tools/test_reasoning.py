"""What a model thinks is told from what it says, however the text is cut, in every API."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.models.tokenizer import Tokenizer
from paceline.serve.tools.events import Content, Event, Reasoning
from paceline.serve.tools.formats import FORMATS
from paceline.serve.tools.parser import ToolParser
from paceline.serve.tools.reasoning import ReasoningParser, choose_reasoning
from paceline.serve.tools.repeats import DistinctCalls
from tests.serve.echo import PLAIN_TEMPLATE, ask, byte_tokenizer
from tests.serve.tools.test_tools_parser import joined

TEMPLATE = PLAIN_TEMPLATE + "{# <think> </think> #}"
THINKING = byte_tokenizer(TEMPLATE)
# its template begins the reasoning; the echo model counts these bytes as a part of its answer
OPENED = byte_tokenizer(TEMPLATE.replace("<|answer|>", "<|answer|><think>\n"))
OPENING = "<think>\n"
SPECIAL = byte_tokenizer(TEMPLATE, special=("<think>", "</think>"))
ANSWER = "<think>\nA city?\n</think>\n\nBern."
CHAT = "/v1/chat/completions"


def parser(is_open: bool = False) -> ReasoningParser:
    format = choose_reasoning(TEMPLATE)
    assert format is not None
    return ReasoningParser(DistinctCalls(ToolParser(FORMATS["hermes"])), format, is_open)


def read(pieces: list[str], is_open: bool = False) -> list[tuple[object, ...]]:
    reader = parser(is_open)
    events: list[Event] = [event for piece in pieces for event in reader.feed(piece)]
    return joined(events + reader.finish())


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        (ANSWER, False, "A city?", "Bern."),
        ("\n" + ANSWER, False, "A city?", "Bern."),
        ("A city?\n</think>\n\nBern.", True, "A city?", "Bern."),
        ("</think>\n\nBern.", True, "", "Bern."),
        ("Bern.", False, "", "Bern."),
        ("Bern, <think>not this</think>.", False, "", "Bern, <think>not this</think>."),
        ("<think>\nA city? </thi", False, "A city? </thi", ""),  # cut off
        ("A city?", True, "A city?", ""),
        ("<thi", False, "", "<thi"),
        ("<think></think>", False, "", ""),
    ],
)
def test_reasoning_is_what_an_output_starts_with(
    text: str, is_open: bool, reasoning: str, content: str
) -> None:
    facts = read([text], is_open)
    assert "".join(str(fact[2]) for fact in facts if fact[0] == "reasoning") == reasoning
    assert "".join(str(fact[2]) for fact in facts if fact[0] == "content") == content


@given(
    text=st.lists(
        st.sampled_from(
            [
                "<think>",
                "</think>",
                "a",
                "<",
                "</",
                "\n",
                " ",
                *map(FORMATS["hermes"].write, [[("now", "{}")]]),
            ]
        ),
        max_size=9,
    ).map("".join),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    is_open=st.booleans(),
)
def test_any_division_into_pieces_gives_the_same(text: str, cuts: list[int], is_open: bool) -> None:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    at_once = read([text], is_open)
    assert read([text[start:end] for start, end in itertools.pairwise(places)], is_open) == at_once
    assert read(list(text), is_open) == at_once


def test_a_call_ends_reasoning_without_a_mark() -> None:
    facts = read(["<think>\nLook it up. " + FORMATS["hermes"].write([("now", "{}")])])
    assert [fact[0] for fact in facts] == ["reasoning", "call", "arguments", "end"]


def test_it_streams_at_once() -> None:
    reader = parser()
    assert reader.feed("<think>\nA ci") == [Reasoning("A ci")]
    assert reader.feed("ty?\n</th") == [Reasoning("ty?")]
    assert reader.feed("ink>\n") == []
    assert reader.feed("\nBern") == [Content("Bern")]


def message_of(text: str, tokenizer: Tokenizer, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    answer = ask(CHAT, tokenizer, messages=messages, temperature=0, **options)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0]["message"])


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [(THINKING, ANSWER), (SPECIAL, ANSWER), (OPENED, ANSWER)],
    ids=["", "special", "opened"],
)
def test_a_chat_answer_has_it_beside_its_content(tokenizer: Tokenizer, text: str) -> None:
    message = message_of(text, tokenizer)
    assert (message["reasoning_content"], message["content"]) == ("A city?", "Bern.")
    message = message_of(text, tokenizer, include_reasoning=False)
    assert (message.get("reasoning_content"), message["content"]) == (None, "Bern.")


def test_a_structured_answer_has_none_even_if_the_prompt_began_it() -> None:
    message = message_of(OPENING + "7", OPENED, structured_outputs={"regex": "[0-9]"})
    assert (message.get("reasoning_content"), message["content"]) == (None, "7")


def test_streams_of_all_three_apis_have_it_before_the_content() -> None:
    def events(path: str, **body: Any) -> list[dict[str, Any]]:
        answer = ask(path, THINKING, stream=True, temperature=0, **body)
        lines = [
            line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: {")
        ]
        return [json.loads(line) for line in lines]

    messages = [{"role": "user", "content": ANSWER}]
    deltas = [event["choices"][0]["delta"] for event in events(CHAT, messages=messages)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "A city?"
    assert "".join(delta.get("content", "") for delta in deltas) == "Bern."
    (*_, done) = events("/v1/responses", input=ANSWER)
    thought, said = done["response"]["output"]
    assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "A city?")
    assert (said["type"], said["content"][0]["text"]) == ("message", "Bern.")
    blocks = [
        event["content_block"]["type"]
        for event in events("/v1/messages", model="echo", max_tokens=99, messages=messages)
        if event["type"] == "content_block_start"
    ]
    assert blocks == ["thinking", "text"]
