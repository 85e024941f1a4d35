"""Readers of a call's arguments: from the text of a format to JSON, piece by piece."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
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


class Notation(Protocol):
    """A way of writing arguments that is not JSON."""

    def write(self, arguments: str) -> str:
        """The text of arguments, given as JSON."""
        ...

    def reader(self, texts: Collection[str]) -> ArgumentsReader:
        """A reader of one call's arguments. `texts`: the names of its string arguments."""
        ...

    def rules(self, name: str, schema: Mapping[str, Any], special: Mapping[str, int]) -> list[str]:
        """Grammar rules for arguments that follow a schema; the first one is called `name`."""
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


def dumped(value: object) -> str:
    """The value as JSON."""
    return json.dumps(value, ensure_ascii=False)


def overlap(text: str, opening: str) -> int:
    """The length of the longest suffix of `text` that is a prefix of `opening`."""
    for length in range(min(len(text), len(opening) - 1), 0, -1):
        if text.endswith(opening[:length]):
            return length
    return 0
