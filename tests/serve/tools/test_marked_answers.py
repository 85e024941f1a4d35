"""Formats with marks around calls, thoughts and answers: Solar Open, Command R7B, Hunyuan A13B, Llama 4.

The templates are minimal versions of the published ones; the outputs have the forms that these show.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.params import SamplingParams
from paceline.models.tokenizer import Tokenizer, byte_alphabet
from paceline.serve.tools.declared import Tool, ToolChoice
from paceline.serve.tools.events import CallStarted
from paceline.serve.tools.formats import FORMATS
from paceline.serve.tools.toolbox import Toolbox
from tests.serve.echo import PLAIN_TEMPLATE, ask, byte_tokenizer
from tests.serve.tools.test_tools_grammar import accepts
from tests.serve.tools.test_tools_parser import joined

WEATHER = Tool(
    "weather",
    parameters={
        "type": "object",
        "properties": {"city": {"enum": ["Bern", "Basel"]}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
NOW = Tool("now")
TOOLS = [WEATHER, NOW]


@dataclass(frozen=True)
class Model:
    """A format, marks of its template, and an output's parts as its model writes them."""

    format: str
    template: str
    thought: str
    answer: str  # of a text
    calls: str
    prompt: str = ""  # what ends the prompt where the template begins the reasoning


MODELS = {
    "solar": Model(
        "solar_open",
        "<|begin|>assistant<|think|><|end|> <|content|> <|tool_call:begin|> <|tool_call:args|>",
        "<|think|>A city?<|end|><|begin|>assistant",
        "<|content|>Bern.<|end|>",
        "<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>weather<|tool_call:args|>"
        '{"city": "Bern"}<|tool_call:end|><|tool_call:begin|>f6g7h8i9j0<|tool_call:name|>now'
        "<|tool_call:args|>{}<|tool_call:end|><|calls|>",
    ),
    "command_r7b": Model(
        "cohere_command3",
        '<|START_THINKING|> <|END_THINKING|> <|START_ACTION|> {"tool_name": "f"} <|START_RESPONSE|>',
        "<|START_THINKING|>A city?<|END_THINKING|>",
        "<|START_RESPONSE|>Bern.<|END_RESPONSE|>",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": '
        '{"city": "Bern"}},\n    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]'
        "<|END_ACTION|>",
        "<|START_THINKING|>",
    ),
    "hunyuan": Model(
        "hunyuan_a13b",
        '<|extra_0|> <|extra_4|> <tool_calls>[{"name": "f"}]</tool_calls> <think>\n\n</think>\n',
        "<think>\nA city?\n</think>\n",
        "<answer>\nBern.\n</answer>",
        '<tool_calls>[{"name": "weather", "arguments": {"city": "Bern"}}, '
        '{"name": "now", "arguments": {}}]</tool_calls>',
        "<think>",
    ),
}
END = "<|flush|>"  # <|end|>, the end of other tests, is a mark of Solar's
MODELS["cohere2_moe"] = replace(
    MODELS["command_r7b"],
    template=MODELS["command_r7b"].template.replace("RESPONSE", "TEXT"),
    answer="<|START_TEXT|>Bern.<|END_TEXT|>",
)
models = pytest.mark.parametrize("name", MODELS)
kinds = pytest.mark.parametrize("kind", ["plain", "special"])
CALLS = [
    ("call", 0, "weather"),
    ("arguments", 0, '{"city": "Bern"}'),
    ("end", 0, True),
    ("call", 1, "now"),
    ("arguments", 1, "{}"),
    ("end", 1, True),
]
THOUGHT, SAID = ("reasoning", None, "A city?"), ("content", None, "Bern.")


def tokenizer_of(model: Model, kind: str = "plain") -> Tokenizer:
    """A byte tokenizer with the model's template, whose marks are texts or special tokens."""
    template = PLAIN_TEMPLATE + "{# " + model.template + " #}"
    reasoning = Toolbox(byte_tokenizer(template)).reasoning
    assert reasoning is not None
    marks = dict.fromkeys((*FORMATS[model.format].tokens, *reasoning.tokens))
    return byte_tokenizer(template, special=tuple(marks) if kind == "special" else (), end=END)


def read(
    name: str, pieces: list[str], tools: list[Tool] = TOOLS, prompt: str = "", kind: str = "plain"
) -> list[tuple[Any, ...]]:
    tokenizer = tokenizer_of(MODELS[name], kind)
    toolbox = Toolbox(tokenizer)
    plan = toolbox.reading(toolbox.plan(tools), tokenizer.encode(prompt), SamplingParams())
    parser = plan.parser()
    return joined([event for piece in pieces for event in parser.feed(piece)] + parser.finish())


@models
def test_the_template_tells_the_format(name: str) -> None:
    assert Toolbox(tokenizer_of(MODELS[name])).format is FORMATS[MODELS[name].format]


@models
def test_thoughts_answers_and_calls_are_told_apart(name: str) -> None:
    model = MODELS[name]
    assert read(name, [model.thought + model.answer]) == [THOUGHT, SAID]
    assert read(name, [model.answer]) == [SAID]
    assert read(name, [model.calls]) == CALLS
    assert read(name, [model.thought + model.calls]) == [THOUGHT, *CALLS]
    assert read(name, ["Bern."]) == [SAID]  # an answer may have no marks
    said = model.answer[: model.answer.index("Bern.")]
    if name != "solar":  # a mark before an answer that is calls
        assert read(name, [model.thought + said + model.calls]) == [THOUGHT, *CALLS]
    else:  # Solar says something first
        assert read(name, [model.thought + model.answer + "<|begin|>assistant" + model.calls]) == [
            THOUGHT,
            SAID,
            *CALLS,
        ]
    assert read(name, [model.thought + model.answer], []) == [THOUGHT, SAID]


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.prompt])
def test_the_prompt_may_begin_the_thought(name: str) -> None:
    model = MODELS[name]
    rest = model.thought.removeprefix(model.prompt)
    assert read(name, [rest + model.answer], prompt=model.prompt, kind="special") == [THOUGHT, SAID]
    assert read(name, [rest + model.calls], prompt=model.prompt, kind="special") == [THOUGHT, *CALLS]


@models
def test_what_is_cut_off_is_given_as_far_as_it_goes(name: str) -> None:
    model = MODELS[name]
    place = model.calls.index('rn"}')
    assert read(name, [model.calls[:place]])[-2:] == [("arguments", 0, '{"city": "Be'), ("end", 0, False)]
    thought = model.thought[: model.thought.index("ty?")]
    assert read(name, [thought]) == [("reasoning", None, "A ci")]
    answer = model.answer[: model.answer.index("rn.")]
    assert read(name, [model.thought + answer]) == [THOUGHT, ("content", None, "Be")]


@given(
    name=st.sampled_from(sorted(MODELS)),
    parts=st.lists(
        st.sampled_from(["thought", "answer", "calls", " ", "a", "<", "<|", "\n", "助"]), max_size=6
    ),
    end=st.integers(0, 700),
    cuts=st.lists(st.integers(0, 700), max_size=6),
)
def test_any_division_into_pieces_gives_the_same(
    name: str, parts: list[str], end: int, cuts: list[int]
) -> None:
    text = "".join(getattr(MODELS[name], part, part) for part in parts)[:end]
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    at_once = read(name, [text])
    assert read(name, [text[start:stop] for start, stop in itertools.pairwise(places)]) == at_once
    assert read(name, list(text)) == at_once


@models
@kinds
def test_the_grammar_takes_what_the_model_writes_and_holds_calls_to_schemas(name: str, kind: str) -> None:
    model = MODELS[name]
    tokenizer = tokenizer_of(model, kind)
    toolbox = Toolbox(tokenizer)
    plan = toolbox.plan(TOOLS)
    opened = model.answer[: model.answer.index("Bern.")] if name == "hunyuan" else ""
    texts = (model.answer, model.calls, opened + model.calls)
    for text in (*texts, *(model.thought + text for text in texts)):
        assert accepts(plan, tokenizer, text, END)
    for old, new in (("Bern", "Paris"), ("weather", "rain"), ('"city"', '"town"')):
        assert not accepts(plan, tokenizer, model.thought + model.calls.replace(old, new), END)
    required = toolbox.plan(TOOLS, ToolChoice("required"))
    assert accepts(required, tokenizer, model.calls, END)
    assert not accepts(required, tokenizer, model.answer, END)
    single = toolbox.plan(TOOLS, ToolChoice(single=True))
    assert not accepts(single, tokenizer, model.calls, END)


@models
@kinds
def test_an_answer_may_have_a_schema_beside_tools(name: str, kind: str) -> None:
    model = MODELS[name]
    tokenizer = tokenizer_of(model, kind)
    plan = Toolbox(tokenizer).plan(TOOLS, content_schema={"type": "object", "required": ["city"]})
    assert accepts(plan, tokenizer, '{"city": 1}', END)
    assert accepts(plan, tokenizer, model.calls, END)
    assert not accepts(plan, tokenizer, "{}", END)
    if kind == "special":
        marked = re.sub(r"\s*Bern\.\s*", '{"city": 1}', model.answer)
        assert accepts(plan, tokenizer, marked, END)
        assert not accepts(plan, tokenizer, marked.replace("city", "town"), END)


def test_ids_that_the_model_writes_are_replaced_by_unique_ones() -> None:
    calls = MODELS["solar"].calls.replace("f6g7h8i9j0", "a1b2c3d4e5")  # as under greedy sampling
    tokenizer = tokenizer_of(MODELS["solar"])
    events = Toolbox(tokenizer).plan(TOOLS).parser().feed(calls)
    first, second = (event.id for event in events if isinstance(event, CallStarted))
    assert first != second
    assert all(re.fullmatch("[a-z0-9]{10}", found) for found in (first, second))  # as its template asks


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [("solar", "a1b2c3d4e5", "A1"), ("command_r7b", 'id": "0"', 'id": "x"')],
)
def test_the_grammar_holds_ids_to_their_form(name: str, right: str, wrong: str) -> None:
    tokenizer = tokenizer_of(MODELS[name])
    plan = Toolbox(tokenizer).plan(TOOLS, ToolChoice("required"))
    assert right in MODELS[name].calls
    assert not accepts(plan, tokenizer, MODELS[name].calls.replace(right, wrong), END)


@pytest.mark.parametrize(("end", "is_several"), [("<|calls|>", True), ("<|call|>", False)])
def test_a_mark_that_ends_all_calls_allows_several_before_it(end: str, is_several: bool) -> None:
    format = FORMATS["solar_open" if is_several else "openai"]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(byte_alphabet(), []))
    backend.add_special_tokens([end])
    toolbox = Toolbox(
        Tokenizer(backend, {}, [backend.token_to_id(end)], None), "solar_open" if is_several else "openai"
    )
    assert toolbox.format == replace(format, end="", single=not is_several)


def test_the_word_for_assistant_before_an_answer_of_hunyuan_is_dropped() -> None:
    assert read("hunyuan", ["助手：Bern."]) == [SAID]
    assert read("hunyuan", ["<think>\nA city?\n</think>\n<answer>\n助手：Bern.\n</answer>"]) == [
        THOUGHT,
        SAID,
    ]


def test_a_chat_answer_of_marks() -> None:
    model = MODELS["command_r7b"]
    messages = [{"role": "user", "content": model.thought + model.answer}]
    marks = ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")
    tokenizer = byte_tokenizer(PLAIN_TEMPLATE + "{# " + model.template + " #}", special=marks)
    answer = ask("/v1/chat/completions", tokenizer, messages=messages, temperature=0)
    message = answer.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("A city?", "Bern.")


PYTHONIC = '[weather(city="Bern"), now()]'


@kinds
@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        (PYTHONIC, True),
        (f"<|python_start|>{PYTHONIC}<|python_end|>", True),
        (f"<|python_start|>{PYTHONIC}", True),
        ("It rains in Bern [1].", True),
        ("<|python_start|>[rain()]<|python_end|>", False),
        ("<|python_start|>It rains.", False),
        ("[rain()]", False),
        (PYTHONIC + " ", False),
    ],
)
def test_llama_4_may_write_marks_around_its_calls(kind: str, text: str, is_allowed: bool) -> None:
    tokens = FORMATS["llama4_pythonic"].tokens if kind == "special" else ()
    tokenizer = byte_tokenizer(special=tokens)
    plan = Toolbox(tokenizer, "llama4_pythonic").plan(TOOLS)
    assert accepts(plan, tokenizer, text) == is_allowed
    if is_allowed and "[w" in text:
        parser = plan.parser()
        assert joined([event for piece in text for event in parser.feed(piece)] + parser.finish()) == CALLS


def test_a_template_that_asks_for_lists_of_calls_is_pythonic() -> None:
    asks = "Respond in the format [func_name1(params_name1=params_value1), func_name2(params)] {# ipython #}"
    for header, name in (("<|start_header_id|>", "pythonic"), ("<|header_start|>", "llama4_pythonic")):
        assert Toolbox(byte_tokenizer(PLAIN_TEMPLATE + asks + header)).format is FORMATS[name]


def test_arguments_are_valid_json() -> None:
    for name, model in MODELS.items():
        facts = read(name, [model.calls])
        assert [json.loads(fact[2]) for fact in facts if fact[0] == "arguments"] == [{"city": "Bern"}, {}]
