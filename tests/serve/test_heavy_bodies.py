"""No body stops the server for others: what is too much is refused before it is parsed, the rest is read,
tokenized and written beside the event loop, and all of it counts against the queue.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from hypothesis import given, settings, strategies
from pydantic import BaseModel, ValidationError

from paceline.errors import OverloadedError, RequestError
from paceline.models.tokenizer import TooManyTokens
from paceline.serve import answers, bodies, service, tokens
from paceline.serve.bodies import MAX_CONTAINERS, MAX_DIGITS, MAX_KEYS, MAX_VALUES, parse_json
from paceline.serve.chat_protocol import ChatRequest
from paceline.serve.completions import CompletionRequest
from paceline.serve.errors import FieldError
from paceline.serve.responses_protocol import ResponseRequest
from paceline.serve.scanning import MAX_DEPTH, Shape, shape_of
from paceline.serve.service import LARGE_BODY
from paceline.serve.tokens import DetokenizeRequest, TokenizeRequest
from paceline.serve.tools.conversation import MAX_ARGUMENT_VALUES, with_objects
from tests.serve.api import Api
from tests.serve.echo import byte_tokenizer
from tests.serve.running import PATIENCE, Client, read_answer, serving, until
from tests.toy import roomy_engine, toy_engine

MEBIBYTE = 1 << 20
LARGE_PROMPT = "a" * (LARGE_BODY + 1)


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    made = Api()
    yield made
    made.close()


# Refused before parsing ------------------------------------------------------------------------------------


def many(item: str, count: int, start: str = "[", end: str = "]") -> bytes:
    """A list, or an object, of items; # in an item is its number."""
    items = [item.replace("#", str(number)) for number in range(count)] if "#" in item else [item] * count
    return (start + ",".join(items) + end).encode()


TOO_MUCH: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty texts": (lambda: many('""', 1_390_000, '{"tokens":[', "]}"), "values"),
    "token ids": (lambda: many("7", 1_900_000, '{"tokens":[', "]}"), "values"),
    "unknown fields": (lambda: many('"u#":1', 300_000, "{", "}"), "300000 keys"),
    "wrong biases": (lambda: many('"#":"x"', 100_000, '{"prompt":"a","logit_bias":{', "}}"), "100000 keys"),
    "one field many times": (lambda: many('"a":1', 100_000, "{", "}"), "keys"),
    "empty lists": (lambda: many("[]", 30_000), "lists and objects"),
    "messages": (
        lambda: many('{"role":"x","content":1}', 25_000, '{"messages":[', "]}"),
        "lists and objects",
    ),
    "depth": (lambda: b"[" * 2_000_000 + b"]" * 2_000_000, "in each other"),
    "digits": (lambda: many("9" * 4000, 1000), "4000 digits"),
}


@pytest.mark.parametrize("bomb", TOO_MUCH)
def test_what_has_too_much_is_refused_before_it_is_parsed(bomb: str, monkeypatch: Any) -> None:
    make, message = TOO_MUCH[bomb]
    body = make()

    def parsed(*_: object, **__: object) -> None:
        raise AssertionError("it was parsed")

    monkeypatch.setattr(bodies.json, "loads", parsed)
    with pytest.raises(FieldError, match=message) as refused:
        parse_json(body)
    assert refused.value.param == "body"


def test_a_batch_of_long_prompts_is_not_too_much() -> None:
    prompts = [[49_000] * 4096] * 64
    assert parse_json(json.dumps({"prompt": prompts}).encode()) == {"prompt": prompts}


def test_what_is_in_texts_is_not_counted() -> None:
    text = '[{,:}]"\\' * MAX_VALUES
    assert parse_json(json.dumps([text]).encode()) == [text]


@pytest.mark.parametrize(
    "bound",
    [
        many("1", MAX_VALUES - 2),
        many("[]", MAX_CONTAINERS - 1),
        many('"#":1', MAX_KEYS, "{", "}"),
        b"[" * MAX_DEPTH + b"]" * MAX_DEPTH,
        b"9" * MAX_DIGITS,
    ],
    ids=["values", "containers", "keys", "depth", "digits"],
)
def test_what_is_at_its_bound_is_taken(bound: bytes) -> None:
    parse_json(bound)


values = strategies.recursive(
    strategies.none() | strategies.booleans() | strategies.integers() | strategies.text(),
    lambda inner: strategies.lists(inner) | strategies.dictionaries(strategies.text(), inner),
)


@settings(max_examples=30)
@given(values, strategies.booleans())
def test_the_shape_is_that_of_the_values(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    shape, reference = shape_of(text.encode()), reference_shape(value)
    assert shape._replace(values=reference.values) == reference
    assert reference.values <= shape.values <= 2 * reference.values  # a container counts for its first value


def reference_shape(value: Any) -> Shape:
    """The shape of a value, by looking at it."""
    if isinstance(value, list | dict):
        inner = [reference_shape(one) for one in (value.values() if isinstance(value, dict) else value)]
        keys = len(value) if isinstance(value, dict) else 0
        return Shape(
            values=1 + keys + sum(one.values for one in inner),
            containers=1 + sum(one.containers for one in inner),
            keys=max([keys, *(one.keys for one in inner)]),
            depth=1 + max((one.depth for one in inner), default=0),
            digits=max((one.digits for one in inner), default=0),
            lone_surrogates=False,
        )
    digits = len(str(abs(value))) if type(value) is int else 0
    return Shape(1, 0, 0, 0, digits, lone_surrogates=False)


ESCAPES = strategies.sampled_from(["\\ud83d", "\\uDE00", "\\u00e9", "\\\\", '\\"', "\\n", "d", "ud83d", "é"])


@settings(max_examples=60)
@given(strategies.lists(strategies.lists(ESCAPES).map("".join)))
def test_half_a_surrogate_pair_is_found_wherever_it_is(texts: list[str]) -> None:
    body = "[" + ",".join(f'"{text}"' for text in texts) + "]"
    is_lone = any(re.search("[\ud800-\udfff]", text) for text in json.loads(body))
    assert shape_of(body.encode()).lone_surrogates == is_lone


# Refused at the first error ------------------------------------------------------------------------------

HELLO = {"messages": [{"role": "user", "content": "a"}]}
WRONG = 5000
WRONG_LISTS: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (ChatRequest, {"messages": [{"role": "x", "content": 1, "bad": 1}] * 19_000}),
    (ChatRequest, {"messages": [{"role": "user", "content": [1] * WRONG}]}),
    (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [1] * WRONG}]}),
    (ChatRequest, {**HELLO, "tools": [1] * WRONG}),
    (ChatRequest, {**HELLO, "modalities": ["x"] * WRONG}),
    (ChatRequest, {**HELLO, "stop_token_ids": ["x"] * WRONG}),
    (
        ChatRequest,
        {
            **HELLO,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [1] * WRONG},
            },
        },
    ),
    (CompletionRequest, {"prompt": "a", "structured_outputs": {"choice": [1] * WRONG}}),
    (CompletionRequest, {"prompt": [[]] * WRONG}),
    (CompletionRequest, {"prompt": "a", "stop": [1] * WRONG}),
    (ResponseRequest, {"input": [1] * WRONG}),
    (ResponseRequest, {"input": [{"type": "x"}] * WRONG}),
    (ResponseRequest, {"input": [{"role": "user", "content": [1] * WRONG}]}),
    (ResponseRequest, {"input": "a", "tools": [1] * WRONG}),
    (ResponseRequest, {"input": "a", "include": ["x"] * WRONG}),
    (TokenizeRequest, {"messages": [1] * WRONG}),
    (DetokenizeRequest, {"tokens": [""] * WRONG}),
]


@pytest.mark.parametrize(("model", "data"), WRONG_LISTS, ids=lambda one: str(one)[:60])
def test_a_list_is_refused_at_its_first_wrong_item(model: type[BaseModel], data: Any) -> None:
    with pytest.raises(ValidationError) as refused:
        model.model_validate(data)
    assert refused.value.error_count() <= 12  # one for each member of a union


def test_token_ids_may_be_written_with_a_point_and_must_be_integers() -> None:
    assert DetokenizeRequest.model_validate({"tokens": [1, 2.0, 3]}).tokens == [1, 2, 3]
    for wrong in ("1", 1.5, True, None, -1, [1]):
        with pytest.raises(ValidationError):
            DetokenizeRequest.model_validate({"tokens": [5, wrong]})


def test_an_error_does_not_repeat_a_long_name(api: Api) -> None:
    error = api.refusal("/v1/completions", {"prompt": "a", "x" * MEBIBYTE: 1})
    assert len(json.dumps(error)) < 2000


def test_the_arguments_of_a_call_are_bounded_too() -> None:
    def message(count: int) -> dict[str, Any]:
        function = {"name": "f", "arguments": json.dumps({"a": [1] * count})}
        return {"role": "assistant", "tool_calls": [{"function": function}]}

    (taken,) = with_objects([message(1000)])
    assert taken["tool_calls"][0]["function"]["arguments"] == {"a": [1] * 1000}
    with pytest.raises(RequestError, match=f"at most {MAX_ARGUMENT_VALUES} values"):
        with_objects([message(MAX_ARGUMENT_VALUES)])


# Beside the event loop -----------------------------------------------------------------------------------


@contextmanager
def held(monkeypatch: Any) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Large bodies are not read on until the second event is set; the first is set when one has begun."""
    begun, go_on = threading.Event(), threading.Event()
    read_body = bodies.read_body

    def slow(raw: bytes, model: type[BaseModel]) -> BaseModel:
        if len(raw) > LARGE_BODY:
            begun.set()
            assert go_on.wait(PATIENCE)
        return read_body(raw, model)

    monkeypatch.setattr(bodies, "read_body", slow)
    try:
        yield begun, go_on
    finally:
        go_on.set()


def send_large(client: Client, stack: ExitStack) -> Any:
    """A connection on which a large body has been sent."""
    connection = stack.enter_context(client.connect())
    connection.sendall(client.request("POST", "/tokenize", {"prompt": LARGE_PROMPT}))
    return connection


def test_while_large_bodies_are_read_others_are_answered(monkeypatch: Any) -> None:
    """More of them than there are readers, and however long they take."""
    with serving() as client, held(monkeypatch) as (begun, go_on), ExitStack() as stack:
        waiting = [send_large(client, stack) for _ in range(service.WORKERS + 2)]
        assert begun.wait(PATIENCE)
        with client.stream(max_tokens=3):
            assert client.get("/health").status == 200
            assert client.complete(max_tokens=3).status == 200
        go_on.set()
        assert [read_answer(connection).status for connection in waiting] == [200] * len(waiting)


def test_bodies_that_are_read_count_against_the_queue(monkeypatch: Any) -> None:
    with (
        serving(toy_engine(max_num_seqs=1), max_queue=1) as client,
        held(monkeypatch) as (_, go_on),
        ExitStack() as stack,
    ):
        waiting = [send_large(client, stack) for _ in range(2)]
        until(lambda: client.complete(max_tokens=1).status == 429)
        answer = client.complete(max_tokens=1)
        assert answer.headers["retry-after"] == "1"
        assert answer.json["error"]["type"] == "rate_limit_error"
        assert client.post("/tokenize", {"prompt": "a"}).status == 429
        go_on.set()
        assert [read_answer(connection).status for connection in waiting] == [200, 200]
        assert client.complete(max_tokens=1).status == 200


def test_large_bodies_that_wait_have_bounded_bytes(api: Api, monkeypatch: Any) -> None:
    monkeypatch.setattr(service, "MAX_WAITING_BYTES", 3 * MEBIBYTE)

    async def work() -> None:
        places = [await api.service.place(MEBIBYTE) for _ in range(service.READERS)]
        waiting = [asyncio.ensure_future(api.service.place(MEBIBYTE)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await api.service.place(MEBIBYTE)
        (await api.service.place(LARGE_BODY)).close()  # small ones do not wait
        for place in places:
            place.close()
        for one in waiting:
            (await one).close()

    api.run(work)
    assert api.front.num_requests == 0
    assert api.service.waiting_bytes == 0


@pytest.mark.parametrize("size", [10, 2 * LARGE_BODY])
def test_only_small_bodies_are_read_in_the_event_loop(api: Api, size: int, monkeypatch: Any) -> None:
    threads = []
    read_body = bodies.read_body

    def noted(raw: bytes, model: type[BaseModel]) -> BaseModel:
        threads.append(threading.current_thread())
        return read_body(raw, model)

    monkeypatch.setattr(bodies, "read_body", noted)
    assert api.post("/tokenize", {"prompt": "a" * size})["count"] == size + 1
    assert (threads == [threading.main_thread()]) == (size < LARGE_BODY)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/detokenize"])
def test_texts_are_tokenized_and_spelled_beside_the_event_loop(api: Api, path: str, monkeypatch: Any) -> None:
    threads = []
    tokenizer = api.service.tokenizer

    def noted(name: str) -> Any:
        work = getattr(tokenizer, name)

        def note(*args: Any, **options: Any) -> Any:
            threads.append(threading.current_thread())
            return work(*args, **options)

        return note

    for name in ("encode", "decode"):
        monkeypatch.setattr(tokenizer, name, noted(name), raising=False)
    body = {"tokens": [40]} if path == "/detokenize" else {"prompt": "hello"}
    if path == "/v1/completions":
        body = {"prompt": [40, 41], "echo": True, "max_tokens": 1}
    assert api.request("POST", path, json=body).status_code == 200
    assert threads
    assert threading.main_thread() not in threads


# Tokenizing ------------------------------------------------------------------------------------------------


def test_a_text_that_cannot_fit_is_not_tokenized_to_its_end() -> None:
    with pytest.raises(TooManyTokens) as refused:
        byte_tokenizer().encode("😀" * 9_000, most=1000)
    assert not refused.value.exact
    assert 1000 < refused.value.count < 9_000  # of 36,000
    assert "more than" in str(refused.value)


def test_a_text_longer_than_all_its_tokens_can_be_is_not_tokenized(monkeypatch: Any) -> None:
    """Each token of this vocabulary is at most as long as <|answer|>."""
    tokenizer = byte_tokenizer()
    monkeypatch.setattr(tokenizer, "_encoding", None)
    with pytest.raises(TooManyTokens):
        tokenizer.encode("a" * 10_001, most=1000)


@pytest.mark.parametrize("text", ["a", "é ", "😀", " ", "<|end|>", "word and word\n"])
def test_a_bound_does_not_change_tokens(text: str) -> None:
    tokenizer = byte_tokenizer()
    long = text * 3000
    ids = tokenizer.encode(long)
    for most in (len(ids), 2 * len(ids), 10**9):
        assert tokenizer.encode(long, most=most) == ids
    with pytest.raises(TooManyTokens):
        tokenizer.encode(long, most=len(ids) - 1)


def test_a_prompt_that_is_too_long_is_told_so(api: Api) -> None:
    for prompt in ("a" * 1000, [5] * 1001):
        error = api.refusal("/v1/completions", {"prompt": prompt})
        assert error["param"] == "prompt"
        assert "1001 tokens and the context holds 400" in error["message"]
        assert "by 602 tokens" in error["message"]


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_others_run_while_a_long_text_is_tokenized_or_spelled(work: str) -> None:
    """The GIL is released meanwhile: another thread gets its turn again and again."""
    tokenizer = byte_tokenizer()
    text = "word and word " * 20_000
    given: Any = text if work == "encode" else tokenizer.encode(text)
    begun, ended = threading.Event(), threading.Event()

    def run() -> None:
        begun.set()
        getattr(tokenizer, work)(given)
        ended.set()

    thread = threading.Thread(target=run)
    turns = 0
    thread.start()
    begun.wait()
    while not ended.is_set():
        time.sleep(0.0005)
        turns += 1
    thread.join()
    assert turns > 10


# Answers ---------------------------------------------------------------------------------------------------


def test_tokenize_gives_so_many_tokens_and_no_more(api: Api, monkeypatch: Any) -> None:
    monkeypatch.setattr(tokens, "MAX_TOKENIZED", 10_000)
    answer = api.post("/tokenize", {"prompt": "ab" * 4900, "return_token_strs": True})  # in several pieces
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == 9801
    assert answer["tokens"][1:] == answer["tokens"][1:3] * 4900
    error = api.refusal("/tokenize", {"prompt": "a" * 10_000})
    assert error["param"] == "prompt"
    assert "at most 10000" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hé", "n": 3, "echo": True, "logprobs": 2}),
        ("/v1/chat/completions", {**HELLO, "logprobs": True, "prompt_logprobs": 1}),
    ],
)
def test_large_answers_are_written_beside_the_event_loop_with_the_same_bytes(
    api: Api, path: str, body: dict[str, Any], monkeypatch: Any
) -> None:
    body = {**body, "max_tokens": 5, "seed": 1}
    small = api.request("POST", path, json=body).content
    threads = []
    to_json_pieces = answers.to_json_pieces

    def noted(value: object) -> Any:
        threads.append(threading.current_thread())
        return to_json_pieces(value)

    monkeypatch.setattr(answers, "LARGE_ANSWER", 0)
    monkeypatch.setattr(answers, "to_json_pieces", noted)
    large = api.request("POST", path, json=body).content
    own = rb'"id":"[\w-]+"|"created":\d+'
    assert re.sub(own, b"", large) == re.sub(own, b"", small)
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


def test_log_probabilities_of_prompts_are_bounded(monkeypatch: Any) -> None:
    api = Api(roomy_engine())
    body = {"prompt": [5] * 10_000, "echo": True, "logprobs": 20, "n": 8, "max_tokens": 1}
    error = api.refusal("/v1/completions", body)
    assert error["param"] == "prompt_logprobs"
    assert "1680000" in error["message"]
    api.close()
