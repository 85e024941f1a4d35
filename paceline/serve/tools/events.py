"""What is read from an output, as events, and the outputs that they add up to."""

from __future__ import annotations

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


class EventParser(Protocol):
    """What reads an output piece by piece."""

    def feed(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


class OutputParser(EventParser, Protocol):
    """What reads one output for a client."""

    @property
    def num_calls(self) -> int: ...

    @property
    def repeated(self) -> bool: ...


class ReadOutput(NamedTuple):
    """A complete output."""

    content: str
    calls: list[ToolCall]
    reasoning: str


def read_whole(parser: EventParser, text: str) -> tuple[str, list[ToolCall]]:
    """The content and the calls of a complete output."""
    return read_output(parser, text)[:2]


def read_output(parser: EventParser, text: str) -> ReadOutput:
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
