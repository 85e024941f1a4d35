"""What a model thinks before it answers: told from its content by the marks around it.

A model writes `<think>…</think>` first, or its chat template has already written `<think>` at the end of the
prompt. Only the start of an output can be reasoning; the same marks later are content. White space next to
the marks is dropped, as it is before a call.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.serve.tools.parser import Content, Event, OutputParser, Reasoning, overlap


@dataclass(frozen=True)
class ReasoningFormat:
    """The marks around reasoning; a chat template that contains both uses them."""

    begin: str
    end: str


REASONING_FORMATS = (
    ReasoningFormat("<think>", "</think>"),  # Qwen, DeepSeek, GLM, SmolLM, Kimi
    ReasoningFormat("[THINK]", "[/THINK]"),  # Mistral
)


def choose_reasoning(template: str | None) -> ReasoningFormat | None:
    """The marks that a chat template uses; None: its model does not reason aloud."""
    for candidate in REASONING_FORMATS:
        if template and candidate.begin in template and candidate.end in template:
            return candidate
    return None


class ReasoningParser:
    """The events of another parser, with the content that is reasoning as such."""

    def __init__(self, parser: OutputParser, format: ReasoningFormat, is_open: bool) -> None:
        """`is_open`: the prompt ends with the mark that begins reasoning."""
        self._parser, self._format = parser, format
        self._buffer = ""  # content that is not told apart yet
        self._read = self._read_reasoning if is_open else self._read_start
        self._has_begun = False  # some reasoning was given

    @property
    def num_calls(self) -> int:
        """Number of calls started so far."""
        return self._parser.num_calls

    @property
    def repeated(self) -> bool:
        """Whether a call was repeated: nothing follows."""
        return self._parser.repeated

    def feed(self, text: str) -> list[Event]:
        """The events that are certain after this piece of text."""
        return self._told_apart(self._parser.feed(text))

    def finish(self) -> list[Event]:
        """The remaining events."""
        return [*self._told_apart(self._parser.finish()), *self._rest()]

    def _told_apart(self, events: list[Event]) -> list[Event]:
        told: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                self._buffer += event.text
                told += self._read()
            else:  # a call ends reasoning, even without its mark
                told += [*self._rest(), event]
        return told

    # Each reader consumes what it can of the buffer; the last one passes everything on.

    def _read_start(self) -> list[Event]:
        text = self._buffer.lstrip()
        if text.startswith(self._format.begin):
            self._buffer, self._read = text.removeprefix(self._format.begin), self._read_reasoning
            return self._read()
        if self._format.begin.startswith(text):
            return []
        return self._rest()

    def _read_reasoning(self) -> list[Event]:
        if not self._has_begun:
            self._buffer = self._buffer.lstrip()
        end = self._buffer.find(self._format.end)
        held = len(self._buffer) - overlap(self._buffer, self._format.end) if end < 0 else end
        text = self._buffer[:held].rstrip()
        events: list[Event] = [Reasoning(text)] if text else []
        self._has_begun = self._has_begun or bool(text)
        if end < 0:
            self._buffer = self._buffer[len(text) :]
            return events
        self._buffer, self._read = self._buffer[end + len(self._format.end) :], self._read_answer
        return events + self._read()

    def _read_answer(self) -> list[Event]:
        """White space between reasoning and content is dropped."""
        self._buffer = self._buffer.lstrip()
        return self._rest() if self._buffer else []

    def _read_plain(self) -> list[Event]:
        return self._rest()

    def _rest(self) -> list[Event]:
        """What is held back, whatever it is; content follows."""
        text, is_reasoning = self._buffer, self._read == self._read_reasoning
        self._buffer, self._read = "", self._read_plain
        if not text:
            return []
        return [Reasoning(text) if is_reasoning else Content(text)]
