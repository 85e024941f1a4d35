"""What a model thinks before it answers: told from its content by the marks around it.

A model writes `<think>…</think>` first, or its chat template has already written `<think>` at the end of the
prompt. Only the start of an output can be reasoning; the same marks later are content. White space next to
the marks is dropped, as it is before a call. Some models write marks around the answer too: they are dropped.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from paceline.serve.tools.arguments import overlap
from paceline.serve.tools.channels import HARMONY, SOLAR, Channels
from paceline.serve.tools.events import Content, Event, EventFilter, OutputParser, Reasoning


class _SplittingParser(EventFilter):
    """Gives the content that is reasoning as such; `_flush` ends the reasoning."""

    def __init__(self, parser: OutputParser) -> None:
        super().__init__(parser)
        self._buffer = ""  # content that may still become reasoning or a mark

    def _filtered(self, events: list[Event]) -> list[Event]:
        split: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                self._buffer += event.text
                split += self._parse_buffer()
            else:  # a call ends reasoning, even without its mark
                split += [*self._flush(), event]
        return split

    @abstractmethod
    def _parse_buffer(self) -> list[Event]:
        """The events of the part of the buffer that is certain; the rest stays in it."""


class ReasoningParser(_SplittingParser):
    """Reasoning between two marks, at the start of an output."""

    def __init__(self, parser: OutputParser, format: ReasoningFormat, is_open: bool) -> None:
        """`is_open`: the prompt ends with the mark that begins reasoning."""
        super().__init__(parser)
        self._format = format
        self._read = self._read_reasoning if is_open else self._read_start
        self._has_begun = False  # reasoning: white space before it is dropped

    def _parse_buffer(self) -> list[Event]:
        return self._read()

    # Each reader consumes what it can of the buffer; the last one passes everything on.

    def _read_start(self) -> list[Event]:
        text, begins = self._buffer.lstrip(), self._format.answer_begins
        if text.startswith(self._format.begin):
            self._buffer, self._read = text.removeprefix(self._format.begin), self._read_reasoning
            return self._read()
        if text.startswith(begins):
            self._read = self._read_answer
            return self._read()
        if any(mark.startswith(text) for mark in (self._format.begin, *begins)):
            return []
        return self._flush()

    def _read_reasoning(self) -> list[Event]:
        if not self._has_begun:
            self._buffer = self._buffer.lstrip()
            self._has_begun = bool(self._buffer)
        return self._read_until(self._format.end, Reasoning, self._read_answer)

    def _read_answer(self) -> list[Event]:
        """White space between reasoning and content is dropped, and what begins the answer."""
        self._buffer, begins = self._buffer.lstrip(), self._format.answer_begins
        while mark := next((mark for mark in begins if self._buffer.startswith(mark)), ""):
            self._buffer = self._buffer.removeprefix(mark).lstrip()
        if not self._buffer or any(mark.startswith(self._buffer) for mark in begins):
            return []
        if not self._format.answer_end:
            return self._flush()
        self._read = self._read_content
        return self._read()

    def _read_content(self) -> list[Event]:
        return self._read_until(self._format.answer_end, Content, self._read_end)

    def _read_until(
        self, mark: str, kind: type[Content | Reasoning], read_next: Callable[[], list[Event]]
    ) -> list[Event]:
        """Text up to a mark. White space is held back: it is dropped before the mark."""
        at = self._buffer.find(mark)
        end = len(self._buffer) - overlap(self._buffer, mark) if at < 0 else at
        text = self._buffer[:end].rstrip()
        events: list[Event] = [kind(text)] if text else []
        if at < 0:
            self._buffer = self._buffer[len(text) :]
            return events
        self._buffer, self._read = self._buffer[at + len(mark) :], read_next
        return events + self._read()

    def _read_end(self) -> list[Event]:
        """White space after the answer is dropped."""
        self._buffer = self._buffer.lstrip()
        return self._flush() if self._buffer else []

    def _read_plain(self) -> list[Event]:
        return self._flush()

    def _flush(self) -> list[Event]:
        text, is_reasoning = self._buffer, self._read == self._read_reasoning
        self._buffer, self._read = "", self._read_plain
        if not text:
            return []
        return [Reasoning(text) if is_reasoning else Content(text)]


class ChannelParser(_SplittingParser):
    """The messages of a format with channels: those with the header of a thought are reasoning.

        <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>

    That is gpt-oss' harmony. Headers are dropped, also one that is cut off; what has no header is content. A
    blank line separates two messages of one kind.
    """

    def __init__(self, parser: OutputParser, format: ReasoningFormat, is_open: bool) -> None:
        super().__init__(parser)
        if format.channels is None:
            raise AssertionError("a format without channels has another reader")
        self._channels = format.channels
        self._marks = format.channels.starts + format.channels.ends
        self._kind: type[Content | Reasoning] | None = None  # of the message being read; None: its header
        self._is_new = True  # nothing of the message was given
        self._given: set[type[Content | Reasoning]] = set()

    def _parse_buffer(self) -> list[Event]:
        events: list[Event] = []
        while self._buffer:
            is_certain = self._read_header() if self._kind is None else self._read_message(events)
            if not is_certain:
                break
        return events

    def _read_header(self) -> bool:
        channels = self._channels
        bodies = [at + len(body) for body in channels.bodies if (at := self._buffer.find(body)) >= 0]
        is_header = self._buffer.startswith(channels.starts)
        if bodies and is_header:
            header, rest = self._buffer[: min(bodies)], self._buffer[min(bodies) :]
            self._begin(Reasoning if channels.thought in header else Content, rest)
            return True
        if end := next((end for end in channels.ends if self._buffer.startswith(end)), ""):
            self._buffer = self._buffer.removeprefix(end)
            return True
        if is_header or any(mark.startswith(self._buffer) for mark in self._marks):
            return False
        self._begin(Content, self._buffer)
        return True

    def _read_message(self, events: list[Event]) -> bool:
        found = [(at, mark) for mark in self._marks if (at := self._buffer.find(mark)) >= 0]
        if not found:
            held = max(overlap(self._buffer, mark) for mark in self._marks)
            size = len(self._buffer) - held
            events += self._message(self._buffer[:size])
            self._buffer = self._buffer[size:]
            return False
        at, mark = min(found)
        events += self._message(self._buffer[:at])
        self._buffer = self._buffer[at + (len(mark) if mark in self._channels.ends else 0) :]
        self._kind = None
        return True

    def _begin(self, kind: type[Content | Reasoning], rest: str) -> None:
        self._kind, self._buffer, self._is_new = kind, rest, True

    def _message(self, text: str) -> list[Event]:
        """The next piece of the message."""
        if not text or self._kind is None:
            return []
        if self._is_new and self._kind in self._given:
            text = "\n\n" + text
        self._is_new = False
        self._given.add(self._kind)
        return [self._kind(text)]

    def _flush(self) -> list[Event]:
        events = self._message(self._buffer)
        if self._kind is None and not self._buffer.startswith(self._channels.starts):
            self._begin(Content, self._buffer)
            events = self._message(self._buffer)
        self._buffer, self._kind = "", None
        return events


@dataclass(frozen=True)
class ReasoningFormat:
    """The marks around reasoning, and what reads it; a chat template with both, or the clues, uses them."""

    begin: str
    end: str
    tokens: tuple[str, ...]  # parts of the marks that are single tokens in some vocabularies
    reader: Callable[[OutputParser, ReasoningFormat, bool], OutputParser] = ReasoningParser
    clues: tuple[str, ...] = ()  # of a template that puts its marks together, or that has more marks
    channels: Channels | None = None  # the marks of all messages, for ChannelParser
    answer_begins: tuple[str, ...] = ()  # what may stand before an answer that calls nothing
    answer_end: str = ""  # what may end it


REASONING_FORMATS = (
    ReasoningFormat(  # gpt-oss
        "<|channel|>", "<|message|>", ("<|channel|>", "<|message|>"), ChannelParser, channels=HARMONY
    ),
    ReasoningFormat(  # Solar Open
        "<|think|>",
        "<|end|>",
        ("<|begin|>", "<|think|>", "<|content|>", "<|end|>"),
        ChannelParser,
        clues=("<|begin|>assistant", "<|think|>", "<|content|>"),
        channels=SOLAR,
    ),
    *(
        ReasoningFormat(
            "<|START_THINKING|>",
            "<|END_THINKING|>",
            ("<|START_THINKING|>", "<|END_THINKING|>", f"<|START_{answer}|>", f"<|END_{answer}|>"),
            clues=("<|START_THINKING|>", f"<|START_{answer}|>"),
            answer_begins=(f"<|START_{answer}|>",),
            answer_end=f"<|END_{answer}|>",
        )
        for answer in ("RESPONSE", "TEXT")  # Command R7B; Cohere's mixture of experts
    ),
    ReasoningFormat(  # Hunyuan A13B: its template asks for the word for assistant before texts
        "<think>",
        "</think>",
        ("<think>", "</think>", "<answer>", "</answer>"),
        clues=("<think>", "<|extra_0|>", "<|extra_4|>"),
        answer_begins=("<answer>", "助手："),
        answer_end="</answer>",
    ),
    ReasoningFormat("<think>", "</think>", ("<think>", "</think>")),  # Qwen, DeepSeek, GLM, SmolLM, Kimi
    ReasoningFormat("<seed:think>", "</seed:think>", ("<seed:think>", "</seed:think>")),  # Seed-OSS
    ReasoningFormat(  # Hunyuan 3
        "<think:opensource>",
        "</think:opensource>",
        ("<think:opensource>", "</think:opensource>"),
        clues=("<think{}>", "</think{}>", ":opensource"),
    ),
    ReasoningFormat("[THINK]", "[/THINK]", ("[THINK]", "[/THINK]")),  # Mistral
    ReasoningFormat("<|channel>thought", "<channel|>", ("<|channel>", "<channel|>")),  # Gemma
)


def choose_reasoning(template: str | None) -> ReasoningFormat | None:
    """The marks that a chat template uses; None: its model does not reason aloud."""
    for candidate in REASONING_FORMATS:
        clues = candidate.clues or (candidate.begin, candidate.end)
        if template and all(clue in template for clue in clues):
            return candidate
    return None
