"""Prompts of conversations with tools are those of transformers, for the chat formats people run.

The templates in tests/serve/templates work as the families' published ones do, in few words. Each of the made
conversations goes through the server's own fields, and its token ids must be those of transformers.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from paceline.models.tokenizer import Tokenizer, byte_alphabet
from paceline.serve.openai.chat_protocol import ChatRequest
from paceline.serve.tools.chat_fields import chat_tools
from paceline.serve.tools.formats import FORMATS
from paceline.serve.tools.toolbox import Toolbox
from tests.large import LARGE

TEMPLATES = Path(__file__).parents[1] / "templates"
CONVERSATIONS = 200 if LARGE else 60
ONE_CALL_AT_ONCE = {"llama3"}  # its template refuses more
EITHER_THOUGHT_OR_CONTENT = {"gpt_oss"}  # beside a call
FAILS_ON_NULL = {"gpt_oss", "mistral_args"}  # contents of null, which clients send beside calls
READS_PARTS = {"glm45", "gemma"}  # contents that are lists of text parts
FORMAT_OF = {
    "deepseek": "deepseek_v3",
    "gemma": "gemma4",
    "glm45": "glm45",
    "glm47": "glm47",
    "gpt_oss": "openai",
    "hermes": "hermes",
    "llama3": "llama3_json",
    "mistral": "mistral",
    "mistral_args": "mistral_args",
    "qwen3": "hermes",
}

TEXTS = [
    "Hello",
    "",
    " leading and trailing \n",
    "Zürich, 東京 🚲 е́",
    'quotes " and \\ and </tool_call> {"a": 1}',
    "two\n\nparagraphs & <b>marks</b>",
    "<tool_response>not one</tool_response>",
]
VALUES: list[Any] = [
    "Bern",
    "日本\n",
    "",
    3,
    -1.5,
    1e20,
    True,
    None,
    [1, "b", []],
    {"x": {"y": "é"}, "a": [0.0]},
]
TYPES: list[dict[str, Any]] = [
    {"type": "string", "description": "A city, e.g. Zürich"},
    {"type": "integer", "minimum": 0},
    {"type": "string", "enum": ["a", "é"]},
    {"type": "array", "items": {"type": "number"}},
    {"type": "object", "properties": {"inner": {"type": "boolean"}}, "required": ["inner"]},
    {"type": ["string", "null"]},
]


class Conversations:
    """Makes conversations that a template takes: requests as a client sends them."""

    def __init__(self, family: str) -> None:
        self._random = random.Random(family)
        self._family = family

    def request(self) -> dict[str, Any]:
        chance, messages = self._random, list[dict[str, Any]]()
        if chance.random() < 0.6:
            messages.append({"role": "system", "content": self._content()})
        for _ in range(chance.randint(1, 2)):
            messages.append({"role": "user", "content": self._content()})
            for _ in range(chance.randint(0, 2)):
                messages += self._calls_and_results()
            messages.append(self._answer())
        if chance.random() < 0.7:  # else the last answer stays
            messages.pop()
        tools = [self._tool(number) for number in range(chance.randint(0, 3))]
        body = {"messages": messages, "add_generation_prompt": messages[-1]["role"] != "assistant"}
        return {**body, "tools": tools} if tools else body

    def _content(self) -> str | list[dict[str, str]]:
        texts = self._random.choices(TEXTS, k=2)
        if self._family in READS_PARTS and self._random.random() < 0.3:
            return [{"type": "text", "text": text} for text in texts]
        return "".join(texts)

    def _answer(self) -> dict[str, Any]:
        answer = {"role": "assistant", "content": self._content()}
        if self._random.random() < 0.4:
            answer[self._random.choice(("reasoning_content", "reasoning"))] = "Hm.\nÄh."
        return answer

    def _calls_and_results(self) -> list[dict[str, Any]]:
        most = 1 if self._family in ONE_CALL_AT_ONCE else 3
        ids = [f"{self._random.randrange(10**9):09}" for _ in range(self._random.randint(1, most))]
        calls = [{"id": own, "type": "function", "function": self._called()} for own in ids]
        message: dict[str, Any] = {**self._answer(), "tool_calls": calls}
        has_thought = "reasoning" in message or "reasoning_content" in message
        if self._random.random() < 0.5 or (has_thought and self._family in EITHER_THOUGHT_OR_CONTENT):
            message["content"] = None
        results = [
            {"role": "tool", "tool_call_id": own, "content": self._random.choice(TEXTS)} for own in ids
        ]
        if self._random.random() < 0.5:
            results = [{**result, "name": "lookup"} for result in results]
        return [message, *results]

    def _called(self) -> dict[str, Any]:
        values = {f"p{n}": value for n, value in enumerate(self._random.sample(VALUES, k=3))}
        arguments = {} if self._random.random() < 0.2 else values
        return {"name": f"get_{self._random.randrange(3)}", "arguments": json.dumps(arguments)}

    def _tool(self, number: int) -> dict[str, Any]:
        names = [f"p{n}" for n in range(self._random.randrange(4))]
        properties = {name: self._random.choice(TYPES) for name in names}
        parameters = {"type": "object", "properties": properties, "required": names[:1]}
        function = {"name": f"get_{number}", "description": "Gets: “x”", "parameters": parameters}
        return {"type": "function", "function": function}


def with_objects(message: dict[str, Any], family: str) -> dict[str, Any]:
    """The message as transformers documents it: the arguments of calls are objects."""
    if family in FAILS_ON_NULL and message["content"] is None:
        message = {**message, "content": ""}
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    parsed = [{**function, "arguments": json.loads(function["arguments"])} for function in functions]
    calls = zip(message["tool_calls"], parsed, strict=True)
    return {**message, "tool_calls": [{**call, "function": function} for call, function in calls]}


@pytest.mark.parametrize("family", sorted(FORMAT_OF))
def test_token_ids_are_those_of_transformers(family: str) -> None:
    from transformers import PreTrainedTokenizerFast

    template = (TEMPLATES / f"{family}.jinja").read_text("utf-8")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(byte_alphabet(), []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    marks = {"bos_token": "<s>", "eos_token": "</s>"}
    backend.add_special_tokens([*marks.values(), *FORMATS[FORMAT_OF[family]].tokens])
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **marks)
    ours = Tokenizer(backend, marks, [1], template)
    toolbox, made = Toolbox(ours), Conversations(family)
    assert toolbox.format == FORMATS[FORMAT_OF[family]]
    for _ in range(CONVERSATIONS):
        request = made.request()
        body = ChatRequest.model_validate(request)
        plan = toolbox.plan(chat_tools(body.tools))
        chat, tools = toolbox.conversation([message.plain() for message in body.messages], plan)
        prompt = ours.apply_chat_template(chat, tools=tools, **body.template_options())
        expected = theirs.apply_chat_template(
            [with_objects(message, family) for message in request["messages"]],
            tools=request.get("tools"),
            add_generation_prompt=request["add_generation_prompt"],
            return_dict=False,
        )
        assert ours.encode(prompt, add_special_tokens=False) == expected, request
