"""Fields: typed and checked access to a model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import CheckpointError

MAX_INTEGER = 1 << 31  # larger sizes are a damaged file: no model that we can run comes near
MAX_NUMBER = 1e30  # the same for floats


@dataclass(frozen=True)
class Fields:
    """The key-value pairs of a configuration; `source` names it in errors. null counts as absent."""

    values: Mapping[str, object]
    source: str

    def integer(self, name: str, default: int | None = None, least: int = 1, most: int = MAX_INTEGER) -> int:
        """The integer `name`, or `default` when absent; without a default it is required."""
        value = self._value(name, default)
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(name, f"an integer from {least} to {most}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """The positive finite number `name`, or `default` when absent."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_NUMBER:
            raise self.wrong(name, "a positive number")
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """The list `name` of positive finite numbers."""
        value = self.values.get(name)
        if not isinstance(value, list | tuple) or not value:
            raise self.wrong(name, "a list of positive numbers")
        return tuple(Fields({name: entry}, self.source).number(name) for entry in value)

    def flag(self, name: str, default: bool) -> bool:
        """The boolean `name`, or `default` when absent."""
        value = self._value(name, default)
        if type(value) is not bool:
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """The string `name`, or `default` when absent."""
        value = self._value(name, default)
        if type(value) is not str:
            raise self.wrong(name, "a text")
        return value

    def group(self, name: str) -> Fields:
        """The object `name`; empty when absent."""
        value = self.values.get(name)
        if value is None:
            return Fields({}, self.source)
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object")
        return Fields(value, f"{self.source}: {name}")

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def wrong(self, name: str, expected: str) -> CheckpointError:
        """The error for a field that is missing or has an unexpected value."""
        found = f"has {name} = {str(self.values[name])[:80]!r}" if self.has(name) else f"lacks {name}"
        return CheckpointError(
            f"{self.source} {found}; expected {expected}. "
            f"The file is damaged or was edited: fetch the model again."
        )

    def _value(self, name: str, default: object) -> object:
        value = self.values.get(name)
        return default if value is None else value
