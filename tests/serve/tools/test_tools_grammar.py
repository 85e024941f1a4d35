"""The grammar of an answer with tools: exactly what the tool choice allows."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from paceline.constrain.compiler import GrammarCompiler
from paceline.core.structured_outputs import StructuredOutputsParams
from paceline.errors import GrammarError, RequestError
from paceline.models.tokenizer import Tokenizer
from paceline.serve.tools.declared import Tool, ToolChoice
from paceline.serve.tools.formats import FORMATS
from paceline.serve.tools.toolbox import Toolbox, ToolPlan
from tests.serve.echo import END, byte_tokenizer

WEATHER = Tool(
    "weather",
    "A description that says name ::= value, %json {} and </tool_call>",
    {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer"}},
        "required": ["city"],
        "$defs": {"City": {"type": "string", "enum": ["Bern", "Basel"]}},
    },
)
NOW = Tool("now")
LOOSE = Tool("loose", parameters={"type": "object", "properties": {"x": {"type": "integer"}}}, strict=False)
TOOLS = [WEATHER, NOW, LOOSE]
BERN = ("weather", '{"city": "Bern"}')
DAYS = ("weather", '{"city": "Basel", "days": 3}')
PARIS = ("weather", '{"city": "Paris"}')
MORE = ("weather", '{"city": "Bern", "more": 1}')
CLOCK = ("now", "{}")
SINGLE = ToolChoice(single=True)
REQUIRED = ToolChoice("required")

TOKENIZER = byte_tokenizer()

formats = pytest.mark.parametrize("name", FORMATS)


@cache
def compiler_of(tokenizer: Tokenizer) -> GrammarCompiler:
    """It keeps the grammars that it has compiled."""
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


def accepts(plan: ToolPlan, tokenizer: Tokenizer, text: str, end: str = END) -> bool:
    """Whether the whole text, with the token that ends an answer, is an answer of the plan's grammar."""
    params = StructuredOutputsParams(**plan.sampling_options()["structured_outputs"])
    constraint = compiler_of(tokenizer).compile(params).start()
    try:
        for token in tokenizer.encode(text + end, add_special_tokens=False):
            if not constraint.allows(token):
                return False
            constraint.advance(token)
    except GrammarError:
        return False
    return True


def allowed(name: str, choice: ToolChoice, text: str, schema: dict[str, Any] | None = None) -> bool:
    return accepts(Toolbox(TOKENIZER, name).plan(TOOLS, choice, schema), TOKENIZER, text)


@formats
def test_required_gives_valid_calls_only(name: str) -> None:
    write = FORMATS[name].write
    assert allowed(name, REQUIRED, write([BERN]))
    assert allowed(name, REQUIRED, write([DAYS, CLOCK, BERN]))
    assert not allowed(name, REQUIRED, "")
    assert not allowed(name, REQUIRED, "Hello")
    assert not allowed(name, REQUIRED, "Hello\n" + write([BERN]))
    assert not allowed(name, REQUIRED, write([BERN]) + "\nHello")


@formats
def test_arguments_follow_the_schema_of_their_tool(name: str) -> None:
    write = FORMATS[name].write
    assert not allowed(name, REQUIRED, write([PARIS]))
    assert not allowed(name, REQUIRED, write([MORE]))  # arguments that the tool does not name
    assert not allowed(name, REQUIRED, write([("weather", "{}")]))
    assert not allowed(name, REQUIRED, write([("now", '{"city": "Bern"}')]))  # it has none
    assert not allowed(name, REQUIRED, write([("weathers", '{"city": "Bern"}')]))
    assert allowed(name, REQUIRED, write([("loose", '{"x": "not even", "y": [null]}')]))  # strict: false


@formats
def test_named_is_exactly_one_call_of_that_function(name: str) -> None:
    write, choice = FORMATS[name].write, ToolChoice.named("now")
    assert allowed(name, choice, write([CLOCK]))
    assert not allowed(name, choice, write([BERN]))
    assert not allowed(name, choice, write([CLOCK, CLOCK]))


@formats
def test_allowed_tools_are_the_only_ones(name: str) -> None:
    write, choice = FORMATS[name].write, ToolChoice("auto", ("now", "loose"))
    assert allowed(name, choice, write([CLOCK]))
    assert allowed(name, choice, "Hello")
    assert not allowed(name, choice, write([BERN]))


@formats
def test_auto_allows_text_or_valid_calls(name: str) -> None:
    write = FORMATS[name].write
    for text in ("", "Hello, wörld\n", "a < b </tool_call> [TOOL] <tool_", "x = {}"):
        assert allowed(name, ToolChoice(), text), text
    assert allowed(name, ToolChoice(), write([BERN, CLOCK]))
    assert not allowed(name, ToolChoice(), write([PARIS]))
    assert not allowed(name, ToolChoice(), write([BERN]) + "\nHello")


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_auto_allows_text_before_calls_if_the_format_has_a_marker(name: str) -> None:
    write = FORMATS[name].write
    assert allowed(name, ToolChoice(), "I will look.\n" + write([BERN, CLOCK]))
    assert not allowed(name, ToolChoice(), "I will look.\n" + write([PARIS]))
    assert not allowed(name, ToolChoice(), f"The marker is {FORMATS[name].marker}, it seems.")


def test_a_fenced_json_block_that_starts_a_call_is_one() -> None:
    def block(name: str, arguments: str) -> str:
        return f'```json\n{{\n  "name": "{name}",\n  "arguments": {arguments}\n}}\n```'

    assert allowed("hermes", ToolChoice(), block(*BERN))
    assert allowed("hermes", ToolChoice(), block("other", '{"city": "Paris"}'))  # no tool: text
    assert allowed("hermes", ToolChoice(), "Like this: " + block(*PARIS))
    assert not allowed("hermes", ToolChoice(), block(*PARIS))
    assert not allowed("hermes", ToolChoice(), block(*BERN) + "\nThere.")
    assert not allowed("hermes", REQUIRED, block(*BERN))


@formats
def test_without_parallel_calls_there_is_at_most_one(name: str) -> None:
    write = FORMATS[name].write
    assert allowed(name, SINGLE, write([BERN]))
    assert not allowed(name, SINGLE, write([BERN, CLOCK]))


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_with_a_response_format_an_answer_is_calls_or_its_json(name: str) -> None:
    write, schema = FORMATS[name].write, {"type": "object", "properties": {"ok": {"type": "boolean"}}}
    assert allowed(name, ToolChoice(), '{"ok": true}', schema)
    assert allowed(name, ToolChoice(), write([BERN]), schema)
    assert not allowed(name, ToolChoice(), "Hello", schema)
    assert not allowed(name, ToolChoice(), '{"ok": 3}', schema)


def test_a_format_without_markers_refuses_a_response_format() -> None:
    with pytest.raises(RequestError, match="tools cannot be beside a JSON format of the answer"):
        allowed("llama3_json", ToolChoice(), "{}", {"type": "object"})
    assert allowed("llama3_json", REQUIRED, FORMATS["llama3_json"].write([CLOCK]), {"type": "object"})


def test_without_tools_a_response_format_is_its_own_structure() -> None:
    plan = Toolbox(byte_tokenizer()).plan([], None, {"type": "object"})
    assert plan.sampling_options() == {"structured_outputs": {"json": {"type": "object"}}}


@pytest.mark.parametrize("choice", [ToolChoice(), REQUIRED], ids=["auto", "required"])
@pytest.mark.parametrize("kind", ["special", "added"])
def test_special_tokens_of_a_format_are_referred_to_by_id(kind: str, choice: ToolChoice) -> None:
    marks = ("<tool_call>", "</tool_call>")
    tokenizer = byte_tokenizer(special=marks) if kind == "special" else byte_tokenizer(added=marks)
    plan = Toolbox(tokenizer).plan(TOOLS, choice)
    assert accepts(plan, tokenizer, FORMATS["hermes"].write([BERN, CLOCK]))
    assert not accepts(plan, tokenizer, FORMATS["hermes"].write([PARIS]))
    assert (plan.sampling_options().get("skip_special_tokens") is False) == (kind == "special")
