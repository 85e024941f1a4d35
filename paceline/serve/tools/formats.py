"""The formats in which models write tool calls, and which of them a model has."""

from __future__ import annotations

from paceline.errors import ConfigError
from paceline.serve.tools.json_formats import JSON_FORMATS
from paceline.serve.tools.notation_formats import NOTATION_FORMATS
from paceline.serve.tools.tool_format import ToolFormat

FORMATS = {**JSON_FORMATS, **NOTATION_FORMATS}
DEFAULT_FORMAT = "hermes"


def named_format(name: str) -> ToolFormat:
    """The format with this name."""
    if name not in FORMATS:
        raise ConfigError(f"tool_call_parser must be one of {', '.join(FORMATS)}, got {name!r}.")
    return FORMATS[name]


def choose_format(template: str | None, name: str | None = None) -> ToolFormat:
    """The format named `name`; else the one that the chat template uses; else the default."""
    if name is not None:
        return named_format(name)
    known = [
        entry for entry in FORMATS.values() if template and all(clue in template for clue in entry.clues)
    ]
    # some formats have the marks of another one and more
    return max(known, key=lambda entry: len(entry.clues), default=FORMATS[DEFAULT_FORMAT])
