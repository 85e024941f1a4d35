"""Fields of vLLM: prompts from templates, token ids, guided_*, and values that ask for nothing."""

from __future__ import annotations

from typing import Any

import pytest

from paceline import LLM, SamplingParams
from tests.serve.api import Api
from tests.serve.echo import PLAIN_TEMPLATE, ask, byte_tokenizer
from tests.toy import ToyTokenizer, toy_engine

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "hello"}]
OPTIONS = {"seed": 7, "max_tokens": 30, "ignore_eos": True}
THINKING = byte_tokenizer(
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.reasoning_content|default('') }}"
    "{{ m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|answer|>{% if enable_thinking is false %}NO{% endif %}{% endif %}"
)


def bodies(**options: Any) -> list[tuple[str, dict[str, Any]]]:
    """The same request for chat and for completions."""
    return [
        (CHAT, {"messages": MESSAGES, **OPTIONS, **options}),
        (COMPLETIONS, {"prompt": "hello", **OPTIONS, **options}),
    ]


def prompt_of(**body: Any) -> str:
    """The prompt that messages become."""
    answer = ask("/tokenize", THINKING, return_token_strs=True, **body)
    assert answer.status_code == 200, answer.text
    return "".join(answer.json()["token_strs"])


def test_token_ids_are_those_of_the_offline_api_whole_and_streamed(api: Api) -> None:
    llm = LLM.from_engine(toy_engine(max_model_len=400), ToyTokenizer())
    params = SamplingParams(**OPTIONS, n=2)
    expected = {CHAT: llm.chat(MESSAGES, params)[0], COMPLETIONS: llm.generate("hello", params)[0]}
    for path, body in bodies(n=2, return_token_ids=True):
        answer, chunks = api.post(path, body), api.chunks(path, body)
        prompt, outputs = expected[path].prompt_token_ids, expected[path].outputs
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        for index, output in enumerate(outputs):
            assert answer["choices"][index]["token_ids"] == output.token_ids
            own = [choice for choice in choices if choice["index"] == index]
            assert [token for choice in own for token in choice.get("token_ids", ())] == output.token_ids
        if path == CHAT:  # beside the choices, in the first chunk of each
            assert answer["prompt_token_ids"] == prompt
            told = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
        else:
            assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [prompt] * 2
            told = [choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice]
        assert told == [prompt] * 2
        plain = {**body, "return_token_ids": False}
        assert "token_ids" not in str(api.post(path, plain)) + str(api.chunks(path, plain))


@pytest.mark.parametrize(
    ("guided", "structured"),
    [
        ({"guided_regex": "[a-c]{5}"}, {"regex": "[a-c]{5}"}),
        ({"guided_choice": ["HE", "HI"]}, {"choice": ["HE", "HI"]}),
        ({"guided_grammar": 'start: "A" | "B"'}, {"grammar": 'start: "A" | "B"'}),
        (
            {"guided_json": {"enum": [1, 2]}, "guided_whitespace_pattern": " ?"},
            {"json": {"enum": [1, 2]}, "whitespace_pattern": " ?"},
        ),
    ],
)
def test_guided_fields_are_structured_outputs_under_their_older_names(guided: Any, structured: Any) -> None:
    body = {"prompt": "hello", "seed": 7, "max_tokens": 30}
    answers = [
        ask(COMPLETIONS, **body, **fields).json()["choices"][0]["text"]
        for fields in (guided, {"structured_outputs": structured}, {})
    ]
    assert answers[0] == answers[1] != answers[2]


NEUTRAL: dict[str, Any] = {
    "length_penalty": 1.0,
    "use_beam_search": False,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "priority": 0,
    "kv_transfer_params": None,
    "vllm_xargs": {},
    "guided_json": None,
    "bad_words": None,
    "allowed_token_ids": None,
}
NEUTRAL_CHAT: dict[str, Any] = {
    **NEUTRAL,
    "documents": None,
    "mm_processor_kwargs": None,
    "chat_template": None,
    "chat_template_kwargs": {},
    "add_generation_prompt": True,
    "continue_final_message": False,
    "echo": False,
    "add_special_tokens": False,
    "include_reasoning": True,
}


def test_fields_that_ask_for_nothing_are_taken(api: Api) -> None:
    for path, body in bodies():
        neutral = NEUTRAL_CHAT if path == CHAT else NEUTRAL
        assert api.post(path, {**body, **neutral})["choices"] == api.post(path, body)["choices"]


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"length_penalty": 2.0}, "length_penalty", "beam search"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens", "not served"),
        ({"documents": [{"text": "x"}]}, "documents", "into a message"),
        ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs", "text only"),
        ({"priority": 1}, "priority", "Set it to 0"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "guided_json and guided_regex"),
        (
            {"structured_outputs": {"regex": "a"}, "guided_regex": "a"},
            "guided_regex",
            "structured_outputs and guided_regex",
        ),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "guided_regex",
            "beside tools or a response format",
        ),
        ({"guided_whitespace_pattern": "a"}, "guided_whitespace_pattern", "for guided_json"),
        ({"allowed_token_ids": [97]}, "allowed_token_ids", "ids go from 0 to 96"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least 1"),
        ({"bad_words": [""]}, "bad_words.0", "at least 1"),
        ({"bad_words": ["a"] * 129}, "bad_words", "128"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "cannot both be true",
        ),
    ],
)
def test_fields_that_ask_for_what_is_not_served_are_refused_by_name(
    api: Api, options: Any, param: str, message: str
) -> None:
    error = api.refusal(CHAT, {"messages": MESSAGES, **options})
    assert error["param"] == param
    assert message in error["message"]


def test_options_that_leave_no_token_are_the_requests_error(api: Api) -> None:
    error = api.refusal(COMPLETIONS, {"prompt": "x", "allowed_token_ids": [3], "bad_words": ["A"]})
    assert "allowed_token_ids, bad_words" in error["message"]
    assert error["type"] == "invalid_request_error"


def test_bad_words_and_allowed_ids_hold_over_http(api: Api) -> None:
    for path, body in bodies(temperature=2, allowed_token_ids=[10, 11, 12], bad_words=["H", "IJ"]):
        choice = api.post(path, {**body, "return_token_ids": True})["choices"][0]
        assert set(choice["token_ids"]) == {11, 12}
        assert (11, 12) not in zip(choice["token_ids"], choice["token_ids"][1:], strict=False)


def test_a_prompt_can_end_within_the_last_message() -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "Well, "}]
    assert prompt_of(messages=begun) == "<|user|>hello<|end|><|assistant|>Well, <|end|><|answer|>"
    closed = prompt_of(messages=begun, add_generation_prompt=False)
    assert closed == "<|user|>hello<|end|><|assistant|>Well, <|end|>"
    for own in ({}, {"add_generation_prompt": False}):
        continued = prompt_of(messages=begun, continue_final_message=True, **own)
        assert continued == "<|user|>hello<|end|><|assistant|>Well, "


def test_an_answer_continues_where_the_last_message_ends() -> None:
    tokenizer = byte_tokenizer(PLAIN_TEMPLATE.replace("m.role", "(m.role|replace('assistant', 'answer'))"))
    begun = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "hello"}]
    answer = ask(CHAT, tokenizer, messages=begun, temperature=0, continue_final_message=True)
    assert answer.json()["choices"][0]["message"]["content"] == " there"


def test_chat_template_kwargs_are_variables_of_the_template() -> None:
    assert prompt_of(messages=MESSAGES).endswith("<|answer|>")
    for value, end in ((False, "<|answer|>NO"), (True, "<|answer|>")):
        assert prompt_of(messages=MESSAGES, chat_template_kwargs={"enable_thinking": value}).endswith(end)
    for name in ("messages", "add_generation_prompt"):
        answer = ask(CHAT, THINKING, messages=MESSAGES, chat_template_kwargs={name: []})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "chat_template_kwargs"


def test_reasoning_in_a_history_goes_to_the_template() -> None:
    for name in ("reasoning_content", "reasoning"):
        thought = {"role": "assistant", "content": "hi", name: "hm"}
        assert "<|assistant|>hmhi<|end|>" in prompt_of(messages=[*MESSAGES, thought, *MESSAGES])
    item = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]}
    counts = [
        ask(RESPONSES, THINKING, input=[*MESSAGES, *items, *MESSAGES], max_output_tokens=1).json()["usage"]
        for items in ([said], [item, said])
    ]
    assert counts[1]["input_tokens"] == counts[0]["input_tokens"] + len("hm")


def test_cache_control_is_taken_and_changes_nothing(api: Api) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": "hello"}
    answers = [
        api.post(CHAT, {"messages": [{"role": "user", "content": [{**part, **extra}]}], **OPTIONS})["choices"]
        for extra in ({}, mark)
    ]
    assert answers[0] == answers[1]
    assert "ephemeral" not in prompt_of(messages=[{**MESSAGES[0], **mark}])
