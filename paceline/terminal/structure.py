"""Structured outputs on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.errors import RequestError
from paceline.terminal.flags import Options


def structured_outputs(options: Options) -> dict[str, Any] | None:
    """The structured_outputs option that the flags give; None if they give none."""
    schema, grammar = options["json_schema"], options["grammar"]
    if schema is not None and not schema.lstrip().startswith("{"):
        schema = _text_of("--json-schema", schema)
    asked = {
        "json": schema,
        "json_object": options["json_object"] or None,
        "regex": options["regex"],
        "choice": options["choice"] or None,
        "grammar": None if grammar is None else _text_of("--grammar", grammar),
    }
    given = {name: value for name, value in asked.items() if value is not None}
    return given or None


def _text_of(flag: str, path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise RequestError(f"{flag} {path!r:.80} cannot be read as a file of text: {error}.") from None
