"""Grammar and regex bombs: refused by a limit that is named, or harmless. None hangs or ends the process."""

from __future__ import annotations

import re

import pytest

from paceline.constrain import StructuredOutputsParams
from paceline.constrain.limits import GrammarLimits
from paceline.errors import GrammarError, RequestError
from tests.constrain.walks import COMPILER, random_text

LIMITS = GrammarLimits()


def nested(levels: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def chain_of_references(length: int) -> dict[str, object]:
    parts = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(length)
    }
    return {"$defs": {**parts, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def chain_of_rules(length: int) -> str:
    rules = [f'r{i}: "x" r{i + 1} | "y"' for i in range(length)]
    return "\n".join(["start: r0", *rules, f'r{length}: "z"'])


def multiples(*numbers: float) -> dict[str, object]:
    return {"allOf": [{"type": "number", "multipleOf": number} for number in numbers]}


REFUSED = {
    "deep schema": ({"json": nested(LIMITS.schema_depth)}, "nested more than 64 levels"),
    "very deep schema": ({"json": nested(100_000)}, "nested more than 64 levels"),
    "deep text": ({"json": '{"items":' * 10_000 + "{}" + "}" * 10_000}, "nested more than 64 levels"),
    "10 MB schema": ({"json": {"description": "x" * 10_000_000}}, "more than 131072 bytes"),
    "10 MB of text": ({"json": '{"description": "' + "x" * 10_000_000 + '"}'}, "at most .* bytes"),
    "huge enum": ({"json": {"enum": list(range(100_000))}}, "more than 20000 values"),
    "references": ({"json": chain_of_references(LIMITS.references + 1)}, "refers to 502 definitions"),
    "prime divisor": ({"json": multiples(1_000_003)}, "least common multiple"),
    "two divisors": ({"json": multiples(9973, 9967)}, "least common multiple"),
    "small divisors": ({"json": multiples(0.00001, 7)}, "least common multiple"),
    "tiny divisor": ({"json": multiples(1e-300, 3)}, "least common multiple"),
    "long regex": ({"regex": "(a|b)" * 50_000}, "at most 8192 bytes"),
    "nested regex": ({"regex": "(" * 4000 + "a" + ")" * 4000}, "cannot be compiled"),
    "many choices": ({"choice": [f"choice {i}" for i in range(20_000)]}, "at most 1000 are compiled"),
    "rules": ({"grammar": chain_of_rules(4000)}, "4002 rules, and at most 500"),
    "rules of GBNF": (
        {"grammar": "root ::= a0\n" + "\n".join(f"a{i} ::= a{i + 1}" for i in range(4000))},
        "4001 rules",
    ),
    # these two would be read for minutes by a regular expression that goes back
    "one long word": ({"grammar": "a" * 130_000}, "at most 32768 bytes"),
    "empty lines": ({"grammar": "\n" * 130_000}, "at most 32768 bytes"),
    "nested grammar": ({"grammar": "start: " + "(" * 3000 + '"a"' + ")" * 3000}, "nested"),
    "schema in a grammar": (
        {"grammar": f"start: %json {{'items': {nested(70)}}}".replace("'", '"')},
        "64 levels",
    ),
    "doubling terminals": (
        {"grammar": "\n".join(["start: A0", *(f"A{i}: A{i + 1} A{i + 1}" for i in range(30)), 'A30: "x"'])},
        "too big",
    ),
    "product of schemas": (
        {
            "json": {
                "$defs": {
                    **{
                        f"d{i}": {
                            "allOf": [
                                {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"properties": {f"{p}{i}": {}}}]}
                                for p in "ab"
                            ]
                        }
                        for i in range(8)
                    },
                    "d8": {"type": "object"},
                },
                "$ref": "#/$defs/d0",
            }
        },
        "too large",
    ),
}
HARMLESS = {
    "catastrophic regex": {"regex": "(a+)+b"},
    "nested stars": {"regex": "((a*)*)*b"},
    "repeats of repeats": {"regex": "((a{0,100}){0,100}){0,100}"},
    "a large automaton": {"regex": "(a|b)*a(a|b){20}"},
    "left recursion": {"grammar": 'start: start "a" | "a"'},
    "hidden left recursion": {"grammar": 'start: b start "a" | "a"\nb: "x" |'},
    "ambiguity": {"grammar": 'start: a\na: a a a | "x" |'},
    "a cycle of references": {
        "json": {
            "$defs": {
                "a": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]},
                "b": {"$ref": "#/$defs/a"},
            },
            "$ref": "#/$defs/a",
        }
    },
    "a tree without end": {
        "json": {"type": "object", "properties": {"child": {"$ref": "#"}}, "required": ["child"]}
    },
    "huge maxLength": {"json": {"type": "string", "maxLength": 10**9}},
    "huge minItems": {"json": {"type": "array", "items": {"type": "null"}, "minItems": 10**9}},
    "huge repeat": {"grammar": 'start: a{1,10000}\na: b{1,10000}\nb: "x"{1,10000}'},
    "as many references as allowed": {"json": chain_of_references(LIMITS.references - 1)},
    "as many rules as allowed": {"grammar": chain_of_rules(LIMITS.rules - 2)},
    "as deep as allowed": {"json": nested(LIMITS.schema_depth - 2)},
    "as many choices as allowed": {"choice": [f"choice {i}" for i in range(LIMITS.choices)]},
    "doubling rules": {
        "grammar": "\n".join(["start: a0", *(f"a{i}: a{i + 1} a{i + 1}" for i in range(40)), 'a40: "x"'])
    },
    "many properties": {
        "json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_bombs_are_refused_by_a_limit_that_is_named(name):
    params, message = REFUSED[name]
    with pytest.raises(RequestError, match=message):
        COMPILER.compile(StructuredOutputsParams(**params))


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_compiled_can_be_followed_or_ends_its_own_text_only(name):
    try:
        constraint = COMPILER.compile(StructuredOutputsParams(**HARMLESS[name])).start()
        random_text(constraint, 0, most=20)
    except (RequestError, GrammarError) as error:
        reason = str(error)
    else:
        reason = "fine"
    assert re.search("fine|compiled|allows no text|Use a simpler schema", reason)
