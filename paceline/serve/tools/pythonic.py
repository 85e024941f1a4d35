"""Arguments as Python's calls have them: f(city="Bern", exact=True). Values are JSON or Python's literals."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.serve.tools.arguments import Read, dumped, resolved
from paceline.serve.tools.rules import json_rule, literal, members_rule

_COMBINED = ("$ref", "allOf", "anyOf", "oneOf")
_LITERALS = {"boolean": ("True", "False"), "null": ("None",)}
_ANY_NAME = "/[A-Za-z_][A-Za-z0-9_.-]*/"
_SEPARATOR = re.compile(r"[\s,]*")
_TELLING = re.compile(r"""["'\\\[\](){},]""")


@dataclass(frozen=True)
class Pythonic:
    """Arguments of a call, without its parentheses."""

    def write(self, arguments: str) -> str:
        """The arguments of a JSON object."""
        return ", ".join(f"{name}={_written(value)}" for name, value in json.loads(arguments).items())

    def reader(self, texts: Collection[str]) -> PythonicReader:
        """A reader of one call's arguments; quotes say what is a text."""
        return PythonicReader()

    def rules(self, name: str, schema: Mapping[str, Any], special: Mapping[str, int]) -> list[str]:
        """The rule `name` for arguments in the order of the schema, with the rules it needs.

        A schema that lists no properties, or combines others, allows any arguments. Values are JSON, whose
        schemas are followed in full; only True, False and None that are arguments themselves are Python's.
        """
        properties, pair = schema.get("properties"), f"{name}_pair"
        any_pair = f'{pair}: {_ANY_NAME} "=" {name}_json'
        any_value = f"{name}_json: {_value_rule({}, schema)}"
        if not isinstance(properties, Mapping) or any(key in schema for key in _COMBINED):
            return [f'{name}: ({pair} (", " {pair})*)?', any_pair, any_value]
        required, rules = set(schema.get("required") or ()), list[str]()

        def add(body: str) -> str:
            rules.append(f"{name}_{len(rules)}: {body}")
            return f"{name}_{len(rules) - 1}"

        members = []
        for key, part in properties.items():
            value = add(_value_rule(part if isinstance(part, Mapping) else {}, schema))
            members.append((add(f"{literal(f'{key}=', special)} {value}"), key not in required))
        is_open = bool(schema.get("additionalProperties"))
        rule = members_rule(members, '", "', pair if is_open else "", add)
        return [f"{name}: {rule}", *rules, *((any_pair, any_value) if is_open else ())]


class PythonicReader:
    """Arguments of a call, as JSON: one is given once it is complete."""

    def __init__(self) -> None:
        self._count = 0  # of arguments so far

    def read(self, text: str) -> Read:
        """The complete arguments at the start of the text, and the end before the parenthesis."""
        found, size = "", 0
        while True:
            start = _start(text, size)
            if start == len(text):
                return Read(found, size, False)
            name, equals, value = text[start:].partition("=")
            if ")" in name:
                end = start if text[start] == ")" else size
                return Read(found + ("}" if self._count else "{}"), end, True)
            length = _length(value)
            if not equals or length is None:
                return Read(found, size, False)
            found += self._opening(name) + _as_json(value[:length])
            size = start + len(name) + 1 + length

    def rest(self, text: str) -> str:
        """The beginning of an argument that was cut off: its name, and what there is of its value."""
        name, equals, value = text[_start(text, 0) :].partition("=")
        if not equals:
            return ""
        return self._opening(name) + (dumped(value[1:])[:-1] if value.startswith("'") else value)

    def _opening(self, name: str) -> str:
        self._count += 1
        return ("{" if self._count == 1 else ", ") + dumped(name.strip()) + ": "


def _value_rule(part: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """The rule of an argument's value, which follows a part of the schema."""
    found = resolved(part, schema)
    kinds = found.get("type", [*_LITERALS] if not found else [])
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    is_listed = "enum" in found or "const" in found
    words = [] if is_listed else [json.dumps(word) for kind in kinds for word in _LITERALS.get(kind, ())]
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    if kinds != ["boolean"] or is_listed:
        words.append(json_rule({**shared, **part}))
    return " | ".join(words)


def _start(text: str, place: int) -> int:
    """Where the next argument starts."""
    separator = _SEPARATOR.match(text, place)
    return separator.end() if separator else place


def _length(text: str) -> int | None:
    """The length of the value at the start of the text; None: it is not complete."""
    depth, quote, place = 0, "", 0
    while match := _TELLING.search(text, place):
        place, character = match.end(), match.group()
        if character == "\\":
            place += 1
        elif quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif depth == 0 and character in ",)":
            return match.start()
        elif character != ",":
            depth += 1 if character in "[({" else -1
    return None


def _written(value: Any) -> str:
    """A JSON value as an argument: JSON, but for Python's names of true, false and null."""
    return str(value) if value is None or isinstance(value, bool) else dumped(value)


def _as_json(value: str) -> str:
    """The JSON of a value: JSON, one of Python's literals, or else a text."""
    value = value.strip()
    try:
        json.loads(value)
        return value
    except (ValueError, RecursionError):
        pass
    try:
        return json.dumps(ast.literal_eval(value))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return dumped(value)
