"""Limits of what is compiled. A request can send any grammar, and some small texts are bombs.

Checked here is what the library would not survive: chains of rules or references that it follows by recursion
(a stack overflow kills the process), and remainders of large divisors, which it enumerates. The rest is
bounded by the library's own fuel, see GrammarLimits.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from paceline.errors import RequestError

# possessive quantifiers: otherwise one long word, or many empty lines, would take hours
RULE_HEAD = re.compile(r"^[ \t]*+[?!]?[\w-]++[^\n:\"/]*+:", re.MULTILINE)  # Lark or GBNF
LARK = re.compile(r"^[^\S\n]*+(%llguidance\b|start\s*+:)", re.MULTILINE)  # never in GBNF
EMBEDDED = re.compile(r"%json\s*")


@dataclass(frozen=True)
class GrammarLimits:
    """The maximal size and cost of one request's grammar."""

    source_bytes: int = 128 * 1024
    schema_depth: int = 64  # nested objects and lists
    schema_values: int = 20_000
    references: int = 500  # distinct targets of $ref
    rules: int = 500  # of a grammar
    gbnf_bytes: int = 32 * 1024  # lower, because GBNF is converted to Lark in Python
    regex_length: int = 8192
    choices: int = 1000
    multiple: int = 10_000  # least common multiple of all multipleOf of a schema
    seconds: float = 3.0  # of compilation
    # LLParserLimits of llguidance
    initial_lexer_fuel: int = 500_000
    step_lexer_fuel: int = 100_000
    step_max_items: int = 50_000
    max_items_in_row: int = 2000
    max_lexer_states: int = 25_000  # 1 to 2 kB each, shared by all requests of one grammar
    max_grammar_size: int = 200_000


def check_size(name: str, text: str, max_bytes: int) -> None:
    """RequestError if a text has more than `max_bytes` bytes."""
    if len(text) > max_bytes or len(text.encode("utf-8", "surrogatepass")) > max_bytes:
        raise RequestError(
            f"{name} has {len(text)} characters, and at most {max_bytes} bytes are compiled. Shorten it."
        )


def checked_schema(given: str | Mapping[str, Any], limits: GrammarLimits) -> dict[str, Any]:
    """The schema as an object that is safe to compile. RequestError if it is not."""
    schema: Any = given
    if isinstance(given, str):
        check_size("the JSON schema", given, limits.source_bytes)
        try:
            schema = json.loads(given)
        except RecursionError:
            raise _too_deep(limits) from None
        except ValueError as error:
            raise RequestError(f"the JSON schema is not JSON: {error}.") from None
    if not isinstance(schema, Mapping):
        raise RequestError(f"a JSON schema must be an object, got {schema!r:.80}.")
    if "x-guidance" in schema:
        raise RequestError("x-guidance is not supported in a JSON schema. Use whitespace_pattern instead.")
    _check_values(schema, limits)
    return dict(schema)


def _check_values(schema: Mapping[str, Any], limits: GrammarLimits) -> None:
    """RequestError if the schema is too deep, too large or a bomb. Not recursive: it may be very deep."""
    waiting: list[tuple[Any, int]] = [(schema, 1)]
    references: set[str] = set()
    multiples: list[Decimal] = []
    count = characters = 0
    while waiting:
        value, depth = waiting.pop()
        count += 1
        if depth > limits.schema_depth:
            raise _too_deep(limits)
        if count > limits.schema_values:
            raise RequestError(
                f"the JSON schema has more than {limits.schema_values} values. Make it smaller."
            )
        if isinstance(value, str):
            characters += len(value)
        elif isinstance(value, Mapping):
            waiting += [(item, depth + 1) for item in value.values()]
            characters += sum(len(str(key)) for key in value)
            if isinstance(value.get("$ref"), str):
                references.add(value["$ref"])
            if isinstance(value.get("multipleOf"), int | float):
                multiples.append(_decimal(value["multipleOf"]))
        elif isinstance(value, list | tuple):
            waiting += [(item, depth + 1) for item in value]
        if characters > limits.source_bytes:
            raise RequestError(f"the JSON schema has more than {limits.source_bytes} bytes. Shorten it.")
    if len(references) > limits.references:
        raise RequestError(
            f"the JSON schema refers to {len(references)} definitions, and at most {limits.references} are "
            "compiled. Use fewer."
        )
    if multiples and _common_multiple(multiples) > limits.multiple:
        raise RequestError(
            f"the least common multiple of all multipleOf in the JSON schema is above {limits.multiple} (in "
            "units of the smallest decimal). Use smaller or fewer numbers there."
        )


def _decimal(number: float) -> Decimal:
    try:
        value = Decimal(str(number))
    except InvalidOperation:
        value = Decimal("NaN")
    if not value.is_finite() or value <= 0:
        raise RequestError(f"multipleOf must be a number above 0, got {number!r}.")
    return value


def _common_multiple(numbers: list[Decimal]) -> int:
    """The least common multiple of decimals, in units of the smallest decimal place among them."""
    decimal_places = max(0, *(-int(number.as_tuple().exponent) for number in numbers))
    if decimal_places > 30 or max(numbers) > 10**15:
        return 10**45
    return math.lcm(*(int(number.scaleb(decimal_places)) for number in numbers))


def _too_deep(limits: GrammarLimits) -> RequestError:
    return RequestError(
        f"the JSON schema is nested more than {limits.schema_depth} levels deep. Flatten it, or name parts "
        "of it in $defs and refer to them."
    )


def check_rules(grammar: str, limits: GrammarLimits) -> None:
    """RequestError if a grammar has too many rules."""
    rules = len(RULE_HEAD.findall(grammar))
    if rules > limits.rules:
        raise RequestError(
            f"the grammar has {rules} rules, and at most {limits.rules} are compiled. Use fewer."
        )
