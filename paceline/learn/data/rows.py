"""TrafficRow: one finished request as it is kept, and its bytes."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.core.truncation import KEEPS_ALL, Truncation

MARKER = b"ROW\x01"
HEADER = struct.Struct("<4sII")  # marker, bytes of the payload, CRC-32 of the payload
ID = np.dtype("<i4")
_encode = json.JSONEncoder(separators=(",", ":")).encode  # made once: json.dumps would make one for each row


@dataclass(frozen=True)
class RowSampling:
    """How an answer was sampled."""

    temperature: float = 1.0
    truncation: Truncation = KEEPS_ALL
    constrained: bool = False  # by a schema, a grammar or a list of tokens

    def facts(self) -> dict[str, float | bool]:
        """Every option by its name, as a row keeps them."""
        return {
            "temperature": self.temperature,
            **self.truncation._asdict(),
            "constrained": self.constrained,
        }

    @staticmethod
    def of_facts(facts: dict[str, Any]) -> RowSampling:
        """The record of these facts; an option that the row does not have kept everything."""
        kept = {name: facts.pop(name) for name in Truncation._fields if name in facts}
        return RowSampling(truncation=Truncation(**kept), **facts)


@dataclass(frozen=True)
class TrafficRow:
    """A prompt and one answer to it. Token ids only: no text, no features."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    segment: str = ""
    sampling: RowSampling = RowSampling()
    salt: str = ""  # hash of the salt that separates this traffic from others; empty: none
    key: str = ""  # hash of the API key; empty: none
    time: float = 0.0  # when it finished, in seconds since 1970

    def encode(self) -> bytes:
        """The row as one record: header, facts as a line of JSON, token ids as int32."""
        facts = {
            "prompt": len(self.prompt_ids),
            "segment": self.segment,
            "sampling": self.sampling.facts(),
            "salt": self.salt,
            "key": self.key,
            "time": self.time,
        }
        ids = self.prompt_ids + self.output_ids
        payload = b"%b\n%b" % (_encode(facts).encode(), struct.pack(f"<{len(ids)}i", *ids))
        return HEADER.pack(MARKER, len(payload), zlib.crc32(payload)) + payload


@dataclass
class Damage:
    """What a reader had to skip."""

    damaged: int = 0  # byte ranges without an intact record
    cut_off: int = 0  # last records that are not complete: being written, or their writer was killed


def decode_rows(data: bytes, vocab_size: int, damage: Damage) -> Iterator[TrafficRow]:
    """The rows of a segment file; what is skipped is added to `damage`.

    After damage, reading continues at the next marker that begins an intact record.
    """
    position: int | None = 0
    while position is not None and position < len(data):
        payload = _payload(data, position)
        if payload is None:
            position = _next_intact(data, position + 1)
            damage.damaged += position is not None
            damage.cut_off += position is None
            continue
        position += HEADER.size + len(payload)
        row = _row(payload, vocab_size)
        if row is None:
            damage.damaged += 1
        else:
            yield row


def _payload(data: bytes, position: int) -> bytes | None:
    """The payload of the record at this position; None if there is no intact one."""
    if len(data) - position < HEADER.size:
        return None
    marker, length, checksum = HEADER.unpack_from(data, position)
    start = position + HEADER.size
    payload = data[start : start + length]
    intact = marker == MARKER and len(payload) == length and zlib.crc32(payload) == checksum
    return payload if intact else None


def _next_intact(data: bytes, position: int) -> int | None:
    """The position of the next intact record."""
    while (position := data.find(MARKER, position)) >= 0:
        if _payload(data, position) is not None:
            return position
        position += 1
    return None


def _row(payload: bytes, vocab_size: int) -> TrafficRow | None:
    """The row of an intact payload; None if it is none, as another version may have written it."""
    try:
        line, _, rest = payload.partition(b"\n")
        facts = json.loads(line)
        ids = np.frombuffer(rest, dtype=ID)
        prompt = int(facts.pop("prompt"))
        sampling = RowSampling.of_facts(facts.pop("sampling"))
        if ids.min(initial=0) < 0 or ids.max(initial=0) >= vocab_size or not 0 <= prompt <= len(ids):
            return None
        tokens = ids.tolist()
        return TrafficRow(tuple(tokens[:prompt]), tuple(tokens[prompt:]), sampling=sampling, **facts)
    except (ValueError, KeyError, TypeError):
        return None
