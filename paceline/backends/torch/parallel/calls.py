"""Decorators for methods that run on all ranks, and the serialization of such calls."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch

Given = ParamSpec("Given")
Result = TypeVar("Result")


def on_all_ranks(method: Callable[Given, Result]) -> Callable[Given, Result]:
    """Decorates a method that every rank calls on its part of the object; `self.ranks` None: one rank."""
    return cast(Callable[Given, Result], _on_all_ranks(method, makes=False))


def made_on_all_ranks(method: Callable[Given, Result]) -> Callable[Given, Result]:
    """The same for a method that returns a new object: every rank keeps its part under the same number."""
    return cast(Callable[Given, Result], _on_all_ranks(method, makes=True))


def _on_all_ranks(method: Callable[..., Any], makes: bool) -> Any:
    @wraps(method)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        here = partial(method, self, *arguments, **named)
        if self.ranks is None:
            return here()
        return self.ranks.call(partial(getattr(self, method.__name__), **named), arguments, here, makes)

    return call


@dataclass(frozen=True)
class Call:
    """A call that rank 0 sends to the others."""

    function: Callable[..., Any]  # may be a method of an object that all ranks have
    arguments: tuple[Any, ...]
    makes: int | None  # the number of the object that it returns
    released: tuple[int, ...]  # numbers that are no longer in use


def portable(argument: Any) -> Any:
    """An argument as it goes through a pipe."""
    return argument.cpu() if isinstance(argument, torch.Tensor) else argument


class _Pickler(pickle.Pickler):
    """Replaces objects that all ranks have by their numbers."""

    def __init__(self, file: io.BytesIO, named: Mapping[int, int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._named = named

    def persistent_id(self, value: Any) -> int | None:
        return self._named.get(id(value))


class Unpickler(pickle.Unpickler):
    """Replaces numbers by this rank's objects."""

    def __init__(self, message: bytes, made: Mapping[int, Any]) -> None:
        super().__init__(io.BytesIO(message))
        self._made = made

    def persistent_load(self, number: int) -> Any:
        return self._made[number]


def pickled(call: Call, named: Mapping[int, int]) -> bytes:
    # not the pipe's `send`: torch makes it pass tensors by shared memory, which needs more than the pipe
    message = io.BytesIO()
    _Pickler(message, named).dump(call)
    return message.getvalue()
