"""/v1/chat/completions: the offline API's text in OpenAI's formats, whole and streamed."""

from __future__ import annotations

from typing import Any

import openai.types.chat
import pytest

from paceline import LLM, SamplingParams
from paceline.serve.openai.chat_protocol import ChatCompletion
from tests.serve.api import Api
from tests.toy import ToyTokenizer, toy_engine

PATH = "/v1/chat/completions"
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "go on"},
]
BODY = {"messages": MESSAGES, "seed": 7, "max_tokens": 30, "ignore_eos": True}


def offline(messages: Any = MESSAGES, **params: Any) -> Any:
    llm = LLM.from_engine(toy_engine(max_model_len=400), ToyTokenizer())
    return llm.chat(messages, SamplingParams(**{"seed": 7, "max_tokens": 30, "ignore_eos": True, **params}))[
        0
    ]


def joined(chunks: list[Any], index: int = 0) -> str:
    choices = [one for chunk in chunks for one in chunk["choices"] if one["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def test_a_seed_gives_the_bytes_of_the_offline_api_whole_and_streamed(api: Api) -> None:
    for options in ({}, {"temperature": 0}, {"top_p": 0.8, "stop": "A"}, {"n": 3}):
        expected = offline(**options).outputs
        choices = api.post(PATH, {**BODY, **options})["choices"]
        assert [choice["message"]["content"] for choice in choices] == [one.text for one in expected]
        assert [choice["finish_reason"] for choice in choices] == [one.finish_reason for one in expected]
        chunks = api.chunks(PATH, {**BODY, **options})
        assert [joined(chunks, index) for index in range(len(expected))] == [one.text for one in expected]


def test_a_stream_has_the_role_first_and_the_reason_last_in_a_chunk_of_its_own(api: Api) -> None:
    chunks = api.chunks(PATH, {**BODY, "n": 2})
    for index in range(2):
        choices = [one for chunk in chunks for one in chunk["choices"] if one["index"] == index]
        first, *between, last = choices
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert (last["delta"], last["finish_reason"]) == ({}, "length")
        assert all(list(one["delta"]) == ["content"] and one["delta"]["content"] for one in between)
        assert all(one["finish_reason"] is None for one in choices[:-1])


def test_answers_and_chunks_match_openapi_and_the_official_client(api: Api) -> None:
    body = {**BODY, "n": 2, "logprobs": True, "top_logprobs": 2, "return_metrics": True, "prompt_logprobs": 0}
    answer = api.post(PATH, body)
    ChatCompletion.model_validate(answer, extra="forbid")
    openai.types.chat.ChatCompletion.model_validate(answer, strict=True)
    assert answer["id"].startswith("chatcmpl-")
    del body["prompt_logprobs"]
    chunks = api.chunks(PATH, {**body, "stream_options": {"include_usage": True}})
    for chunk in chunks:
        openai.types.chat.ChatCompletionChunk.model_validate(chunk, strict=True)
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 60
    assert "speculative_decoding" in chunks[-1]["metrics"]


def test_logprobs_are_the_engines_with_bytes(api: Api) -> None:
    body = {**BODY, "logprobs": True, "top_logprobs": 3}
    expected = offline(logprobs=3).outputs[0]
    content = api.post(PATH, body)["choices"][0]["logprobs"]["content"]
    tokenizer = ToyTokenizer()
    for entry, own, token in zip(content, expected.logprobs, expected.token_ids, strict=True):
        assert entry["logprob"] == own[token].logprob
        assert bytes(entry["bytes"]) == tokenizer.token_bytes(token)
        likeliest = [one.logprob for one in own.values() if one.rank <= 3]
        assert [one["logprob"] for one in entry["top_logprobs"]] == sorted(likeliest, reverse=True)
    parts = [chunk["choices"][0]["logprobs"] for chunk in api.chunks(PATH, body)]
    assert [entry for part in parts if part for entry in part["content"]] == content
    bare = api.post(PATH, {**BODY, "logprobs": True})["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in bare] == [[]] * 30


def test_parts_are_joined_and_answers_can_be_sent_back_as_they_came(api: Api) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked: list[Any] = [{"role": "user", "content": parts}]
    answer = api.post(PATH, {**BODY, "messages": asked})["choices"][0]["message"]
    seen = openai.types.chat.ChatCompletionMessage.model_validate(answer).model_dump()
    again = api.post(PATH, {**BODY, "messages": [*asked, seen, {"role": "user", "content": "more"}]})
    assert again["choices"][0]["finish_reason"] == "length"


def test_the_newer_limit_on_tokens_goes_before_the_older(api: Api) -> None:
    for given, count in (
        ({"max_tokens": 9}, 9),
        ({"max_completion_tokens": 8}, 8),
        ({"max_tokens": 9, "max_completion_tokens": 8}, 8),
    ):
        body = {"messages": MESSAGES[1:2], "ignore_eos": True, **given}
        assert api.post(PATH, body)["usage"]["completion_tokens"] == count


def test_without_a_limit_the_answer_may_fill_the_context(api: Api) -> None:
    usage = api.post(PATH, {"messages": MESSAGES[1:2], "ignore_eos": True})["usage"]
    assert usage["total_tokens"] == api.front.limits.max_model_len


def test_what_clients_send_without_meaning_it_is_taken(api: Api) -> None:
    neutral = {
        "store": False,
        "service_tier": "auto",
        "modalities": ["text"],
        "metadata": {"a": "b"},
        "user": "u",
        "tools": None,
        "tool_choice": None,
        "response_format": {"type": "text"},
        "reasoning_effort": None,
        "audio": None,
        "prediction": None,
        "model": "toy-too",
    }
    answer = api.post(PATH, {**BODY, **neutral})
    assert answer["choices"] == api.post(PATH, BODY)["choices"]
    assert answer["model"] == "toy-too"


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": "hello"}, "messages", "list"),
        ({"messages": [{"content": "x"}]}, "messages.0.role", "missing"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "'assistant'"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content",
            "string or should be a valid list",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type",
            "only text parts",
        ),
        (
            {"messages": [{"role": "user", "text": "x"}]},
            "messages.0.text",
            "options are annotations",
        ),
        ({"body": 1}, "body", "unknown option 'body'"),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'?"),
        (
            {"stream": True, "stream_options": {"include_use": True}},
            "stream_options.include_use",
            "include_usage",
        ),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "if, and only if"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schem": {}}}},
            "response_format.json_schema.schem",
            "did you mean 'schema'?",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs to true"),
        ({"logprobs": 2}, "logprobs", "boolean"),
        ({"max_tokens": 0}, "max_tokens", "got 0"),
        ({"store": True}, "store", "no answer can be fetched later"),
        ({"audio": {"voice": "x"}}, "audio", "text only"),
        ({"modalities": ["audio"]}, "modalities", "text only"),
        ({"functions": [{}]}, "functions", "use tools"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction", "speculative"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "not served"),
        ({"web_search_options": {}}, "web_search_options", "not served"),
        ({"service_tier": "flex"}, "service_tier", "one tier"),
        ({"chat_template": "{{ messages }}"}, "chat_template", "model's own"),
        ({"messages": [{"role": "user", "content": "x" * 500}]}, "messages", "context holds 400"),
    ],
)
def test_unsupported_fields_are_refused_by_name(api: Api, options: Any, param: str, message: str) -> None:
    error = api.refusal(PATH, {**BODY, **options})
    assert error["param"] == param
    assert message in error["message"]


def test_another_model_is_not_found(api: Api) -> None:
    error = api.refusal(PATH, {**BODY, "model": "gpt"}, status=404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "'toy' or 'toy-too'" in error["message"]
