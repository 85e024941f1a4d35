"""DistinctCalls: the events of an output up to the first call that repeats an earlier one.

A small model that must call a tool often writes the identical call again and again until it is cut off. So
the first repeat ends the answer: the engine stops there (`ToolPlan.watch`), and no client sees the repeat.
"""

from __future__ import annotations

from paceline.serve.tools.events import Arguments, CallEnded, CallStarted, Event
from paceline.serve.tools.parser import ToolParser


class DistinctCalls:
    """A ToolParser that holds a call back for as long as it may become a repeat."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self._complete: list[tuple[str, str]] = []  # name and arguments of the calls so far
        self._name = self._arguments = ""  # of the call being read
        self._held: list[Event] = []  # events of that call, while it may become a repeat
        self._repeated = False

    @property
    def repeated(self) -> bool:
        """Whether a call was repeated: nothing follows."""
        return self._repeated

    @property
    def num_calls(self) -> int:
        """Number of calls started so far."""
        return self._parser.num_calls

    def feed(self, text: str) -> list[Event]:
        """The events that are certain after this piece of text."""
        return self._distinct(self._parser.feed(text))

    def finish(self) -> list[Event]:
        """The remaining events. A call that was cut off ends with what there is of it."""
        return [*self._distinct(self._parser.finish()), *self._take_held()]

    def _distinct(self, events: list[Event]) -> list[Event]:
        certain: list[Event] = []
        for event in events:
            if self._repeated:
                break
            self._held.append(event)
            if self._completes_repeat(event):
                self._repeated = True
                self._held = []
            elif not self._may_repeat(event):
                certain += self._take_held()
        return certain

    def _completes_repeat(self, event: Event) -> bool:
        """Whether this event ends a call that repeats a complete one; else that call is complete too."""
        match event:
            case CallStarted(name=name):
                self._name, self._arguments = name, ""
            case Arguments(text=text):
                self._arguments += text
            case CallEnded(complete=True):
                call = self._name, self._arguments
                if call in self._complete:
                    return True
                self._complete.append(call)
        return False

    def _may_repeat(self, event: Event) -> bool:
        """Whether the event is of an unfinished call that begins as a complete one does."""
        return isinstance(event, CallStarted | Arguments) and any(
            name == self._name and arguments.startswith(self._arguments) for name, arguments in self._complete
        )

    def _take_held(self) -> list[Event]:
        held, self._held = self._held, []
        return held
