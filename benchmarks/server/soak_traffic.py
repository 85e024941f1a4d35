"""Mixed traffic, as a server meets it in a day, and what of an answer must never change.

Every request carries its seed, so its answer is a function of the request alone: whoever else is served,
whatever is drafted or cached. Two answers to it are the same once what names them (ids, times) and what
tells how they were made (cached tokens, where a stream was cut into events) is taken out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

from benchmarks.server.load import Asked
from paceline.bench.servers.client import DONE, Answer
from paceline.bench.traffic.workloads import Prompt

Fields = dict[str, Any]

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
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

# what is asked in turns: (name, path, fields)
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
HOW_IT_WAS_MADE = {"prompt_tokens_details", "input_tokens_details", "metrics"}
LEFT_OUT = NAMES | HOW_IT_WAS_MADE


def mixed_traffic(prompts: Sequence[Prompt], model: str) -> list[tuple[str, Asked]]:
    """Distinct requests with the names of their kinds: every kind, every prompt, several salts."""
    count = max(len(prompts), len(KINDS))
    both = zip(cycle(prompts), cycle(KINDS), strict=False)
    asked = []
    for number, (prompt, (name, path, fields)) in zip(range(count), both, strict=False):
        most = "max_output_tokens" if path == RESPONSES else "max_tokens"
        body = {
            "model": model,
            **_asked(prompt, path),
            most: prompt.max_tokens,
            "seed": number,
            "segment": f"soak-{number % SEGMENTS}",
            **({"cache_salt": f"tenant-{number % SALTS}"} if number % 2 else {}),
            **fields,
        }
        asked.append((name, Asked(path, body, number)))
    return asked


def _asked(prompt: Prompt, path: str) -> Fields:
    """The part of a body that says what is asked."""
    messages = list(prompt.messages or [{"role": "user", "content": prompt.text}])
    if path == CHAT:
        return {"messages": messages}
    if path == RESPONSES:
        return {"input": messages}
    return {"prompt": prompt.text if prompt.messages is None else str(messages[-1]["content"])}


def essence(asked: Asked, answer: Answer) -> str | None:
    """What every answer to this request must be, as text; None if this one is not complete."""
    if answer.status != 200:
        return None
    try:
        found = _streamed(asked, answer) if asked.body.get("stream") else json.loads(answer.body)
    except (ValueError, KeyError, TypeError, IndexError):
        return None
    return None if found is None else json.dumps(_without_names(found), sort_keys=True)


def _streamed(asked: Asked, answer: Answer) -> Any:
    """What the events of a stream add up to; None if the end is missing."""
    if asked.path == RESPONSES:
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
    """The last event of a stream of /v1/responses, beside the texts that came before it."""
    events = [event for _, event in answer.chunks]
    last = events[-1]
    if last["type"] not in ("response.completed", "response.incomplete"):
        return None
    texts = [event["delta"] for event in events if event["type"].endswith(".delta")]
    return {"response": last["response"], "text": "".join(texts)}


def _add(whole: Fields, part: Mapping[str, Any]) -> None:
    """Add a piece of a stream to what came before: texts and lists grow, the rest is told once."""
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


def _without_names(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _without_names(one) for key, one in value.items() if key not in LEFT_OUT}
    return [_without_names(one) for one in value] if isinstance(value, list) else value


def in_turns(asked: Sequence[Asked], choose: Callable[[int], int]) -> Iterator[Asked]:
    """Requests without an end, one after the other: a client does not send the same twice in a row."""
    number = choose(len(asked))
    while True:
        yield asked[number % len(asked)]
        number += 1 + choose(len(asked) - 1)
