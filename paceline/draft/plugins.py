"""Drafters of other packages, found by their entry points."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from inspect import isabstract
from typing import Any

from paceline.draft.base import Drafter, NoOptions, UnboundDrafter
from paceline.errors import ConfigError, PacelineError

GROUP = "paceline.drafters"  # entry points: the name of a method, and where its Method is
REPLACED = {  # members of Drafter in earlier versions, and what has taken their place
    "bind": "UnboundDrafter.bind: load gives one, and the Method says paged=True",
    "kept": "kept_features of the component that the attribute head names",
    "replace_head": "replace of the component that the attribute head names",
    "close": "save of the component that the attribute memory names",
}


@cache
def installed() -> Mapping[str, Sequence[EntryPoint]]:
    """The entry points of all installed drafters, by method name. None of them is imported."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, []).append(point)
    return found


def load(name: str, built_in: bool) -> Any:
    """What the entry point of this name refers to; None if no package has it.

    ConfigError if another package or, as `built_in` says, paceline itself has a method of this name, or if
    the package cannot be imported.
    """
    points = installed().get(name, ())
    if not points:
        return None
    packages = [_package(point) for point in points]
    if built_in or len(points) > 1:
        owners = ["paceline"] * built_in + packages
        raise ConfigError(
            f"the drafting method {name!r} is defined by {' and by '.join(owners)}. Uninstall "
            f"{' or '.join(packages)}, or rename its entry point in the group {GROUP}."
        )
    try:
        return points[0].load()
    except Exception as error:  # whatever a foreign package raises while it is imported
        raise plugin_error(name, f"{type(error).__name__}: {error}") from error


def drafter_class(name: str, module: str, class_name: str) -> type[Drafter]:
    """The class of a package's drafter. ConfigError if it cannot be imported, or is not a drafter."""
    try:
        found = getattr(import_module(module), class_name)
    except Exception as error:  # whatever a foreign package raises while it is imported
        raise plugin_error(name, f"{type(error).__name__}: {error}") from error
    if Drafter not in getattr(found, "__mro__", ()):
        remedy = f"derive {class_name} from paceline.draft.base.Drafter"
        raise plugin_error(name, f"{class_name} is not a Drafter", remedy)
    if replaced := [member for member in REPLACED if hasattr(found, member)]:
        remedy = " and ".join(f"{member}() is now {REPLACED[member]}" for member in replaced)
        raise plugin_error(name, f"{class_name} was written for an earlier paceline", remedy)
    if isabstract(found):
        raise plugin_error(name, f"its class {class_name} has no propose", "define propose(requests, plans)")
    if not is_dataclass(getattr(found, "Options", NoOptions)):
        remedy = "decorate Options with @dataclass(frozen=True)"
        raise plugin_error(name, f"{class_name}.Options is not a dataclass", remedy)
    checked: type[Drafter] = found
    return checked


def make(name: str, call: str, load: Callable[[], Any], paged: bool) -> Any:
    """What `load` makes of a package's class: a Drafter, or an UnboundDrafter if it is `paged`.

    ConfigError if it raises, or makes something else. `call` is how the class is called if it has no `load`.
    """
    try:
        made = load()
    except PacelineError:  # it knows better what to do
        raise
    except Exception as error:  # whatever a foreign package raises
        remedy = f"{call} must work, or define load(options, target)"
        raise plugin_error(name, f"{type(error).__name__}: {error}", remedy) from error
    wanted = UnboundDrafter if paged else Drafter
    if wanted not in type(made).__mro__:
        if paged:
            remedy = "return an UnboundDrafter from load(options, target), or leave out paged"
        else:
            remedy = "return the drafter from load(options, target), or say paged=True in its Method"
        raise plugin_error(name, f"its load gave the type {type(made).__name__}", remedy)
    return made


def plugin_error(name: str, reason: str, remedy: str = "") -> ConfigError:
    """The error for a drafter of another package that does not work.

    `remedy`: what the package's author can do about it, a sentence.
    """
    (point,) = installed()[name]
    sentences = [
        f"the drafting method {name!r} of the package {_package(point)} ({point.value}) cannot be loaded: "
        f"{reason}.",
        f"If the package is yours: {remedy} (docs/extend/drafter.md)." if remedy else "",
        "Else update or uninstall it," if remedy else "Update or uninstall that package,",
        "or name another method.",
    ]
    return ConfigError(" ".join(filter(None, sentences)))


def _package(point: EntryPoint) -> str:
    return "an unknown package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
