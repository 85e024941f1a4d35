"""The publisher of KV events: ZeroMQ sockets and msgpack, frame by frame as vLLM sends them.

    PUB      topic | sequence number, 8 bytes, big-endian | msgpack of [time, events, data-parallel rank]
    ROUTER   a request: empty | first sequence number wanted
             the answer, one message per batch: empty | topic | sequence number | msgpack
             and at its end: empty | empty | -1 | empty

The engine's thread encodes a batch and leaves it in a queue, which never blocks it. A thread of our own sends
batches and answers replay requests. A subscriber that sees a gap in the numbers asks for a replay.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from contextlib import suppress

import msgpack
import zmq

from paceline.errors import ConfigError
from paceline.serve.kv_events.observer import Event
from paceline.serve.kv_events.options import KVEventsOptions, binds

logger = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)  # the sequence number that ends a replay
RANK = 0  # of data parallelism: each replica is a server of its own
CLOSE_MS = 5000  # for the thread to send what waits
LINGER_MS = 500  # for the last batches to leave when the server stops
QUEUE = "inproc://batches"


class Publisher:
    """Sockets of KV events. Make it (this binds), `start` it, `send` from the engine's thread, `close` it."""

    def __init__(self, options: KVEventsOptions) -> None:
        self.options = options
        self._topic = options.topic.encode()
        self._recent: deque[tuple[int, bytes]] = deque(maxlen=options.buffer_steps)
        self._next_number = 0
        self.dropped = 0  # batches
        self._thread: threading.Thread | None = None
        self._context = zmq.Context()
        try:
            self._pub = self._socket(zmq.PUB, options.hwm, options.endpoint)
            self._replay = None
            if options.replay_endpoint is not None:
                # Room for a whole replay, and as much again: ZeroMQ learns what a client has read only after
                # half of the limit.
                limit = 2 * (options.buffer_steps + 1)
                self._replay = self._socket(zmq.ROUTER, limit, options.replay_endpoint)
            self._outbox = self._socket(zmq.PULL, options.max_queue_size, QUEUE)
            self._queue = self._context.socket(zmq.PUSH)
            self._queue.set_hwm(options.max_queue_size)
            self._queue.connect(QUEUE)
        except ConfigError:
            self._context.destroy(linger=0)
            raise

    @property
    def endpoint(self) -> str:
        """The address of the events, with the port that was chosen for `*`."""
        return str(self._pub.getsockopt_string(zmq.LAST_ENDPOINT))

    @property
    def replay_endpoint(self) -> str | None:
        """The address of the replay, if there is one."""
        return None if self._replay is None else self._replay.getsockopt_string(zmq.LAST_ENDPOINT)

    def start(self) -> None:
        """Begin to send. From here on the sockets belong to the publisher's thread."""
        self._thread = threading.Thread(target=self._run, name="paceline-kv-events", daemon=True)
        self._thread.start()

    def send(self, events: list[Event]) -> None:
        """Publish a batch, without waiting. It is dropped if too many wait: a gap in the numbers."""
        number = self._next_number
        self._next_number += 1
        forms = [[*event.values()] for event in events] if self.options.encoding == "array" else events
        payload = msgpack.packb([time.time(), forms, RANK])
        try:
            self._queue.send_multipart((number.to_bytes(8, "big"), payload), zmq.NOBLOCK)
        except zmq.Again:
            if self.dropped == 0:
                logger.warning("KV events are dropped: max_queue_size is %d", self.options.max_queue_size)
            self.dropped += 1

    def close(self) -> None:
        """Send what waits, and close. Nothing may be sent any more."""
        if self._thread is not None:
            self._queue.setsockopt(zmq.SNDTIMEO, CLOSE_MS)
            with suppress(zmq.Again):  # it may wait for room, which the thread makes
                self._queue.send_multipart((END, b""))
            self._thread.join(CLOSE_MS / 1000)
        self._context.destroy(linger=LINGER_MS)

    def _socket(self, kind: int, limit: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(limit)
        try:
            if endpoint == QUEUE or binds(endpoint):
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"cannot publish KV events at {endpoint}: {error}. Use another address, or stop what uses it."
            ) from error
        return socket

    # --- the publisher's thread ---

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._outbox, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._outbox in ready:
                number, payload = self._outbox.recv_multipart()
                if number == END:
                    return
                self._recent.append((int.from_bytes(number, "big"), payload))
                self._pub.send_multipart((self._topic, number, payload))
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Send the recent batches from the number that a subscriber asks for."""
        client, *frames = replay.recv_multipart()
        if len(frames) != 2 or frames[0] or len(frames[1]) != 8:
            logger.warning("a replay request of KV events is not an empty frame and 8 bytes")
            replay.send_multipart((client, b"", b"", END, b""))
            return
        first = int.from_bytes(frames[1], "big")
        for number, payload in self._recent:
            if number >= first:
                replay.send_multipart((client, b"", self._topic, number.to_bytes(8, "big"), payload))
        replay.send_multipart((client, b"", b"", END, b""))
