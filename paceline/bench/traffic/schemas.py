"""Validation of structured answers, by another library than the one that constrained them."""

from __future__ import annotations

import json

from paceline.core.structured_outputs import StructuredOutputsParams
from paceline.errors import ConfigError


def fits_schema(text: str, structure: StructuredOutputsParams | None) -> bool | None:
    """Whether a text is JSON of the requested schema; None if there was none."""
    if structure is None or not structure.kind.startswith("json"):
        return None
    try:
        import jsonschema
    except ImportError:
        raise ConfigError(
            "to say whether answers fit their schema, the package jsonschema is needed: pip install "
            "jsonschema, or add --no-constrain."
        ) from None
    schema = {"type": "object"} if structure.json is None else structure.json
    try:
        jsonschema.validate(json.loads(text), json.loads(schema) if isinstance(schema, str) else schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
