"""DistinctCalls: the events of an output up to the first call that repeats an earlier one.

A small model that must call a tool often writes the identical call again and again until it is cut off. So
the first repeat ends the answer: the engine stops there (`ToolPlan.watch`), and no client sees the repeat.
"""

from __future__ import annotations

from paceline.serve.tools.events import Arguments, CallEnded, CallStarted, Event, EventFilter, OutputParser


class DistinctCalls(EventFilter):
    """Holds a call back for as long as it may become a repeat."""

    def __init__(self, parser: OutputParser) -> None:
        super().__init__(parser)
        self._complete: list[tuple[str, str]] = []  # name and arguments of the calls so far
        self._name = self._arguments = ""  # of the call being read
        self._held: list[Event] = []  # events of that call, while it may become a repeat
        self._repeated = False

    @property
    def repeated(self) -> bool:
        return self._repeated

    def _filtered(self, events: list[Event]) -> list[Event]:
        certain: list[Event] = []
        for event in events:
            if self._repeated:
                break
            self._held.append(event)
            if self._record(event):
                self._repeated = True
                self._held = []
            elif not self._may_repeat(event):
                certain += self._flush()
        return certain

    def _record(self, event: Event) -> bool:
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

    def _flush(self) -> list[Event]:
        held, self._held = self._held, []
        return held
