"""/v1/messages: Anthropic's requests, answers, events and errors, over the same prompts as chat."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest

from paceline.serve.anthropic.messages_input import messages_of
from paceline.serve.anthropic.messages_protocol import MessagesRequest
from paceline.serve.tools.formats import FORMATS
from tests.serve.api import Api
from tests.serve.echo import PLAIN_TEMPLATE, ask, byte_tokenizer, echo_app
from tests.serve.running import serving

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "cache_control": {"type": "ephemeral"},
}
BERN = ("weather", '{"city": "Bern"}')
CALL = FORMATS["hermes"].write([BERN])


def said(text: str, **body: Any) -> dict[str, Any]:
    """A request that the echo model answers with `text`."""
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 500, **body}


Answers = Callable[..., list[httpx.Response]]


@pytest.fixture(scope="module")
def answers() -> Iterator[Answers]:
    """The answers of the echo model to requests, each a path and a body."""
    app = echo_app()
    with asyncio.Runner() as runner:
        client = runner.run(app.__aenter__())

        async def send(requests: Sequence[tuple[str, dict[str, Any]]]) -> list[httpx.Response]:
            return [await client.post(path, json=body) for path, body in requests]

        yield lambda *requests: runner.run(send(requests))
        runner.run(app.__aexit__(None, None, None))


def events_in(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, whose names are their types."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def accumulated(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client builds from events, as Anthropic's own does."""
    message: dict[str, Any] = {}
    inputs: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta" if event["delta"]["type"] == "text_delta":
                message["content"][event["index"]]["text"] += event["delta"]["text"]
            case "content_block_delta":
                index = event["index"]
                inputs[index] = inputs.get(index, "") + event["delta"]["partial_json"]
                if inputs[index].count("{") == inputs[index].count("}"):
                    message["content"][index]["input"] = json.loads(inputs[index])
            case "message_delta":
                message |= event["delta"]
                message["usage"] = event["usage"]
    return message


def kinds(events: Sequence[dict[str, Any]]) -> list[str]:
    """The types of the events, without repetitions."""
    names = [event["type"] for event in events]
    return [name for number, name in enumerate(names) if number == 0 or name != names[number - 1]]


def test_an_answer_is_a_message_with_anthropics_usage(answers: Answers) -> None:
    first, second = (
        answer.json()
        for answer in answers((PATH, said("Good morning!" * 10)), (PATH, said("Good morning!" * 10)))
    )
    assert first["id"].startswith("msg_")
    assert (first["type"], first["role"], first["model"]) == ("message", "assistant", "echo")
    assert first["content"] == [{"type": "text", "text": "Good morning!" * 10}]
    assert (first["stop_reason"], first["stop_sequence"]) == ("end_turn", None)
    usage = first["usage"]
    assert usage["output_tokens"] == 131  # characters, and the end-of-sequence token
    assert usage["cache_read_input_tokens"] == 0
    again = second["usage"]  # the prompt is in the prefix cache now, and not counted twice
    assert again["cache_read_input_tokens"] > 100
    assert again["cache_read_input_tokens"] + again["input_tokens"] == usage["input_tokens"]


@pytest.mark.parametrize(
    ("text", "cut", "reason"),
    [
        ("Hello", 0, "end_turn"),
        ("", 0, "end_turn"),
        (CALL, 0, "tool_use"),
        (f"One moment.\n{CALL}", 0, "tool_use"),
        (CALL, len('n"}}\n</tool_call>'), "max_tokens"),  # a call without an end has an empty input
    ],
)
def test_a_stream_is_the_whole_message_in_pieces(answers: Answers, text: str, cut: int, reason: str) -> None:
    body = said(text, tools=[WEATHER], system="Help.", max_tokens=len(text) + 1 - cut - (cut > 0))
    streamed, whole = answers((PATH, {**body, "stream": True}), (PATH, body))
    message, expected = accumulated(events_in(streamed)), whole.json()
    for answer in (message, expected):
        assert answer.pop("id")
        used = answer.pop("usage")
        assert used["input_tokens"] + used["cache_read_input_tokens"] > 0
        for block in answer["content"]:
            block.pop("id", None)
    assert message == expected
    assert message["stop_reason"] == reason


def test_the_events_of_a_text_with_calls_are_in_order(answers: Answers) -> None:
    written = FORMATS["hermes"].write([BERN, ("weather", '{"city": "Basel"}')])
    (answer,) = answers((PATH, said(f"One moment.\n{written}", tools=[WEATHER], stream=True)))
    events = events_in(answer)
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert kinds(events) == ["message_start", "ping", *block * 3, "message_delta", "message_stop"]
    message = accumulated(events)
    text, bern, basel = message["content"]
    assert text == {"type": "text", "text": "One moment."}
    assert (bern["type"], bern["name"], bern["input"]) == ("tool_use", "weather", {"city": "Bern"})
    assert basel["input"] == {"city": "Basel"}
    assert bern["id"] != basel["id"]
    assert message["stop_reason"] == "tool_use"


def test_the_text_is_that_of_chat_with_the_same_messages_and_seed(api: Api) -> None:
    """The same prompt, sampling and bytes; only the words around them differ."""
    own = {"seed": 5, "temperature": 1.0, "top_k": 8, "top_p": 0.9, "max_tokens": 40, "ignore_eos": True}
    system, user = "Be brief.", "How are you?"
    chat = {"messages": [{"role": "system", "content": system}, {"role": "user", "content": user}]}
    expected = api.post("/v1/chat/completions", {**chat, **own})
    block = {"type": "text", "text": user, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = {"system": [{"type": "text", "text": system}], "messages": [{"role": "user", "content": [block]}]}
    answer = api.post(PATH, {**body, **own, "speculative": "off", "segment": "tests"})
    assert answer["content"][0]["text"] == expected["choices"][0]["message"]["content"]
    assert answer["stop_reason"] == "max_tokens"
    prompt = expected["usage"]["prompt_tokens"]
    assert answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"] == prompt
    assert api.post(COUNT, body) == {"input_tokens": prompt}


def test_a_last_message_of_the_assistant_is_continued() -> None:
    tokenizer = byte_tokenizer(PLAIN_TEMPLATE.replace("m.role", "(m.role|replace('assistant', 'answer'))"))
    begun = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "hello"}]
    answer = ask(PATH, tokenizer, messages=begun, temperature=0, max_tokens=50)
    assert answer.json()["content"] == [{"type": "text", "text": " there"}]


@pytest.mark.parametrize(("kind", "thinks"), [("disabled", False), ("enabled", True), ("adaptive", True)])
def test_thinking_is_what_a_template_asks_for(kind: str, thinks: bool) -> None:
    body = MessagesRequest.model_validate({**said("Hello"), "thinking": {"type": kind}})
    assert body.template_options()["chat_template_kwargs"] == {"enable_thinking": thinks}


def test_a_stop_sequence_ends_the_answer_and_is_named(answers: Answers) -> None:
    body = said("one, two; three", stop_sequences=[";", "three"])
    whole, streamed = answers((PATH, body), (PATH, {**body, "stream": True}))
    for message in (whole.json(), accumulated(events_in(streamed))):
        assert message["content"] == [{"type": "text", "text": "one, two"}]
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", ";")


@pytest.mark.parametrize(
    ("choice", "calls"),
    [
        ({"type": "auto"}, 0),
        ({"type": "none"}, 0),
        ({"type": "any", "disable_parallel_tool_use": True}, 1),
        ({"type": "tool", "name": "weather"}, 1),
    ],
)
def test_tool_choice_says_whether_a_tool_is_called(
    answers: Answers, choice: dict[str, Any], calls: int
) -> None:
    answer = answers((PATH, said("Hello", tools=[WEATHER], tool_choice=choice, max_tokens=200)))[0].json()
    assert sum(block["type"] == "tool_use" for block in answer["content"]) == calls


def test_the_format_of_output_config_is_followed(answers: Answers) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    config = {"format": {"type": "json_schema", "schema": schema}, "effort": "high"}
    answer = answers((PATH, said('{"a": 5}', output_config=config)))[0].json()
    assert json.loads(answer["content"][0]["text"]) == {"a": 5}


def test_an_answer_can_be_sent_back_with_the_results_of_its_calls(answers: Answers) -> None:
    first = answers((PATH, said(f"Well.\n{CALL}", tools=[WEATHER])))[0].json()
    result = {"type": "tool_result", "tool_use_id": first["content"][1]["id"], "content": "rain"}
    messages = [
        {"role": "user", "content": "Bern?"},
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    body = {"messages": messages, "temperature": 0, "tools": [WEATHER], "max_tokens": 50}
    (second,) = answers((PATH, body))
    assert second.json()["content"] == [{"type": "text", "text": "So?"}]


def test_blocks_are_the_messages_of_a_chat() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bern"}}
    rain = [{"type": "text", "text": "rain"}, {"type": "text", "text": "wind"}]
    body = MessagesRequest.model_validate(
        {
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"},
                {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "Be kind."},
            ],
            "messages": [
                {"role": "user", "content": "How is Bern?"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "text", "text": "Well."},
                        use,
                        {**use, "id": "t2", "name": "now", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": rain},
                        {"type": "tool_result", "tool_use_id": "t2", "content": "no clock", "is_error": True},
                        {"type": "text", "text": "So?"},
                    ],
                },
            ],
            "metadata": {"user_id": "me"},
        }
    )
    system, user, assistant, bern, now, question = messages_of(body)
    assert system == {"role": "system", "content": "Be brief.\nBe kind."}
    assert user == {"role": "user", "content": "How is Bern?"}
    assert (assistant["content"], assistant["reasoning_content"]) == ("Well.", "Hm.")
    assert [call["function"]["name"] for call in assistant["tool_calls"]] == ["weather", "now"]
    assert bern == {"role": "tool", "tool_call_id": "t1", "name": "weather", "content": "rain\nwind"}
    assert now["content"] == "Error: no clock"
    assert question == {"role": "user", "content": "So?"}
    assert body.user == "me"


def test_what_coding_agents_send_by_default_is_taken(answers: Answers) -> None:
    default = {
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "cache_control": {"type": "ephemeral"},
        "service_tier": "auto",
        "metadata": {"user_id": "u" * 300},
        "mcp_servers": [],
        "container": None,
        "return_metrics": True,
    }
    whole, streamed = answers((PATH, said("Hello", **default)), (PATH, said("Hello", **default, stream=True)))
    assert whole.json()["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert "metrics" in events_in(streamed)[-2]
    (warning,) = whole.json()["warnings"]  # this model has nothing to think with
    assert warning.startswith("thinking: ")
    assert whole.headers["x-warnings"] == streamed.headers["x-warnings"] == warning


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
REFUSED: list[tuple[str, Any, str]] = [
    ("messages", [{"role": "user", "content": [IMAGE]}], "messages.0.content.0 must have the type text"),
    (
        "messages",
        [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": [IMAGE]}]}],
        "must be text: this model takes no images",
    ),
    (
        "messages",
        [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "nobody", "content": "x"}]}],
        "no tool_use before it has the id 'nobody'",
    ),
    (
        "messages",
        [{"role": "user", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]}],
        "which is for messages of role assistant",
    ),
    ("messages", [], "messages"),
    ("messages", [{"role": "user", "content": "x" * 5000}], "the prompt has"),
    ("tools", [{"type": "web_search_20250305", "name": "web_search"}], "tools.0.type must be custom"),
    ("tool_choice", {"type": "any"}, "there are no tools"),
    ("tool_choice", {"type": "tool"}, "tool_choice has a name"),
    ("mcp_servers", [{"type": "url", "url": "http://x", "name": "x"}], "mcp_servers is not served"),
    ("context_management", {"edits": [{"type": "compact_20260112"}]}, "shorten the messages yourself"),
    ("stop", ["x"], "use stop_sequences"),
    ("n", 2, "n is not served"),
    ("max_tokens", 0, "max_tokens should be greater"),
    ("unheard_of", 1, "unheard_of"),
]


def test_what_is_not_served_is_refused_by_name_in_anthropics_form(answers: Answers) -> None:
    given = answers(*((PATH, {**said("Hello"), field: value}) for field, value, _ in REFUSED))
    for answer, (_, _, message) in zip(given, REFUSED, strict=True):
        assert answer.status_code == 400
        body = answer.json()
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert set(body) == {"type", "error", "request_id"}
        assert message in body["error"]["message"]
        assert body["request_id"] == answer.headers["x-request-id"]


def test_other_errors_have_anthropics_types(answers: Answers) -> None:
    other, lost, failed = answers(
        (PATH, said("Hello", model="other")), (f"{PATH}/batches", {}), (PATH, said("a\a"))
    )
    assert (other.status_code, other.json()["error"]["type"]) == (404, "not_found_error")
    assert (lost.status_code, lost.json()["error"]["type"]) == (404, "not_found_error")
    assert (failed.status_code, failed.json()["error"]["type"]) == (500, "api_error")


def test_a_base_url_for_openais_clients_is_told_from_one_for_anthropics(answers: Answers) -> None:
    (lost,) = answers((f"/v1{PATH}", said("Hello")))
    assert lost.status_code == 404
    assert "use /v1/messages. Anthropic's clients append /v1 themselves" in lost.json()["error"]["message"]


def test_a_stream_that_fails_ends_with_an_error_event(answers: Answers) -> None:
    (answer,) = answers((PATH, said("a\a", stream=True)))
    last = events_in(answer)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")


def test_a_key_may_come_as_anthropics_clients_send_it() -> None:
    with serving(api_key=("sk-first",)) as client:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        assert client.post(PATH, body, x_api_key="sk-first").status == 200
        assert client.post(COUNT, body, x_api_key=" sk-first ").status == 400  # max_tokens is not its field
        assert client.get("/v1/models", x_api_key="sk-first").status == 200
        for wrong in ("", "sk-firs", "Bearer sk-first"):
            refused = client.post(PATH, body, x_api_key=wrong)
            assert refused.status == 401
            assert refused.json["error"]["type"] == "authentication_error"
            assert refused.json["type"] == "error"
        assert client.get("/v1/models", x_api_key="sk-first", Authorization="Bearer x").status == 401
