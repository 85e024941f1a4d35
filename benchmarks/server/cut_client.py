"""Clients that leave at exact points, and the times of what they got before."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from paceline.bench.servers.client import Answer, Recorder, Server, exchange


@dataclass(frozen=True)
class Cut:
    """Where a client disconnects: in the middle of its request, or after `reads` reads of the answer."""

    reads: int  # -1: after half of the request
    reset: bool  # with a TCP reset, as after a crash, instead of a close


class CutRecorder(Recorder):
    """Disconnects where `cut` says."""

    def __init__(self, cut: Cut, request: bytes) -> None:
        super().__init__(request[: len(request) // 2] if cut.reads < 0 else request)
        self._cut = cut

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._transport = transport
        if self._cut.reads <= 0:
            self._leave()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if len(self.reads) == self._cut.reads:
            self._leave()

    def _leave(self) -> None:
        if self._cut.reset:
            connection: socket.socket = self._transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.close()


async def post_cut(server: Server, path: str, body: Mapping[str, Any], cut: Cut | None) -> Answer:
    """The answer to a POST, or what arrived of it before the connection was cut."""
    request = server.request("POST", path, json.dumps(body).encode())
    return await exchange(server, request, Recorder if cut is None else partial(CutRecorder, cut))


def first_byte_seconds(answer: Answer) -> float | None:
    """From sending to the first piece of the body; a chat's first chunk has the role and no text."""
    return answer.pieces[0][0] - answer.sent if answer.pieces else None


def first_text_seconds(answer: Answer) -> float | None:
    """From sending to the first text."""
    return answer.texts[0][0] - answer.sent if answer.texts else None


def gaps(answer: Answer) -> list[float]:
    """Seconds between successive pieces of text."""
    times = [when for when, _ in answer.texts]
    return [after - before for before, after in pairwise(times)]
