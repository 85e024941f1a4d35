"""Tools in the prompt: by the chat template if it supports them, otherwise in the system message."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.errors import ConfigError, RequestError
from paceline.models.tokenizer import Tokenizer
from paceline.serve.tools.declared import MAX_TOOL_BYTES, MAX_TOOLS, Tool, ToolChoice
from paceline.serve.tools.formats import FORMATS, choose_format
from paceline.serve.tools.toolbox import Toolbox
from tests.serve.echo import PLAIN_TEMPLATE, byte_tokenizer

# minimal versions of real templates
KNOWING_TEMPLATE = (
    "{% if tools %}[TOOLS]{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
WEATHER = Tool(
    "weather", "The weather of a city", {"type": "object", "properties": {"city": {"type": "string"}}}
)
NOW = Tool("now")
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Bern?"},
    {
        "role": "assistant",
        "content": "Well.",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Bern"}'}},
            {"id": "c2", "type": "function", "function": {"name": "now", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "noon"}]},
]


def prompt_of(template: str, messages: list[dict[str, Any]], tools: tuple[Tool, ...] = ()) -> str:
    tokenizer: Tokenizer = byte_tokenizer(template)
    toolbox = Toolbox(tokenizer)
    chat, shown = toolbox.conversation(messages, toolbox.plan(tools))
    return tokenizer.apply_chat_template(chat, True, shown)


def test_a_template_with_tool_support_gets_tools_and_calls_as_objects() -> None:
    prompt = prompt_of(KNOWING_TEMPLATE, CHAT, (WEATHER, NOW))
    assert prompt.startswith("[TOOLS]" + json.dumps(WEATHER.described()) + json.dumps(NOW.described()))
    assert '<tool_call>weather {"city": "Bern"}<tool_call>now {}' in prompt
    assert "<|tool|>rain<|tool|>noon" in prompt
    assert "<|system|>Be brief.<|user|>" in prompt  # nothing is added to it


def test_without_tool_support_the_system_message_describes_the_tools() -> None:
    prompt = prompt_of(PLAIN_TEMPLATE, CHAT[:2], (WEATHER, NOW))
    assert prompt.startswith("<|system|>Be brief.\n\nYou can call functions")
    for tool in (WEATHER, NOW):
        assert json.dumps(tool.described()["function"]) in prompt
    assert "<tool_call>" in prompt
    assert prompt.endswith("<|end|><|user|>Bern?<|end|><|answer|>")


def test_a_system_message_is_added_if_there_is_none() -> None:
    assert prompt_of(PLAIN_TEMPLATE, CHAT[1:2], (NOW,)).startswith("<|system|>You can call functions")


def test_a_template_without_a_system_role_has_the_tools_in_the_first_message() -> None:
    refusing = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN_TEMPLATE
    )
    prompt = prompt_of(refusing, CHAT[1:2], (NOW,))
    assert prompt.startswith("<|user|>You can call functions")
    assert prompt.endswith("\n\nBern?<|end|><|answer|>")


def test_without_tool_support_earlier_calls_and_results_are_text() -> None:
    written = FORMATS["hermes"].write([("weather", '{"city": "Bern"}'), ("now", "{}")])
    results = "<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    prompt = prompt_of(PLAIN_TEMPLATE, CHAT)
    assert f"<|assistant|>Well.\n{written}<|end|><|user|>{results}<|end|>" in prompt


def test_a_template_that_fails_on_contents_of_null_gets_empty_texts() -> None:
    strict = KNOWING_TEMPLATE.replace("{{ m.content or '' }}", "{{ m.content if '</' not in m.content }}")
    message = {**CHAT[2], "content": None}
    prompt = prompt_of(strict, [CHAT[1], message, *CHAT[3:]], (WEATHER, NOW))
    assert '<|assistant|><tool_call>weather {"city": "Bern"}<tool_call>now {}<|tool|>rain' in prompt


def test_with_tool_choice_none_the_prompt_does_not_show_them() -> None:
    toolbox = Toolbox(byte_tokenizer(KNOWING_TEMPLATE))
    plan = toolbox.plan([WEATHER], ToolChoice("none"))
    assert toolbox.conversation(CHAT[:2], plan) == (CHAT[:2], None)
    assert plan.sampling_options() == {}


@pytest.mark.parametrize("arguments", ["{", "[]", '"x"', "3"])
def test_earlier_arguments_must_be_the_json_of_an_object(arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": arguments}}
    with pytest.raises(
        RequestError, match=r"messages\.0: the arguments of the call of 'now' must be the JSON"
    ):
        prompt_of(KNOWING_TEMPLATE, [{"role": "assistant", "content": None, "tool_calls": [call]}])


def test_the_format_is_chosen_by_the_template() -> None:
    assert choose_format("... <tool_call>\n{...") is FORMATS["hermes"]
    assert choose_format("... [TOOL_CALLS] [...") is FORMATS["mistral"]
    assert choose_format("'[TOOL_CALLS]' + name + '[ARGS]' + arguments") is FORMATS["mistral_args"]
    assert choose_format('<|python_tag|> "parameters": ... ipython') is FORMATS["llama3_json"]
    assert choose_format('... "parameters": ... ipython') is FORMATS["llama3_json"]  # Llama 3.2
    assert choose_format("'<｜tool▁sep｜>' + name + '\\n```json\\n'") is FORMATS["deepseek_v3"]
    assert choose_format("name + '<｜tool▁sep｜>' + arguments") is FORMATS["deepseek_v31"]
    assert choose_format("<tool_call> <arg_key> <arg_value>") is FORMATS["glm45"]
    assert choose_format("<tool_call>f<arg_key>k</arg_key><arg_value>v") is FORMATS["glm47"]
    assert choose_format("<tool_call> <function= <parameter=") is FORMATS["qwen3_coder"]
    assert choose_format("<seed:tool_call> <function= <parameter=") is FORMATS["seed_oss"]
    assert choose_format('<minimax:tool_call> <invoke name="') is FORMATS["minimax_m2"]
    assert choose_format("'<TOOLCALL>[' + calls") is FORMATS["nemotron_json"]
    assert choose_format("respond with <|tool_call|> and a list") is FORMATS["granite"]
    hunyuan = "'<tool_calls{}>'.format(':opensource') + '<tool_sep{}>' + '<arg_key{}>'"
    assert choose_format(hunyuan) is FORMATS["hy_v3"]
    assert choose_format("<|im_start|> List of tools: [") is FORMATS["lfm2"]
    kimi = "<|tool_calls_section_begin|>'<|tool_call_begin|>' + id + '<|tool_call_argument_begin|>'"
    assert choose_format(kimi) is FORMATS["kimi_k2"]
    assert choose_format(PLAIN_TEMPLATE) is FORMATS["hermes"]
    assert choose_format(None) is FORMATS["hermes"]
    assert choose_format("<tool_call>", "mistral") is FORMATS["mistral"]
    with pytest.raises(ConfigError, match="tool_call_parser must be one of hermes, "):
        choose_format(None, "nonsense")


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([Tool("two words")], ToolChoice(), "tools.0 has the name 'two words'; a name has 1 to 64 letters"),
        ([Tool("x" * 65)], ToolChoice(), "a name has 1 to 64 letters"),
        ([Tool("")], ToolChoice(), "a name has 1 to 64 letters"),
        ([NOW, NOW], ToolChoice(), "tools has two functions named 'now'"),
        ([Tool("f", parameters={"type": "dict"})], ToolChoice(), "of type 'object', got 'dict'"),
        ([NOW], ToolChoice.named("then"), "tool_choice names 'then', which is not among the tools"),
        ([], ToolChoice("required"), "tool_choice asks for a call, but there are no tools"),
        ([Tool(f"f{n}") for n in range(MAX_TOOLS + 1)], ToolChoice(), f"at most {MAX_TOOLS} may be"),
        ([Tool("f", "x" * MAX_TOOL_BYTES)], ToolChoice(), f"at most {MAX_TOOL_BYTES} may be"),
    ],
)
def test_invalid_tools_are_refused(tools: list[Tool], choice: ToolChoice, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Toolbox(byte_tokenizer()).plan(tools, choice)
