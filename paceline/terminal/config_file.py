"""`--config FILE`: flags of a command from a file, such as `paceline tune --out` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import ConfigError
from paceline.options import unknown_option


def _take_defaults(context: typer.Context, file: Path | None) -> Path | None:
    """Use the values of the file as defaults of flags that are not given."""
    if file is None:
        return None
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {file} cannot be read ({error}). Give a file of JSON.") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f'--config {file} must be an object such as {{"draft": "auto"}}, got {values!r:.60}.'
        )
    parameters = {
        spelling.lstrip("-").replace("-", "_"): parameter
        for parameter in context.command.params
        for spelling in parameter.opts
        if not parameter.is_eager
    }
    defaults: dict[str, Any] = {}
    for key, value in values.items():
        parameter = parameters.get(key.replace("-", "_"))
        if parameter is None:
            raise ConfigError(unknown_option(key, parameters, f"--config {file}"))
        assert parameter.name is not None
        several = isinstance(value, list) and getattr(parameter, "multiple", False)
        # flags whose value is a JSON text may be written as JSON
        plain = several or not isinstance(value, dict | list)
        defaults[parameter.name] = value if plain else json.dumps(value)
    context.default_map = defaults
    return file


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        callback=_take_defaults,
        is_eager=True,
        help="JSON file of flags, as `paceline tune --out` writes it.",
    ),
]
