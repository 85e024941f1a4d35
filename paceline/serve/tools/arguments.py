"""Readers of a call's arguments: from the text of a format to JSON, piece by piece."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class Read(NamedTuple):
    """What a reader takes from the start of a text."""

    json: str  # the next piece of the arguments
    size: int  # characters that it has taken
    is_end: bool  # the arguments are complete


class ArgumentsReader(Protocol):
    """Reads the arguments of one call."""

    def read(self, text: str) -> Read:
        """What is certain of the text that follows what was taken before."""
        ...

    def rest(self, text: str) -> str:
        """The JSON, cut off too, of arguments that end within this text."""
        ...


class JsonReader:
    """Arguments that are a JSON object: finds its end."""

    _TELLING = re.compile(r'["\\{}\[\]]')

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False  # the next character is escaped

    def read(self, text: str) -> Read:
        """All of the text up to the object's end."""
        end = self._find(text)
        return Read(text[:end], len(text) if end is None else end, end is not None)

    def rest(self, text: str) -> str:
        """Nothing: every piece was taken."""
        return text

    def _find(self, piece: str) -> int | None:
        """The index after the object's last character, if that is in this piece."""
        place = 1 if self._escaped and piece else 0
        self._escaped = self._escaped and not piece
        while match := self._TELLING.search(piece, place):
            place = match.end()
            character = match.group()
            if character == '"':
                self._in_string = not self._in_string
            elif character == "\\":  # only inside strings
                self._escaped = place == len(piece)
                place += 1
            elif not self._in_string:
                self._depth += 1 if character in "{[" else -1
                if self._depth == 0:
                    return place
        return None


@dataclass(frozen=True)
class Pairs:
    """Arguments that are pairs of a name and a value, between marks.

    key_start name key_end value value_end key_start ...

    A value is a text as it is, or JSON: which one, the tool's schema says.
    """

    key_start: str
    key_end: str
    value_end: str

    def write(self, arguments: str) -> str:
        """The pairs of a JSON object."""
        values = json.loads(arguments)
        written = {
            name: value if isinstance(value, str) else _dumped(value) for name, value in values.items()
        }
        return "".join(
            f"{self.key_start}{name}{self.key_end}{value}{self.value_end}" for name, value in written.items()
        )


class PairReader:
    """Arguments that are pairs, as JSON: a pair is given once it is complete."""

    def __init__(self, pairs: Pairs, texts: Collection[str] = ()) -> None:
        """`texts`: the names of arguments whose values are texts; others are JSON where they can be."""
        self._pairs, self._texts = pairs, texts
        self._count = 0  # of pairs so far

    def read(self, text: str) -> Read:
        """The complete pairs at the start of the text, and the end if something else follows."""
        found, size = "", 0
        while text.startswith(self._pairs.key_start, size):
            name, _, after = text[size + len(self._pairs.key_start) :].partition(self._pairs.key_end)
            value, value_end, rest = after.partition(self._pairs.value_end)
            if not value_end:
                return Read(found, size, False)
            found += self._opening(name) + self._value(name, value)
            size = len(text) - len(rest)
        if self._pairs.key_start.startswith(text[size:]):
            return Read(found, size, False)
        return Read(found + ("}" if self._count else "{}"), size, True)

    def rest(self, text: str) -> str:
        """The beginning of a pair that was cut off: its name, and what there is of its value."""
        name, key_end, value = text.removeprefix(self._pairs.key_start).partition(self._pairs.key_end)
        if not text.startswith(self._pairs.key_start) or not key_end:
            return ""
        return self._opening(name) + (_dumped(value)[:-1] if name in self._texts else value)

    def _opening(self, name: str) -> str:
        self._count += 1
        return ("{" if self._count == 1 else ", ") + _dumped(name) + ": "

    def _value(self, name: str, value: str) -> str:
        if name in self._texts:
            return _dumped(value)
        try:
            json.loads(value)
        except (ValueError, RecursionError):
            return _dumped(value)
        return value


def text_parameters(schema: Mapping[str, Any]) -> frozenset[str]:
    """The names of a tool's parameters that can only be texts."""
    return frozenset(
        name for name, part in (schema.get("properties") or {}).items() if is_text(resolved(part, schema))
    )


def is_text(part: Mapping[str, Any]) -> bool:
    """Whether every value that a schema allows is a text."""
    values = part.get("enum", [part["const"]] if "const" in part else None)
    if values is not None:
        return all(isinstance(value, str) for value in values)
    return part.get("type") == "string"


def resolved(part: Any, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part of a schema, or what it refers to within the schema."""
    for _ in range(8):  # references of references; a circle ends
        if not isinstance(part, Mapping) or not str(part.get("$ref", "")).startswith("#/"):
            break
        found: Any = schema
        for key in str(part["$ref"])[2:].split("/"):
            found = found.get(key) if isinstance(found, Mapping) else None
        part = found
    return part if isinstance(part, Mapping) else {}


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
