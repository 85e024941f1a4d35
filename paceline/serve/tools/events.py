"""What is read from an output, as events, and the outputs that they add up to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thought before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call whose name is known. Calls are numbered from 0; one ends before the next starts."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of a call's arguments, as JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call is complete, or was cut off."""

    index: int
    complete: bool


Event: TypeAlias = Content | Reasoning | CallStarted | Arguments | CallEnded


@dataclass(frozen=True)
class ToolCall:
    """A whole call. `arguments` is valid JSON unless the call was cut off."""

    id: str
    name: str
    arguments: str
    complete: bool


class OutputParser(Protocol):
    """What reads one output, however its text is split into pieces."""

    @property
    def num_calls(self) -> int:
        """Number of calls started so far."""
        ...

    @property
    def repeated(self) -> bool:
        """Whether a call was repeated: nothing follows."""
        ...

    def feed(self, text: str) -> list[Event]:
        """The events that are certain after this piece of text."""
        ...

    def finish(self) -> list[Event]:
        """The remaining events. A call that was cut off ends with what there is of it."""
        ...


class EventFilter(ABC):
    """An OutputParser that changes the events of another one, or holds them back."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser

    @property
    def num_calls(self) -> int:
        return self._parser.num_calls

    @property
    def repeated(self) -> bool:
        return self._parser.repeated

    def feed(self, text: str) -> list[Event]:
        return self._filtered(self._parser.feed(text))

    def finish(self) -> list[Event]:
        return [*self._filtered(self._parser.finish()), *self._flush()]

    @abstractmethod
    def _filtered(self, events: list[Event]) -> list[Event]:
        """What is certain after these events."""

    @abstractmethod
    def _flush(self) -> list[Event]:
        """Everything that is held back."""


class ReadOutput(NamedTuple):
    """A complete output."""

    content: str
    calls: list[ToolCall]
    reasoning: str


def read_output(parser: OutputParser, text: str) -> ReadOutput:
    """The content, the calls and the reasoning of a complete output."""
    content = reasoning = ""
    calls: list[ToolCall] = []
    for event in [*parser.feed(text), *parser.finish()]:
        match event:
            case Content(text=piece):
                content += piece
            case Reasoning(text=piece):
                reasoning += piece
            case CallStarted(id=call_id, name=name):
                calls.append(ToolCall(call_id, name, "", complete=False))
            case Arguments(text=piece):
                last = calls[-1]
                calls[-1] = ToolCall(last.id, last.name, last.arguments + piece, complete=False)
            case CallEnded(complete=complete):
                last = calls[-1]
                calls[-1] = ToolCall(last.id, last.name, last.arguments, complete)
    return ReadOutput(content, calls, reasoning)
