"""/v1/responses: the official client reads it, and its events come in order."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from paceline.serve.openai.responses_input import messages_of
from paceline.serve.openai.responses_protocol import ResponseRequest
from paceline.serve.tools.formats import FORMATS
from tests.serve.echo import ask, with_echo

Result = TypeVar("Result")

PATH = "/v1/responses"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
BERN = ("weather", '{"city": "Bern"}')
CALL = FORMATS["hermes"].write([BERN])


class City(BaseModel):
    name: str
    people: int


def with_client(work: Callable[[openai.AsyncOpenAI], Awaitable[Result]]) -> Result:
    """The result of `work` with the official client."""

    async def main(http: httpx.AsyncClient) -> Result:
        return await work(openai.AsyncOpenAI(base_url="http://echo/v1", api_key="x", http_client=http))

    return with_echo(main)


def events_of(text: str, **body: Any) -> list[dict[str, Any]]:
    """The events of a streamed answer, which is `text`."""
    answer = ask(PATH, input=text, temperature=0, stream=True, **body)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """The types of the events, without repetitions."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for number, name in enumerate(names) if number == 0 or name != names[number - 1]]


def test_the_official_client_reads_an_answer() -> None:
    async def work(client: openai.AsyncOpenAI) -> Response:
        return await client.responses.create(
            model="echo", input="Good morning!", temperature=0, metadata={"who": "me"}, store=False
        )

    answer = with_client(work)
    Response.model_validate(answer.model_dump())
    assert answer.output_text == "Good morning!"
    assert (answer.status, answer.model, answer.metadata) == ("completed", "echo", {"who": "me"})
    assert answer.id.startswith("resp_")
    assert answer.usage is not None
    assert answer.usage.output_tokens == len("Good morning!") + 1  # and the end-of-sequence token
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


@pytest.mark.parametrize("text", ["Hello", "", CALL, f"One moment.\n{CALL}"], ids=repr)
def test_every_object_is_one_of_the_official_types(text: str) -> None:
    body: dict[str, Any] = {"tools": [WEATHER]} if CALL in text else {}
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for event in events_of(text, **body):
        assert adapter.validate_python(event).type == event["type"]
    Response.model_validate(ask(PATH, input=text, temperature=0, **body).json())


def test_the_events_of_a_text_are_in_order_and_numbered() -> None:
    events = events_of("Good morning!")
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event["delta"] for event in events if "delta" in event) == "Good morning!"
    assert events[-1]["response"]["output"] == [events[-2]["item"]]


def test_the_events_of_a_text_with_calls_are_in_order() -> None:
    written = FORMATS["hermes"].write([BERN, ("weather", '{"city": "Basel"}')])
    events = events_of(f"One moment.\n{written}", tools=[WEATHER])
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    text = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    message = ["output_item.added", *text, "output_item.done"]
    assert kinds(events) == ["created", "in_progress", *message, *call, *call, "completed"]
    assert [event["output_index"] for event in events if event["type"].endswith("item.added")] == [0, 1, 2]
    assert [event["arguments"] for event in events if "arguments" in event] == [
        '{"city": "Bern"}',
        '{"city": "Basel"}',
    ]


@pytest.mark.parametrize("text", ["Hello", "", CALL, f"One moment.\n{CALL}"], ids=repr)
def test_a_stream_ends_with_the_whole_response(text: str) -> None:
    body: dict[str, Any] = {"tools": [WEATHER], "instructions": "Help."}
    streamed = events_of(text, **body)[-1]["response"]
    whole = ask(PATH, input=text, temperature=0, **body).json()
    for response in (streamed, whole):
        for own in ("id", "created_at", "completed_at"):
            assert response.pop(own)
        for item in response["output"]:
            assert item.pop("id")
            item.pop("call_id", None)
    assert streamed == whole


def test_the_official_client_reads_calls_from_a_stream() -> None:
    async def work(client: openai.AsyncOpenAI) -> Any:
        async with client.responses.stream(
            model="echo", input=f"Well.\n{CALL}", temperature=0, tools=[WEATHER]
        ) as stream:
            async for _ in stream:
                pass
            return await stream.get_final_response()

    message, call = with_client(work).output
    assert message.content[0].text == "Well."
    assert (call.type, call.name, call.arguments, call.status) == ("function_call", *BERN, "completed")
    assert call.call_id.startswith("call_")


def test_the_official_client_parses_an_answer_into_a_model() -> None:
    async def work(client: openai.AsyncOpenAI) -> Any:
        return await client.responses.parse(
            model="echo", input='{"name": "Bern", "people": 134591}', temperature=0, text_format=City
        )

    answer = with_client(work)
    assert answer.output_parsed == City(name="Bern", people=134591)
    assert answer.text.format.name == "City"


def test_an_answer_that_was_cut_off_is_incomplete() -> None:
    answer = ask(PATH, input="Good morning!", temperature=0, max_output_tokens=4).json()
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete"
    assert answer["output"][0]["content"][0]["text"] == "Good"
    assert events_of("Good morning!", max_output_tokens=4)[-1]["type"] == "response.incomplete"


def test_a_call_that_was_cut_off_is_incomplete() -> None:
    cut = len(CALL) - len('n"}}\n</tool_call>')
    answer = ask(PATH, input=CALL, temperature=0, tools=[WEATHER], max_output_tokens=cut).json()
    (call,) = answer["output"]
    assert (call["arguments"], call["status"]) == ('{"city": "Ber', "incomplete")
    assert answer["status"] == "incomplete"


def test_a_stream_that_fails_ends_with_response_failed() -> None:
    events = events_of("a\a")
    assert kinds(events)[-1] == "failed"
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert ask(PATH, input="a\a").status_code == 500


def test_an_answer_can_be_sent_back_with_the_results_of_its_calls() -> None:
    first = ask(PATH, input=f"Well.\n{CALL}", temperature=0, tools=[WEATHER]).json()
    result = {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "rain"}
    items = [
        {"role": "user", "content": "Bern?"},
        *first["output"],
        result,
        {"role": "user", "content": "So?"},
    ]
    second = ask(PATH, input=items, temperature=0, tools=[WEATHER]).json()
    assert second["output"][0]["content"][0]["text"] == "So?"


def test_input_items_are_the_messages_of_a_chat() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bern"}'}
    parts = [{"type": "input_text", "text": "How is"}, {"type": "input_text", "text": "Bern?"}]
    spoken = {"type": "output_text", "text": "Well.", "annotations": []}
    body = ResponseRequest.model_validate(
        {
            "instructions": "Be brief.",
            "input": [
                {"role": "developer", "content": "Be kind."},
                {"type": "message", "role": "user", "content": parts},
                {"type": "message", "role": "assistant", "content": [spoken], "id": "msg_1"},
                call,
                {**call, "call_id": "c2", "name": "now", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "rain"},
            ],
        }
    )
    system, user, assistant, tool = messages_of(body)
    assert system == {"role": "system", "content": "Be brief.\n\nBe kind."}
    assert user == {"role": "user", "content": "How is\nBern?"}
    assert assistant["content"] == "Well."
    assert [one["function"]["name"] for one in assistant["tool_calls"]] == ["weather", "now"]
    assert tool == {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "rain"}


def test_extra_fields_are_those_of_chat() -> None:
    own = {"seed": 4, "top_k": 5, "speculative": "off", "segment": "tests", "return_metrics": True}
    answer = ask(PATH, input="Hello", stop=["o"], **own).json()
    assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("store", True),
        ("previous_response_id", "resp_1"),
        ("conversation", "conv_1"),
        ("background", True),
        ("prompt", {"id": "pmpt_1"}),
        ("truncation", "auto"),
        ("include", ["file_search_call.results"]),
        ("reasoning", {"effort": "high"}),
        ("top_logprobs", 3),
        ("max_tool_calls", 1),
        ("n", 2),
        ("tools", [{"type": "web_search"}]),
        ("tool_choice", {"type": "file_search"}),
        ("tool_choice", "required"),
        ("input", []),
        ("input", [{"type": "item_reference", "id": "msg_1"}]),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y.png"}]}]),
        ("input", [{"role": "user", "content": [{"type": "input_file", "file_id": "file_1"}]}]),
        ("input", [{"type": "function_call_output", "call_id": "nobody", "output": "x"}]),
        ("input", "x" * 5000),  # more than the context
        ("input", [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "nonsense"}]),
        ("text", {"format": {"type": "json_schema", "name": "x"}}),
        ("unheard_of", 1),
    ],
)
def test_unsupported_response_fields_are_refused_by_name(field: str, value: Any) -> None:
    answer = ask(PATH, **{"input": "Hello", field: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].split(".")[0] == field


@pytest.mark.parametrize(
    "field",
    [
        "store",
        "previous_response_id",
        "background",
        "tools",
        "tool_choice",
        "text",
        "metadata",
        "include",
        "user",
    ],
)
def test_null_means_not_given(field: str) -> None:
    assert ask(PATH, **{"input": "Hello", "temperature": 0, field: None}).status_code == 200
