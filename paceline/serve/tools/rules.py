"""Parts of grammars in llguidance's variant of Lark: literals, JSON, and arguments that are pairs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.serve.tools.arguments import Pairs, is_text, resolved

NOTHING = '""'  # a rule for the empty text
_COMBINED = ("$ref", "allOf", "anyOf", "oneOf")


def json_rule(schema: Mapping[str, Any]) -> str:
    """JSON that follows a schema."""
    return "%json " + json.dumps(schema)


def literal(text: str, special: Mapping[str, int]) -> str:
    """A literal in a rule; special tokens in it by id."""
    if not text:
        return ""
    if not special:
        return json.dumps(text)
    parts = re.split(f"({'|'.join(map(re.escape, special))})", text)
    return " ".join(f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part)


def escaped(text: str) -> str:
    """The text escaped for a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def pair_rules(pairs: Pairs, name: str, schema: Mapping[str, Any], special: Mapping[str, int]) -> list[str]:
    """The rule `name` for arguments that are pairs, in the order of the schema, with the rules it needs.

    Of texts, only what `enum` and `const` say is followed. A schema that lists no properties, or combines
    others, allows any pairs.
    """
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or any(key in schema for key in _COMBINED):
        return [f"{name}: {name}_pair*", *_any_pairs(pairs, name, special)]
    parts, rules, required = [], list[str](), set(schema.get("required") or ())
    for number, (key, part) in enumerate(properties.items()):
        rule = f"{name}_{number}"
        parts.append(rule if key in required else f"{rule}?")
        head = literal(pairs.key_start + key + pairs.key_end, special)
        rules += _value_rules(pairs, rule, head, part, schema, special)
    if schema.get("additionalProperties"):
        parts.append(f"{name}_pair*")
        rules += _any_pairs(pairs, name, special)
    return [f"{name}: {' '.join(parts) or NOTHING}", *rules]


def _value_rules(
    pairs: Pairs, rule: str, head: str, part: Any, schema: Mapping[str, Any], special: Mapping[str, int]
) -> Iterator[str]:
    found, end = resolved(part, schema), literal(pairs.value_end, special)
    if not is_text(found):
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        yield f"{rule}: {head} {json_rule({**shared, **part} if isinstance(part, Mapping) else {})} {end}"
        return
    values = found.get("enum", [found["const"]] if "const" in found else None)
    if values is not None:
        yield f"{rule}: {head} ({' | '.join(json.dumps(value) for value in values)}) {end}"
        return
    yield f"{rule}: {head} {rule}_text"
    yield _any_text(pairs, f"{rule}_text", special)


def _any_text(pairs: Pairs, rule: str, special: Mapping[str, int]) -> str:
    """A value that is any text, with the mark after it, which ends it where it first occurs."""
    if any(token in pairs.value_end for token in special):
        return f"{rule}: /(?s:.+)/? {literal(pairs.value_end, special)}"
    return f"{rule}[lazy]: /(?s:.*){escaped(pairs.value_end)}/"


def _any_pairs(pairs: Pairs, name: str, special: Mapping[str, int]) -> Iterator[str]:
    start, end = literal(pairs.key_start, special), literal(pairs.key_end, special)
    yield f"{name}_pair: {start} /[A-Za-z0-9_.-]+/ {end} {name}_text"
    yield _any_text(pairs, f"{name}_text", special)
