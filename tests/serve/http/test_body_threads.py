"""Large bodies and answers are handled beside the event loop, and count against the queue."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from pydantic import BaseModel

from paceline.errors import OverloadedError
from paceline.serve import queue_slots, service
from paceline.serve.http import bodies
from paceline.serve.openai import answers
from paceline.serve.queue_slots import LARGE_BODY
from tests.serve.api import Api
from tests.serve.running import PATIENCE, Client, read_answer, serving, until
from tests.toy import toy_engine

MEBIBYTE = 1 << 20
LARGE_PROMPT = "a" * (LARGE_BODY + 1)
HELLO = {"messages": [{"role": "user", "content": "a"}]}


@contextmanager
def held(monkeypatch: Any) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Parsing of large bodies stops until the second event is set; the first is set when one has begun."""
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


def test_other_requests_are_answered_while_large_bodies_are_parsed(monkeypatch: Any) -> None:
    """More of them than there are readers, however long they take."""
    with serving() as client, held(monkeypatch) as (begun, go_on), ExitStack() as stack:
        waiting = [send_large(client, stack) for _ in range(service.WORKERS + 2)]
        assert begun.wait(PATIENCE)
        with client.stream(max_tokens=3):
            assert client.get("/health").status == 200
            assert client.complete(max_tokens=3).status == 200
        go_on.set()
        assert [read_answer(connection).status for connection in waiting] == [200] * len(waiting)


def test_bodies_being_parsed_count_against_the_queue(monkeypatch: Any) -> None:
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


def test_waiting_large_bodies_are_bounded_in_bytes(api: Api, monkeypatch: Any) -> None:
    monkeypatch.setattr(queue_slots, "MAX_WAITING_BYTES", 3 * MEBIBYTE)

    async def work() -> None:
        taken = [await api.models.queue_slots.reserve(MEBIBYTE) for _ in range(queue_slots.READERS)]
        waiting = [asyncio.ensure_future(api.models.queue_slots.reserve(MEBIBYTE)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await api.models.queue_slots.reserve(MEBIBYTE)
        (await api.models.queue_slots.reserve(LARGE_BODY)).close()  # small ones do not wait
        for place in taken:
            place.close()
        for one in waiting:
            (await one).close()

    api.run(work)
    assert api.front.num_requests == 0
    assert api.models.queue_slots.waiting_bytes == 0


@pytest.mark.parametrize("size", [10, 2 * LARGE_BODY])
def test_only_small_bodies_are_parsed_in_the_event_loop(api: Api, size: int, monkeypatch: Any) -> None:
    threads = []
    read_body = bodies.read_body

    def noted(raw: bytes, model: type[BaseModel]) -> BaseModel:
        threads.append(threading.current_thread())
        return read_body(raw, model)

    monkeypatch.setattr(bodies, "read_body", noted)
    assert api.post("/tokenize", {"prompt": "a" * size})["count"] == size + 1
    assert (threads == [threading.main_thread()]) == (size < LARGE_BODY)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/detokenize"])
def test_texts_are_tokenized_and_decoded_beside_the_event_loop(api: Api, path: str, monkeypatch: Any) -> None:
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


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hé", "n": 3, "echo": True, "logprobs": 2}),
        ("/v1/chat/completions", {**HELLO, "logprobs": True, "prompt_logprobs": 1}),
    ],
)
def test_large_answers_are_serialized_beside_the_event_loop_with_the_same_bytes(
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
