"""From StructuredOutputsParams to the grammar text that llguidance compiles."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from paceline.constrain.limits import (
    EMBEDDED,
    LARK,
    GrammarLimits,
    check_rules,
    check_size,
    checked_schema,
)
from paceline.core.structured_outputs import StructuredOutputsParams
from paceline.errors import RequestError

ANY_OBJECT = {"type": "object"}


def grammar_source(params: StructuredOutputsParams, limits: GrammarLimits, lenient: bool = False) -> str:
    """The grammar in the library's language. RequestError if it exceeds the limits.

    `lenient`: keywords of JSON schemas that the library cannot follow are left out.
    """
    return _SOURCES[params.kind](params, limits, lenient)


def json_rule(
    schema: dict[str, Any], whitespace_pattern: str | None = None, lenient: bool = False
) -> dict[str, Any]:
    """The schema with llguidance's options for its JSON: fixed separators; lenient or not."""
    options: dict[str, Any] = {"whitespace_flexible": False, "lenient": lenient, "coerce_one_of": lenient}
    if whitespace_pattern is None:
        options |= {"item_separator": ", ", "key_separator": ": "}
    else:
        options["whitespace_pattern"] = whitespace_pattern
    return {**schema, "x-guidance": options}


def _from_json(params: StructuredOutputsParams, limits: GrammarLimits, lenient: bool) -> str:
    schema = ANY_OBJECT if params.json is None else checked_schema(params.json, limits)
    if params.whitespace_pattern is not None:
        check_size("whitespace_pattern", params.whitespace_pattern, limits.regex_length)
    try:
        rule = json_rule(schema, params.whitespace_pattern, lenient)
        source = json.dumps({"grammars": [{"json_schema": rule}]})
    except (TypeError, ValueError) as error:
        raise RequestError(f"the JSON schema is not JSON: {error}.") from None
    check_size("the JSON schema", source, limits.source_bytes + limits.regex_length)
    return source


def _from_regex(params: StructuredOutputsParams, limits: GrammarLimits, lenient: bool) -> str:
    from llguidance import LLMatcher

    assert params.regex is not None
    check_size("the regular expression", params.regex, limits.regex_length)
    return str(LLMatcher.grammar_from_regex(params.regex))


def _from_choice(params: StructuredOutputsParams, limits: GrammarLimits, lenient: bool) -> str:
    assert params.choice is not None
    if len(params.choice) > limits.choices:
        raise RequestError(
            f"choice has {len(params.choice)} texts, and at most {limits.choices} are compiled. Use fewer, "
            "or a regex."
        )
    source = "start: " + " | ".join(json.dumps(text) for text in params.choice)
    check_size("choice", source, limits.source_bytes)
    return source


def _from_grammar(params: StructuredOutputsParams, limits: GrammarLimits, lenient: bool) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    assert params.grammar is not None
    check_size("the grammar", params.grammar, limits.source_bytes)
    check_rules(params.grammar, limits)
    if LARK.search(params.grammar):
        return _with_checked_schemas(params.grammar, limits, lenient)
    check_size("the GBNF grammar", params.grammar, limits.gbnf_bytes)
    try:
        lark = str(gbnf_to_lark(params.grammar))
    except Exception as error:  # the library raises many types
        raise RequestError(f"the grammar cannot be read as GBNF: {error!s:.200}. Check its syntax.") from None
    return _with_checked_schemas(lark, limits, lenient)


def _with_checked_schemas(lark: str, limits: GrammarLimits, lenient: bool) -> str:
    """The grammar with every embedded `%json {...}` checked and given the options of `json_rule`."""
    pieces: list[str] = []
    end = 0
    for match in EMBEDDED.finditer(lark):
        if match.start() < end:
            continue  # inside a schema
        try:
            schema, stop = json.JSONDecoder().raw_decode(lark, match.end())
        except (ValueError, RecursionError) as error:
            raise RequestError(f"%json in the grammar is not followed by a JSON schema: {error}.") from None
        rule = json_rule(checked_schema(schema, limits), lenient=lenient)
        pieces += [lark[end : match.end()], json.dumps(rule)]
        end = stop
    return "".join([*pieces, lark[end:]])


_SOURCES: dict[str, Callable[[StructuredOutputsParams, GrammarLimits, bool], str]] = {
    "json": _from_json,
    "json_object": _from_json,
    "regex": _from_regex,
    "choice": _from_choice,
    "grammar": _from_grammar,
}
