"""Streaming parser: the model's text to content and tool calls, however the text is split into pieces.

The grammar (grammar.py) makes the model write calls exactly in the format, so the parser never guesses:
what does not follow the format is content. Nothing is lost: the events, written in the format again,
give the text, except for white space before a call, which is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

from paceline.serve.tools.arguments import ArgumentsReader, JsonReader, overlap
from paceline.serve.tools.events import Arguments, CallEnded, CallStarted, Content, Event
from paceline.serve.tools.tool_format import FENCE_END, FENCE_NAME_END, FENCE_START, ToolFormat

_NUMBER = re.compile(r":[0-9]+\Z")  # of a call, after its name


class ToolParser:
    """Parses one output. With `format` None, all of it is content."""

    repeated = False  # it does not compare calls: see DistinctCalls

    def __init__(
        self,
        format: ToolFormat | None,
        anywhere: bool = True,
        names: Collection[str] = (),
        texts: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        """`anywhere`: calls may follow text. Otherwise an output is entirely calls or entirely content.

        `names`: the tools' names. A fenced JSON block is a call only if it names one of them.
        `texts`: for each tool, the arguments whose values are texts, where a format does not tell.
        """
        self._names = names
        self._buffer = ""  # text not parsed yet
        self._held = ""  # text before the buffer: part of a call once its name is complete, otherwise content
        self._index = -1  # of the last call
        self._counted = format is not None and format.counted  # a number follows each name
        self._notation, self._texts = format and format.notation, texts or {}
        self._arguments: ArgumentsReader = JsonReader()
        self._id_end = format.written_id.end if format is not None and format.written_id else ""
        self._events: list[Event] = []
        self._read: Callable[[], bool] = self._read_plain
        self._read_rest = self._read_plain  # the reader of what follows the calls
        if format is not None:
            self._opening, self._name_end, self._new_id = format.opening, format.name_end, format.new_id
            self._call_end = format.call_end
            self._next_call = format.call_end + format.between + format.call_start
            start, end = format.around
            self._openings = (start + format.opening, format.opening)
            self._end = format.call_end + format.end + end
            self._ends = [self._end, format.call_end + format.end, format.call_end]
            self._read = self._read_start
            if anywhere and format.marker:
                self._read = self._read_fence if format.fenced else self._read_text
                self._read_rest = self._read_text

    @property
    def num_calls(self) -> int:
        return self._index + 1

    def feed(self, text: str) -> list[Event]:
        self._buffer += text
        while self._buffer and self._read():
            pass
        return self._take()

    def finish(self) -> list[Event]:
        if self._read in (self._read_name_end, self._read_arguments):
            if self._read == self._read_arguments:
                self._argument(self._arguments.rest(self._buffer))
            self._end_call(complete=False)
        else:
            if self._read == self._read_after:
                self._skip(self._end_length(self._buffer))
            self._content(self._held + self._buffer)
        self._held = ""
        self._buffer = ""
        self._read = self._read_plain
        return self._take()

    # Each reader consumes what it can from the buffer, and returns True if the next reader can continue.

    def _read_plain(self) -> bool:
        self._content(self._buffer)
        self._buffer = ""
        return False

    def _read_start(self) -> bool:
        """Calls, if the output starts with one."""
        for opening in self._openings:
            if self._buffer.startswith(opening):
                self._hold(len(opening))
                return True
        if any(opening.startswith(self._buffer) for opening in self._openings):
            return False
        self._read = self._read_plain
        return True

    def _read_fence(self) -> bool:
        """A call in a fenced JSON block, if the output starts with one; otherwise text."""
        heads = {FENCE_START + name + FENCE_NAME_END: name for name in self._names}
        for head, name in heads.items():
            if self._buffer.startswith(head):
                self._start_call(name)
                self._skip(len(head))
                self._next_call, self._end, self._read_rest = "", FENCE_END, self._read_plain
                self._ends = [FENCE_END, self._call_end]
                self._read = self._read_arguments
                return True
        if any(head.startswith(self._buffer) for head in heads):
            return False
        self._read = self._read_text
        return True

    def _read_text(self) -> bool:
        """Content up to the first call. White space is held back, because it is dropped before a call."""
        start = self._buffer.find(self._opening)
        if start >= 0:
            text = self._buffer[:start].rstrip()
            self._content(text)
            self._skip(len(text))
            self._hold(start - len(text) + len(self._opening))
            return True
        text = self._buffer[: len(self._buffer) - overlap(self._buffer, self._opening)].rstrip()
        self._content(text)
        self._skip(len(text))
        return False

    def _read_id(self) -> bool:
        """The id before a name, which clients do not get: models write one id twice."""
        end = self._buffer.find(self._id_end)
        if end < 0:
            return False
        size = end + len(self._id_end)
        self._held += self._buffer[:size]
        self._skip(size)
        self._read = self._read_name
        return True

    def _read_name(self) -> bool:
        end = self._buffer.find((self._name_end or self._call_end)[0])
        if end < 0:
            return False
        self._start_call(self._buffer[:end])
        self._held = ""
        self._skip(end)
        self._read = self._read_name_end
        return True

    def _read_name_end(self) -> bool:
        if self._buffer.startswith(self._name_end):
            self._skip(len(self._name_end))
            self._read = self._read_arguments
            return True
        if self._name_end.startswith(self._buffer):
            return False
        self._end_call(complete=False)
        self._read = self._read_rest
        return True

    def _read_arguments(self) -> bool:
        read = self._arguments.read(self._buffer)
        self._argument(read.json)
        self._skip(read.size)
        if read.is_end:
            self._end_call(complete=True)
        return read.is_end

    def _read_after(self) -> bool:
        """The separator before the next call, or the end of the last; anything else is text."""
        if self._next_call and self._buffer.startswith(self._next_call):
            self._skip(self._end_length(self._next_call))
            self._hold(len(self._next_call) - self._end_length(self._next_call))
            return True
        if self._next_call.startswith(self._buffer) or self._end.startswith(self._buffer):
            return False
        self._skip(self._end_length(self._buffer))
        self._read = self._read_rest
        return True

    def _end_length(self, text: str) -> int:
        """How many characters after a call's arguments belong to the call."""
        if self._end.startswith(text):  # cut off
            return len(text)
        return next((len(end) for end in self._ends if text.startswith(end)), 0)

    def _hold(self, count: int) -> None:
        """Move the start of a call from the buffer to `_held`, where it stays until the name is complete."""
        self._held = self._buffer[:count]
        self._skip(count)
        self._read = self._read_id if self._id_end else self._read_name

    def _start_call(self, written: str) -> None:
        name = _NUMBER.sub("", written) if self._counted else written
        self._index += 1
        self._events.append(CallStarted(self._index, self._new_id(written), name))
        texts = self._texts.get(name, ())
        self._arguments = self._notation.reader(texts) if self._notation else JsonReader()

    def _argument(self, text: str) -> None:
        if text:
            self._events.append(Arguments(self._index, text))

    def _end_call(self, complete: bool) -> None:
        self._events.append(CallEnded(self._index, complete))
        self._read = self._read_after

    def _content(self, text: str) -> None:
        if text:
            self._events.append(Content(text))

    def _skip(self, count: int) -> None:
        self._buffer = self._buffer[count:]

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events
