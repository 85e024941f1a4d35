"""Validation of options: unknown names, wrong types, values out of range."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from paceline.errors import PacelineError

Class = TypeVar("Class", bound=type[Any])


MAX_LISTED = 16  # names in an error message, where they are documented elsewhere


def nearest(name: str, allowed: Iterable[str]) -> str:
    """ ": did you mean ...?" with the closest of the allowed names; empty if none is close."""
    near = difflib.get_close_matches(name, sorted(allowed), n=1)
    return f": did you mean {near[0]!r}?" if near else ""


def unknown_option(name: str, allowed: Iterable[str], where: str, documented: str | None = None) -> str:
    """The error message for an unknown option: the closest known name, or else all of them.

    If they are many, `documented` says instead where they are described.
    """
    names = sorted(allowed)
    hint = nearest(name, names)
    others = f"The options are {', '.join(names)}."
    if documented is not None and len(names) > MAX_LISTED:
        others = documented
    return f"unknown option {name!r} for {where}{hint or f'. {others}'}"


def refuse_unknown(error: type[PacelineError]) -> Callable[[Class], Class]:
    """A class decorator: unknown keyword arguments raise `error` instead of TypeError."""

    def decorate(cls: Class) -> Class:
        original = cls.__init__
        names = [name for name in inspect.signature(original).parameters if name != "self"]

        @functools.wraps(original)
        def checked(self: Any, *args: Any, **options: Any) -> None:
            for name in options:
                if name not in names:
                    raise error(unknown_option(name, names, cls.__name__))
            original(self, *args, **options)

        cls.__init__ = checked
        return cls

    return decorate


def check_integer(
    error: type[PacelineError], name: str, value: object, low: int, high: int | None, remedy: str = ""
) -> int:
    """The value, if it is an integer from `low` to `high` (None: no upper bound)."""
    allowed = f"an integer from {low}" + (f" to {high}" if high is not None else " up")
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise error(f"{name} must be {allowed}, got {value!r} ({type(value).__name__}). {remedy}".rstrip())
    integer = int(value.__index__())
    if integer < low or (high is not None and integer > high):
        raise error(f"{name} must be {allowed}, got {integer}. {remedy}".rstrip())
    return integer


def check_number(
    error: type[PacelineError],
    name: str,
    value: object,
    low: float,
    high: float,
    low_open: bool = False,
    remedy: str = "",
) -> float:
    """The value as a float, if it is finite and from `low` (exclusive if `low_open`) to `high`."""
    allowed = f"a number {'above' if low_open else 'from'} {low:g} {'and up ' if low_open else ''}to {high:g}"
    if isinstance(value, bool) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise error(f"{name} must be {allowed}, got {value!r} ({type(value).__name__}). {remedy}".rstrip())
    number = float(value)  # type: ignore[arg-type]
    if math.isnan(number) or number < low or number > high or (low_open and number == low):
        raise error(f"{name} must be {allowed}, got {number!r}. {remedy}".rstrip())
    return number


def check_bool(error: type[PacelineError], name: str, value: object) -> bool:
    """The value, if it is True or False."""
    if not isinstance(value, bool):
        raise error(f"{name} must be True or False, got {value!r} ({type(value).__name__}).")
    return value


def check_text(error: type[PacelineError], name: str, value: object, remedy: str = "") -> None:
    """Raise `error` unless the value is a non-empty string."""
    if not isinstance(value, str) or not value:
        raise error(f"{name} must be a non-empty string, got {value!r}. {remedy}".rstrip())


def check_choice(error: type[PacelineError], name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise `error` unless the value is one of `choices`."""
    if value not in choices:
        raise error(f"{name} must be one of {', '.join(choices)}, got {value!r}.")
