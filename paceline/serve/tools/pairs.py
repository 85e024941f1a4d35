"""Arguments that are pairs of a name and a value between marks, as Qwen3-Coder and GLM write them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.serve.tools.arguments import Read, dumped, is_text, resolved
from paceline.serve.tools.rules import NOTHING, json_rule, literal, text_rule

_COMBINED = ("$ref", "allOf", "anyOf", "oneOf")


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
        written = {name: value if isinstance(value, str) else dumped(value) for name, value in values.items()}
        return "".join(
            f"{self.key_start}{name}{self.key_end}{value}{self.value_end}" for name, value in written.items()
        )

    def reader(self, texts: Collection[str]) -> PairReader:
        """A reader of one call's arguments."""
        return PairReader(self, texts)

    def rules(self, name: str, schema: Mapping[str, Any], special: Mapping[str, int]) -> list[str]:
        """The rule `name` for pairs in the order of the schema, with the rules it needs.

        Of texts, only what `enum` and `const` say is followed. A schema that lists no properties, or combines
        others, allows any pairs.
        """
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or any(key in schema for key in _COMBINED):
            return [f"{name}: {name}_pair*", *self._any_pairs(name, special)]
        parts, rules, required = [], list[str](), set(schema.get("required") or ())
        for number, (key, part) in enumerate(properties.items()):
            rule = f"{name}_{number}"
            parts.append(rule if key in required else f"{rule}?")
            head = literal(self.key_start + key + self.key_end, special)
            rules += self._value_rules(rule, head, part, schema, special)
        if schema.get("additionalProperties"):
            parts.append(f"{name}_pair*")
            rules += self._any_pairs(name, special)
        return [f"{name}: {' '.join(parts) or NOTHING}", *rules]

    def _value_rules(
        self, rule: str, head: str, part: Any, schema: Mapping[str, Any], special: Mapping[str, int]
    ) -> Iterator[str]:
        found, end = resolved(part, schema), literal(self.value_end, special)
        if not is_text(found):
            shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
            yield f"{rule}: {head} {json_rule({**shared, **part} if isinstance(part, Mapping) else {})} {end}"
            return
        values = found.get("enum", [found["const"]] if "const" in found else None)
        if values is not None:
            yield f"{rule}: {head} ({' | '.join(json.dumps(value) for value in values)}) {end}"
            return
        yield f"{rule}: {head} {rule}_text"
        yield text_rule(f"{rule}_text", self.value_end, special)

    def _any_pairs(self, name: str, special: Mapping[str, int]) -> Iterator[str]:
        start, end = literal(self.key_start, special), literal(self.key_end, special)
        yield f"{name}_pair: {start} /[A-Za-z0-9_.-]+/ {end} {name}_text"
        yield text_rule(f"{name}_text", self.value_end, special)


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
        return self._opening(name) + (dumped(value)[:-1] if name in self._texts else value)

    def _opening(self, name: str) -> str:
        self._count += 1
        return ("{" if self._count == 1 else ", ") + dumped(name) + ": "

    def _value(self, name: str, value: str) -> str:
        if name in self._texts:
            return dumped(value)
        try:
            json.loads(value)
        except (ValueError, RecursionError):
            return dumped(value)
        return value
