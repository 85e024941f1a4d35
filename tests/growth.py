"""What grows: how long every container is that can be reached from an object."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

ATOMS = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, types.CodeType)


def lengths(root: Any, leave_out: Iterable[str] = ()) -> dict[str, int]:
    """How long containers are, by the path to them; those of one kind within a container together.

    `leave_out`: names of attributes that are not followed.
    """
    found: dict[str, int] = {}
    seen: set[int] = set()
    queue: deque[tuple[str, Any]] = deque([("", root)])
    skipped = set(leave_out)
    while queue:
        path, value = queue.popleft()
        if isinstance(value, ATOMS) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, bytearray):
            found[path] = found.get(path, 0) + len(value)
        elif isinstance(value, Mapping | list | tuple | set | frozenset | deque):
            found[path] = found.get(path, 0) + len(value)
            inner = [*value.keys(), *value.values()] if isinstance(value, Mapping) else list(value)
            queue.extend((f"{path}[]", one) for one in inner)
        queue.extend((f"{path}.{name}", one) for name, one in _attributes(value) if name not in skipped)
    return found


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object of ours holds, what a bound method belongs to, and what a function closes over."""
    if isinstance(value, types.MethodType):
        yield "self", value.__self__
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield name, cell.cell_contents
    elif type(value).__module__.split(".")[0] in ("paceline", "tests", "prometheus_client"):
        yield from list(getattr(value, "__dict__", {}).items())
        for kind in type(value).__mro__:
            for name in getattr(kind, "__slots__", ()):
                if hasattr(value, name):
                    yield name, getattr(value, name)


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """The containers that have become longer: (before, after)."""
    return {
        path: (before.get(path, 0), count) for path, count in after.items() if count > before.get(path, 0)
    }
