"""KV events: a subscriber on a real socket learns exactly what the prefix cache holds."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from paceline.engine.engine import Engine
from paceline.errors import ConfigError
from paceline.kv.cache import KVCache
from paceline.serve.kv_events import observe, publishing
from paceline.serve.kv_events.observer import KVEvents
from paceline.serve.kv_events.options import KVEventsOptions
from paceline.serve.options import ServeOptions
from tests.serve.running import PATIENCE, Client, serving, until
from tests.toy import ToyBackend, toy_engine

pytest.importorskip("zmq", reason="needs `pip install 'paceline[gateway]'`; make test installs it")
pytest.importorskip("msgpack", reason="needs `pip install 'paceline[gateway]'`; make test installs it")

import msgpack
import zmq

from paceline.serve.kv_events.publisher import END, Publisher

PAGE = 4
ANYWHERE = "tcp://127.0.0.1:*"
# the fields of vLLM's structs, in their order; the tag comes first
STORED = ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"]
FIELDS = {
    "BlockStored": [*STORED, "lora_name"],
    "BlockRemoved": ["type", "block_hashes", "medium"],
    "AllBlocksCleared": ["type"],
}
Chain = tuple[int, ...]  # the tokens of a block and of all before it


class Subscriber:
    """A gateway: it knows nothing but what arrives on its sockets."""

    def __init__(self, publisher: Publisher, topic: str = "") -> None:
        self._context = zmq.Context()
        self._events = self._connected(zmq.SUB, publisher.endpoint)
        self._events.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._replay = None
        if publisher.replay_endpoint is not None:
            self._replay = self._connected(zmq.DEALER, publisher.replay_endpoint)
        self.blocks: dict[int, Chain] = {}
        self.next_number = 0
        self.events: list[dict[str, Any]] = []

    def _connected(self, kind: int, endpoint: str) -> Any:
        made = self._context.socket(kind)
        made.setsockopt(zmq.RCVTIMEO, int(1000 * PATIENCE))
        made.setsockopt(zmq.LINGER, 0)
        made.connect(endpoint)
        return made

    def follow(self) -> None:
        """Read what has arrived; fill a gap by a replay."""
        while self._events.poll(0):
            self._take(*self._events.recv_multipart())

    def _take(self, topic: bytes, number: bytes, payload: bytes) -> None:
        count = int.from_bytes(number, "big")
        if count > self.next_number:
            for missed in self.replay(self.next_number):
                if int.from_bytes(missed[1], "big") == self.next_number < count:
                    self._take(*missed)
            assert self.next_number == count, "the replay has a gap"
        if count == self.next_number:  # else it was in a replay
            self.next_number += 1
            self._apply(payload)

    def replay(self, first: int) -> list[tuple[bytes, bytes, bytes]]:
        """The batches from a number on, as the publisher still has them."""
        assert self._replay is not None
        self._replay.send_multipart((b"", first.to_bytes(8, "big")))
        batches = []
        while True:
            empty, topic, number, payload = self._replay.recv_multipart()
            assert empty == b""
            if number == END:
                assert (topic, payload) == (b"", b"")
                return batches
            batches.append((topic, number, payload))

    def numbers(self, first: int) -> list[int]:
        """The sequence numbers of a replay."""
        return [int.from_bytes(number, "big") for _, number, _ in self.replay(first)]

    def ask(self, *frames: bytes) -> list[bytes]:
        """The first answer to a replay request with these frames."""
        assert self._replay is not None
        self._replay.send_multipart(frames)
        return list(self._replay.recv_multipart())

    def _apply(self, payload: bytes) -> None:
        time, events, rank = msgpack.unpackb(payload)
        assert isinstance(time, float)
        assert rank == 0
        for event in events:
            fields = event
            if isinstance(event, list):
                fields = dict(zip(FIELDS[event[0]], event, strict=True))
            assert list(fields) == FIELDS[fields["type"]]
            self.events.append(fields)
            getattr(self, fields["type"])(fields)

    def BlockStored(self, event: dict[str, Any]) -> None:
        size, chain = event["block_size"], ()
        if event["parent_block_hash"] is not None:
            chain = self.blocks[event["parent_block_hash"]]
        assert len(event["token_ids"]) == size * len(event["block_hashes"])
        for number, block_hash in enumerate(event["block_hashes"]):
            assert 0 <= block_hash < 1 << 64
            assert block_hash not in self.blocks
            chain = (*chain, *event["token_ids"][number * size : (number + 1) * size])
            self.blocks[block_hash] = chain

    def BlockRemoved(self, event: dict[str, Any]) -> None:
        for block_hash in event["block_hashes"]:
            del self.blocks[block_hash]

    def AllBlocksCleared(self, event: dict[str, Any]) -> None:
        self.blocks.clear()

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def gateway(engine: Engine, topic: str = "", **options: Any) -> Iterator[tuple[Client, Subscriber]]:
    """A client of a server, and a subscriber of its KV events that has heard the first one."""
    kv_events = KVEventsOptions(endpoint=ANYWHERE, replay_endpoint=ANYWHERE, topic=topic, **options)
    with publishing(kv_events) as publisher:
        subscriber = Subscriber(publisher, topic)
        try:
            with serving(engine, publisher=publisher) as client:
                yield client, subscriber
        finally:
            subscriber.close()


def say(client: Client, prompt: str, **fields: object) -> Chain:
    """The tokens of a prompt and its answer."""
    body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
    answer = client.post("/v1/completions", body)
    assert answer.status == 200, answer.body
    (choice,) = answer.json["choices"]
    return (*choice["prompt_token_ids"], *choice["token_ids"])


def cached(kv: KVCache, texts: list[Chain], salt: str = "") -> set[Chain]:
    """The blocks of these texts that the prefix cache has, by looking each of them up."""
    found = set()
    for text in texts:
        parent: int | str = salt
        for end in range(PAGE, len(text) + 1, PAGE):
            page = kv.pages.find(parent, text[end - PAGE : end])
            if page is None:
                break
            found.add(text[:end])
            serial = kv.pages.serial(page)
            assert serial is not None
            parent = serial
    return found


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_a_subscriber_knows_what_the_prefix_cache_holds(encoding: str) -> None:
    engine = toy_engine(ToyBackend(page_size=PAGE), num_pages=40)
    with gateway(engine, topic="kv@pod@toy", encoding=encoding) as (client, subscriber):
        texts = []
        for number in range(12):  # far more than 40 pages
            texts.append(say(client, f"shared prefix, then number {number}", max_tokens=20 + number))
            until(lambda: subscriber.follow() or subscriber.blocks.keys())
        held = cached(engine.kv, texts)
        until(lambda: subscriber.follow() or set(subscriber.blocks.values()) == held)
        assert len(subscriber.blocks) == engine.kv.pages.num_cached > 20
    kinds = [event["type"] for event in subscriber.events]
    assert kinds[0] == "AllBlocksCleared"
    assert {"BlockStored", "BlockRemoved"} <= set(kinds)
    assert any(len(event["block_hashes"]) > 1 for event in subscriber.events[1:])  # one event per prompt
    assert {event["medium"] for event in subscriber.events[1:]} == {"GPU"}


def test_a_gap_is_replayed() -> None:
    engine = toy_engine(ToyBackend(page_size=PAGE), num_pages=100)
    with gateway(engine) as (client, subscriber):
        texts = [say(client, "before", max_tokens=6)]
        until(lambda: subscriber.follow() or subscriber.blocks.keys())
        subscriber._events.setsockopt_string(zmq.UNSUBSCRIBE, "")
        texts.append(say(client, "missed by the gateway", max_tokens=8))
        newest = subscriber.next_number
        until(lambda: subscriber.numbers(0)[-1] > newest)
        subscriber._events.setsockopt_string(zmq.SUBSCRIBE, "")

        def heard() -> bool:  # until the new subscription has arrived, messages go past it
            texts.append(say(client, f"after {len(texts)}", max_tokens=1))
            return bool(subscriber._events.poll(10))

        until(heard)
        until(lambda: subscriber.follow() or set(subscriber.blocks.values()) == cached(engine.kv, texts))


def test_the_last_batches_can_be_replayed() -> None:
    with publishing(KVEventsOptions(ANYWHERE, ANYWHERE, buffer_steps=8)) as publisher:
        assert publisher is not None
        publisher.start()
        for _ in range(20):
            publisher.send([])
        subscriber = Subscriber(publisher)
        until(lambda: subscriber.numbers(0)[-1:] == [19])
        assert subscriber.numbers(0) == [*range(12, 20)]
        assert subscriber.numbers(17) == [17, 18, 19]
        assert subscriber.numbers(20) == []
        for wrong in ((b"", b"\0\0"), (b"x", bytes(8)), (b"",)):
            assert subscriber.ask(*wrong) == [b"", b"", END, b""]
        subscriber.close()


@pytest.mark.parametrize("publish", [False, True])
def test_salted_prompts_are_published_only_if_asked_for(publish: bool) -> None:
    engine = toy_engine(ToyBackend(page_size=PAGE), num_pages=200)
    with gateway(engine, publish_salted=publish) as (client, subscriber):
        texts = [say(client, "a public prompt", max_tokens=6)]
        until(lambda: subscriber.follow() or subscriber.blocks.keys())
        secret = say(client, "a secret prompt", max_tokens=6, cache_salt="tenant")
        shared = say(client, "a public prompt", max_tokens=6, cache_salt="tenant")
        texts.append(say(client, "the last prompt", max_tokens=6))
        public = cached(engine.kv, texts)
        salted = cached(engine.kv, [secret, shared], "tenant")
        assert len(salted) > 4
        expected = sorted([*public, *salted] if publish else public)
        until(lambda: subscriber.follow() or sorted(subscriber.blocks.values()) == expected)
    assert not any("tenant" in str(event) for event in subscriber.events)


def test_equal_blocks_of_two_replicas_have_equal_hashes_and_a_salt_changes_them() -> None:
    def hashes(salt: str, *, later: bool = False) -> list[int]:
        sent: list[Any] = []
        events = KVEvents(sent.append, PAGE, publish_salted=True)
        if later:  # the serial numbers differ
            events.stored(3, "", (9, 9, 9, 9))
        events.stored(7, salt, (1, 2, 3, 4))
        events.stored(8, 7, (5, 6, 7, 8))
        events.step(None, [])  # type: ignore[arg-type]
        return [number for event in sent[-1] for number in event["block_hashes"]][-2:]

    assert hashes("") == hashes("", later=True)
    assert not set(hashes("")) & set(hashes("tenant"))


def test_a_block_that_is_indexed_twice_is_removed_once() -> None:
    sent: list[Any] = []
    events = KVEvents(sent.extend, PAGE, publish_salted=False)
    for parent, child in ((1, 2), (3, 4)):
        events.stored(parent, "", (1, 2, 3, 4))
        events.stored(child, parent, (5, 6, 7, 8))
        if parent == 1:
            events.removed(1)  # its step failed; the child stays, out of reach
    events.removed(2)
    events.aborted([])
    assert [event["type"] for event in sent] == [
        *("AllBlocksCleared", "BlockStored", "BlockRemoved", "BlockStored")
    ]
    events.removed(4)
    events.aborted([])
    assert sent[-1]["block_hashes"] == sent[1]["block_hashes"][1:]


def test_a_cache_without_a_subscriber_or_with_a_full_queue_never_waits() -> None:
    kv = KVCache(8, PAGE, max_sequences=2, max_length=32)
    options = KVEventsOptions(endpoint=ANYWHERE, replay_endpoint=ANYWHERE, max_queue_size=1)
    with publishing(options) as publisher:
        assert publisher is not None
        events = KVEvents(publisher.send, PAGE, publish_salted=False)  # nothing leaves: no thread yet
        for serial in range(100):
            events.stored(serial, "", (serial,) * PAGE)
            events.aborted([])
        assert publisher.dropped > 90
        observe(kv, publisher)
        subscriber = Subscriber(publisher)
        until(lambda: subscriber.numbers(0))
        numbers = subscriber.numbers(0)
        subscriber.close()
    assert numbers == sorted(set(numbers))


def test_vllms_json_and_the_flags_say_the_same() -> None:
    json_form = json.dumps(
        {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv@a@b"}
    )
    assert ServeOptions(kv_events_config=json_form).kv_events == KVEventsOptions(topic="kv@a@b")
    flags = ServeOptions(kv_events_endpoint="tcp://*:5557", kv_events_topic="kv@a@b")
    assert flags.kv_events == KVEventsOptions(topic="kv@a@b")
    assert ServeOptions().kv_events is None
    for off in ('{"enable_kv_cache_events": false}', '{"publisher": "null"}'):
        assert ServeOptions(kv_events_config=off).kv_events is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_events_config": "{"}, "is not JSON"),
        ({"kv_events_config": "[]"}, "must be a JSON object"),
        ({"kv_events_config": '{"topics": "a"}'}, "did you mean 'topic'"),
        ({"kv_events_config": '{"publisher": "kafka"}'}, "one of zmq, null"),
        ({"kv_events_config": '{"encoding": "xml"}'}, "one of map, array"),
        ({"kv_events_config": '{"buffer_steps": 0}'}, "buffer_steps must be an integer from 1"),
        ({"kv_events_config": '{"topic": "a"}', "kv_events_topic": "b"}, "give it once"),
        ({"kv_events_endpoint": "5557"}, "such as tcp://"),
        ({"kv_events_endpoint": "inproc://here"}, "such as tcp://"),
        ({"kv_events_replay_endpoint": "tcp://gateway:5558"}, "must be an address to bind"),
        ({"kv_events_endpoint": "tcp://*:5557", "api_key": ("k", "l")}, "--share-cache-across-keys"),
        ({"metrics_prefix": "sglang"}, "one of paceline, vllm"),
    ],
)
def test_wrong_options_are_refused_with_the_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServeOptions(**options)


def test_an_address_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        # a wildcard in the address, so that it is bound
        options = KVEventsOptions(endpoint=f"tcp://0.0.0.0:{taken.getsockname()[1]}")
        with pytest.raises(ConfigError, match="Use another address"), publishing(options):
            pass
