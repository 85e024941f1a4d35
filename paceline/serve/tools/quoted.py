"""Arguments as Gemma writes them: objects whose keys are bare, and texts between marks instead of quotes.

    city:<|"|>Bern<|"|>,days:[1,2],exact:true}

The brace that opens the arguments belongs to the name before them. Keys are sorted, as in the chat templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.serve.tools.arguments import Read, dumped, overlap, resolved
from paceline.serve.tools.rules import json_rule, literal, members_rule, text_rule

_BARE = {"type": ["number", "boolean", "null"]}
_BARE_TYPES = {"number", "integer", "boolean", "null"}
_END_OF_BARE = re.compile(r"[,}\]]")
_SPACE = " \t\r\n"


@dataclass(frozen=True)
class Quoted:
    """Arguments with bare keys and texts between two `mark`s."""

    mark: str

    def write(self, arguments: str) -> str:
        """The text of a JSON object, without the brace that opens it."""
        return self.value(json.loads(arguments))[1:]

    def value(self, value: Any) -> str:
        """The text of a JSON value."""
        if isinstance(value, str):
            return self.mark + value + self.mark
        if isinstance(value, list):
            return "[" + ",".join(map(self.value, value)) + "]"
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{self.value(value[key])}" for key in _sorted(value)) + "}"
        return dumped(value)

    def reader(self, texts: Collection[str]) -> QuotedReader:
        """A reader of one call's arguments; marks say what is a text."""
        return QuotedReader(self.mark)

    def rules(self, name: str, schema: Mapping[str, Any], special: Mapping[str, int]) -> list[str]:
        """The rule `name` for arguments that follow the schema, with the rules it needs.

        Of texts, only what `enum` and `const` say is followed.
        """
        rules = _Rules(self, name, schema, special)
        body = rules.members(schema)
        return [f"{name}: {body}", *rules.lines]


class QuotedReader:
    """Arguments between marks, as JSON: texts come piece by piece, bare values once they are complete."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._open = ["{"]  # objects and lists that are open
        self._next = self._read_key  # the reader of what follows
        self._prefix = "{"  # JSON that the next key or value begins with

    def read(self, text: str) -> Read:
        """What is certain of the text."""
        found, place = "", 0
        while self._open:
            json_text, size = self._next(text[place:])
            found, place = found + json_text, place + size
            if not size:
                return Read(found, place, False)
        return Read(found, place, True)

    def rest(self, text: str) -> str:
        """The JSON of a bare value that was cut off. What is left of a text is the beginning of its mark."""
        is_value = self._next == self._read_value and not self._mark.startswith(text)
        return self._prefix + text if is_value else ""

    # Each reader returns JSON and how many characters it has taken; none: more text is needed.

    def _read_key(self, text: str) -> tuple[str, int]:
        if text.startswith("}"):
            return self._close(text)
        key, colon, _ = text.partition(":")
        if not colon:
            return "", 0
        found = self._prefix + dumped(key.strip(_SPACE)) + ": "
        self._prefix, self._next = "", self._read_value
        return found, len(key) + 1

    def _read_value(self, text: str) -> tuple[str, int]:
        if text[:1] in tuple(_SPACE):
            return "", 1
        if text[:1] == "]" and self._open[-1] == "[":
            return self._close(text)
        if text.startswith(self._mark):
            found, self._prefix, self._next = self._prefix + '"', "", self._read_text
            return found, len(self._mark)
        if text[:1] in ("{", "["):
            found, self._prefix = self._prefix, text[0]
            self._open.append(text[0])
            self._next = self._read_key if text[0] == "{" else self._read_value
            return found, 1
        end = _END_OF_BARE.search(text)
        if not end or self._mark.startswith(text):
            return "", 0
        found, self._prefix, self._next = self._prefix + _bare(text[: end.start()]), "", self._read_after
        return found, end.start()

    def _read_text(self, text: str) -> tuple[str, int]:
        end = text.find(self._mark)
        if end < 0:
            size = len(text) - overlap(text, self._mark)
            return _escaped(text[:size]), size
        self._next = self._read_after
        return _escaped(text[:end]) + '"', end + len(self._mark)

    def _read_after(self, text: str) -> tuple[str, int]:
        """The comma before the next key or value, or the end; other characters are dropped."""
        if text[:1] == ",":
            self._prefix = ", "
            self._next = self._read_key if self._open[-1] == "{" else self._read_value
            return "", 1
        return self._close(text) if text[:1] in ("}", "]") else ("", len(text[:1]))

    def _close(self, text: str) -> tuple[str, int]:
        opened, self._next = self._open.pop(), self._read_after
        is_empty = self._prefix == opened
        self._prefix = ""
        return (opened if is_empty else "") + ("}" if opened == "{" else "]"), 1


class _Rules:
    """Grammar rules of one schema; the first rule refers to the others in `lines`."""

    def __init__(
        self, notation: Quoted, name: str, schema: Mapping[str, Any], special: Mapping[str, int]
    ) -> None:
        self._notation, self._name, self._schema, self._special = notation, name, schema, special
        self.lines: list[str] = []
        self._by_reference: dict[str, str] = {}  # rules of what $ref refers to: a schema may contain itself

    def members(self, schema: Mapping[str, Any]) -> str:
        """The rule of an object's members and its end. Without properties, any members are allowed."""
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return f'({self._any()}_pair ("," {self._any()}_pair)*)? "}}"'
        required = set(schema.get("required") or ())
        more = f"{self._any()}_pair" if schema.get("additionalProperties") else ""
        members = [
            (self._rule(f"{self._literal(key + ':')} {self.value(properties[key])}"), key not in required)
            for key in _sorted(properties)
        ]
        first = members_rule(members, '","', more, self._rule)
        return f'{first} "}}"'

    def value(self, part: Any) -> str:
        """The rule of a value that follows a part of the schema."""
        reference = part.get("$ref") if isinstance(part, Mapping) else None
        if isinstance(reference, str) and reference in self._by_reference:
            return self._by_reference[reference]
        if isinstance(reference, str):
            rule = self._by_reference[reference] = f"{self._name}_ref{len(self._by_reference)}"
            self.lines.append(f"{rule}: {self._alternatives(resolved(part, self._schema))}")
            return rule
        return self._rule(self._alternatives(part if isinstance(part, Mapping) else {}))

    def _alternatives(self, part: Mapping[str, Any]) -> str:
        values = part.get("enum", [part["const"]] if "const" in part else None)
        if values is not None:
            return " | ".join(self._literal(self._notation.value(value)) for value in values)
        choices = part.get("anyOf") or part.get("oneOf")
        if choices:
            return " | ".join(map(self.value, choices))
        kinds = part.get("type", ())
        kinds = [kinds] if isinstance(kinds, str) else list(kinds)
        if not kinds or "allOf" in part:
            return self._any()
        return " | ".join(self._of_kind(kind, part) for kind in kinds)

    def _of_kind(self, kind: str, part: Mapping[str, Any]) -> str:
        if kind == "string":
            return f"{self._literal(self._notation.mark)} {self._any()}_text"
        if kind == "array":
            item = self.value(part.get("items", {}))
            least, most = int(part.get("minItems", 0)), part.get("maxItems")
            more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else max(int(most) - 1, 0)}}}'
            listed = '""' if most == 0 else f"{item} {more}" if least else f"({item} {more})?"
            return f'"[" {listed} "]"'
        if kind == "object":
            return f'"{{" {self.members(part)}'
        return json_rule({**part, "type": kind}) if kind in _BARE_TYPES else self._any()

    def _any(self) -> str:
        """The rule of any value; `…_pair` and `…_text` are those of a member and of a text's rest."""
        rule = f"{self._name}_any"
        if not any(line.startswith(f"{rule}: ") for line in self.lines):
            mark = self._literal(self._notation.mark)
            self.lines += [
                f'{rule}: {mark} {rule}_text | {rule}_bare | "[" ({rule} ("," {rule})*)? "]" '
                f'| "{{" ({rule}_pair ("," {rule}_pair)*)? "}}"',
                f"{rule}_bare: {json_rule(_BARE)}",
                f'{rule}_pair: /[A-Za-z0-9_.-]+/ ":" {rule}',
                text_rule(f"{rule}_text", self._notation.mark, self._special),
            ]
        return rule

    def _rule(self, body: str) -> str:
        """The name of a new rule."""
        rule = f"{self._name}_{len(self.lines)}"
        self.lines.append(f"{rule}: {body}")
        return rule

    def _literal(self, text: str) -> str:
        return literal(text, self._special)


def _sorted(keys: Iterable[str]) -> list[str]:
    return sorted(keys, key=str.lower)


def _bare(text: str) -> str:
    """A bare value as JSON: a number, true, false or null; anything else is a text."""
    text = text.strip(_SPACE)
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return dumped(text)
    return text


def _escaped(text: str) -> str:
    return dumped(text)[1:-1]
