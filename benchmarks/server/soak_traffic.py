"""The mixed traffic of a soak, and the content of answers that must never change.

Every request carries its seed, so its answer depends on nothing else: neither on other requests nor on
drafts and caches. Two answers to it are equal once ids and times are removed, and what reflects how they
were made (cached tokens, the division of a stream into events).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

from benchmarks.server.client_requests import CHAT, COMPLETIONS, ClientRequest
from paceline.bench.servers.client import DONE, Answer
from paceline.bench.traffic.workloads import Prompt

Fields = dict[str, Any]

RESPONSES = "/v1/responses"
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS: Fields = {"tools": [{"type": "function", "function": WEATHER}], "tool_choice": "required"}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMA: Fields = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
}
GREEDY: Fields = {"temperature": 0}

# kinds of requests, used in turn: (name, path, fields)
KINDS: tuple[tuple[str, str, Fields], ...] = (
    ("chat, streamed", CHAT, {**GREEDY, **USAGE}),
    ("completion, streamed, sampled", COMPLETIONS, {"temperature": 0.8, "top_p": 0.95, **USAGE}),
    ("chat, whole, hot", CHAT, {"temperature": 1.3, "top_k": 40}),
    ("completion of 2, logprobs", COMPLETIONS, {"temperature": 0.7, "n": 2, "logprobs": 2}),
    ("response, whole", RESPONSES, GREEDY),
    ("chat, schema, streamed", CHAT, {**GREEDY, **SCHEMA, **USAGE}),
    ("response, streamed, sampled", RESPONSES, {"temperature": 0.9, "stream": True}),
    ("chat, tools", CHAT, {**GREEDY, **TOOLS}),
    ("chat, tools, streamed", CHAT, {"temperature": 0.6, **TOOLS, **USAGE}),
    ("completion, undrafted", COMPLETIONS, {**GREEDY, "speculative": "off"}),
    ("chat, few drafts, streamed", CHAT, {**GREEDY, "speculative": {"num_speculative_tokens": 2}, **USAGE}),
    ("chat, schema, sampled", CHAT, {"temperature": 0.9, **SCHEMA}),
    (
        "completion, penalties, stop",
        COMPLETIONS,
        {"temperature": 0.5, "presence_penalty": 0.5, "stop": "\n\n"},
    ),
)
SALTS = 4
SEGMENTS = 5

NAMES = {"id", "created", "created_at", "completed_at", "item_id", "call_id", "system_fingerprint"}
PROVENANCE = {"prompt_tokens_details", "input_tokens_details", "metrics"}
IGNORED = NAMES | PROVENANCE


def mixed_traffic(prompts: Sequence[Prompt], model: str) -> list[tuple[str, ClientRequest]]:
    """Distinct requests with their kinds: every kind, every prompt, several salts."""
    count = max(len(prompts), len(KINDS))
    both = zip(cycle(prompts), cycle(KINDS), strict=False)
    requests = []
    for number, (prompt, (name, path, fields)) in zip(range(count), both, strict=False):
        limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
        body = {
            "model": model,
            **_prompt_fields(prompt, path),
            limit: prompt.max_tokens,
            "seed": number,
            "segment": f"soak-{number % SEGMENTS}",
            **({"cache_salt": f"tenant-{number % SALTS}"} if number % 2 else {}),
            **fields,
        }
        requests.append((name, ClientRequest(path, body, number)))
    return requests


def _prompt_fields(prompt: Prompt, path: str) -> Fields:
    """The prompt in the fields of this endpoint."""
    messages = list(prompt.messages or [{"role": "user", "content": prompt.text}])
    if path == CHAT:
        return {"messages": messages}
    if path == RESPONSES:
        return {"input": messages}
    return {"prompt": prompt.text if prompt.messages is None else str(messages[-1]["content"])}


def comparable(request: ClientRequest, answer: Answer) -> str | None:
    """The content that all answers to this request must share, as text; None if this one is incomplete."""
    if answer.status != 200:
        return None
    try:
        content = _streamed(request, answer) if request.body.get("stream") else json.loads(answer.body)
    except (ValueError, KeyError, TypeError, IndexError):
        return None
    return None if content is None else json.dumps(_without_ignored(content), sort_keys=True)


def _streamed(request: ClientRequest, answer: Answer) -> Any:
    """The concatenated events of a stream; None if the end is missing."""
    if request.path == RESPONSES:
        return _response(answer)
    ended = bool(answer.events) and answer.events[-1][1] == DONE
    if not ended or answer.error is not None:
        return None
    choices: dict[int, Fields] = {}
    for _, choice in answer.choices:
        _add(choices.setdefault(choice["index"], {}), choice)
    if not all(choice.get("finish_reason") for choice in choices.values()):
        return None
    return {"choices": choices, "tokens": answer.completion_tokens}


def _response(answer: Answer) -> Any:
    """The last event of a /v1/responses stream, with the concatenated texts before it."""
    events = [event for _, event in answer.chunks]
    last = events[-1]
    if last["type"] not in ("response.completed", "response.incomplete"):
        return None
    texts = [event["delta"] for event in events if event["type"].endswith(".delta")]
    return {"response": last["response"], "text": "".join(texts)}


def _add(whole: Fields, part: Mapping[str, Any]) -> None:
    """Add a piece of a stream to the pieces before: texts and lists grow, other fields are set once."""
    for name, value in part.items():
        before, grows = whole.get(name), name in ("text", "content", "arguments") or isinstance(value, list)
        if isinstance(value, dict):
            _add(whole.setdefault(name, {}), value)
        elif name == "tool_calls" and isinstance(value, list):
            calls: dict[int, Fields] = whole.setdefault(name, {})
            for call in value:
                _add(calls.setdefault(call["index"], {}), call)
        elif value is not None:
            whole[name] = before + value if grows and before is not None else value


def _without_ignored(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _without_ignored(item) for key, item in value.items() if key not in IGNORED}
    return [_without_ignored(item) for item in value] if isinstance(value, list) else value


def endless_requests(
    requests: Sequence[ClientRequest], choose: Callable[[int], int]
) -> Iterator[ClientRequest]:
    """Random requests without end, never the same twice in a row."""
    number = choose(len(requests))
    while True:
        yield requests[number % len(requests)]
        number += 1 + choose(len(requests) - 1)
