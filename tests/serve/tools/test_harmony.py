"""gpt-oss' harmony format: channels become reasoning and content, and calls follow their schemas."""

from __future__ import annotations

import itertools

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.params import SamplingParams
from paceline.models.tokenizer import Tokenizer, byte_alphabet
from paceline.serve.tools.declared import Tool, ToolChoice
from paceline.serve.tools.events import read_output
from paceline.serve.tools.formats import FORMATS
from paceline.serve.tools.toolbox import Toolbox
from tests.serve.tools.test_tools_grammar import accepts
from tests.serve.tools.test_tools_parser import joined

RETURN = "<|return|>"
TEMPLATE = "{# <|channel|> <|message|> #}{% for m in messages %}{{ m.content }}{% endfor %}<|start|>assistant"
WEATHER = Tool(
    "weather", parameters={"type": "object", "properties": {"city": {"enum": ["Bern"]}}, "required": ["city"]}
)
THOUGHT = "<|channel|>analysis<|message|>A city?<|end|><|start|>assistant"
REMARK = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Bern."
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bern"}'


def harmony_tokenizer(*ends: str) -> Tokenizer:
    """Bytes and the marks of harmony as special tokens; these end an answer."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(byte_alphabet(), []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([*FORMATS["openai"].tokens, RETURN])
    return Tokenizer(backend, {}, [backend.token_to_id(end) for end in ends], TEMPLATE)


TOKENIZER = harmony_tokenizer(RETURN, "<|call|>")  # as gpt-oss' files say


def read(pieces: list[str], tools: tuple[Tool, ...] = (WEATHER,)) -> list[tuple[object, ...]]:
    toolbox = Toolbox(TOKENIZER)
    plan = toolbox.reading(toolbox.plan(tools), TOKENIZER.encode("<|start|>assistant"), SamplingParams())
    parser = plan.parser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined(events + parser.finish())


def test_channels_are_reasoning_content_and_calls() -> None:
    assert read([THOUGHT + FINAL]) == [("reasoning", None, "A city?"), ("content", None, "Bern.")]
    assert read([THOUGHT + REMARK + CALL]) == [
        ("reasoning", None, "A city?"),
        ("content", None, "I look."),
        ("call", 0, "weather"),
        ("arguments", 0, '{"city": "Bern"}'),
        ("end", 0, True),
    ]
    assert read([THOUGHT + THOUGHT + FINAL])[0] == ("reasoning", None, "A city?\n\nA city?")
    assert read(["Bern."]) == [("content", None, "Bern.")]  # the prompt may have the header


def test_without_tools_what_would_be_a_call_is_content() -> None:
    assert read([THOUGHT + CALL], ()) == [
        ("reasoning", None, "A city?"),
        ("content", None, '{"city": "Bern"}'),
    ]


def test_what_is_cut_off_is_given_as_far_as_it_goes() -> None:
    assert read([CALL[:-3]])[-2:] == [("arguments", 0, '{"city": "Ber'), ("end", 0, False)]
    assert read(["<|channel|>analysis<|message|>A ci"]) == [("reasoning", None, "A ci")]
    assert read([THOUGHT + "<|channel|>fin"]) == [("reasoning", None, "A city?")]  # of a header nothing is


@given(
    text=st.lists(
        st.sampled_from([THOUGHT, REMARK, FINAL, CALL, "<|end|>", "<|", "a", "<|call|>"]), max_size=5
    ).map("".join),
    end=st.integers(0, 300),
    cuts=st.lists(st.integers(0, 300), max_size=6),
)
def test_any_division_into_pieces_gives_the_same(text: str, end: int, cuts: list[int]) -> None:
    text = text[:end]
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    at_once = read([text])
    assert read([text[start:stop] for start, stop in itertools.pairwise(places)]) == at_once
    assert read(list(text)) == at_once


def is_answer(text: str, choice: ToolChoice, tokenizer: Tokenizer = TOKENIZER, end: str = RETURN) -> bool:
    """Whether the whole text is an answer that the grammar allows."""
    return accepts(Toolbox(tokenizer).plan([WEATHER], choice), tokenizer, text, end)


def test_the_grammar_takes_messages_and_valid_calls() -> None:
    for choice in (ToolChoice(), ToolChoice("required")):
        assert is_answer(THOUGHT + REMARK + CALL, choice, end="<|call|>")
        assert is_answer(CALL, choice, end="<|call|>")
        assert not is_answer(CALL.replace("Bern", "Paris"), choice, end="<|call|>")
        assert not is_answer(CALL.replace("weather", "time"), choice, end="<|call|>")
        assert is_answer(THOUGHT + FINAL, choice) == (choice.mode == "auto")
    assert is_answer("Bern.", ToolChoice())
    assert not is_answer(THOUGHT + CALL + "<|call|><|start|>assistant" + CALL, ToolChoice())  # it ended


def test_several_calls_where_a_call_does_not_end_the_answer() -> None:
    tokenizer = harmony_tokenizer(RETURN)
    two = FORMATS["openai"].write([("weather", '{"city": "Bern"}')] * 2)
    assert is_answer(two, ToolChoice(), tokenizer)
    assert not is_answer(two, ToolChoice(single=True), tokenizer)


@pytest.mark.parametrize("tools", [(), (WEATHER,)])
def test_marks_stay_in_the_text_that_is_read(tools: tuple[Tool, ...]) -> None:
    assert Toolbox(TOKENIZER).plan(tools).sampling_options()["skip_special_tokens"] is False


def test_a_whole_answer() -> None:
    toolbox = Toolbox(TOKENIZER)
    plan = toolbox.reading(toolbox.plan([]), [], SamplingParams())
    output = read_output(plan.parser(), THOUGHT + REMARK + FINAL)
    assert (output.reasoning, output.content) == ("A city?", "I look.\n\nBern.")
