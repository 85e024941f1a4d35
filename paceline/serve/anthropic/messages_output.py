"""The content blocks of /v1/messages, and the stream events that announce them.

content_block_start    what the model thought, a text, or a call of a tool
content_block_delta    ... thinking_delta, text_delta or input_json_delta
content_block_stop
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from paceline.serve.http.sse import to_json
from paceline.serve.tools.events import Arguments, CallEnded, CallStarted, Content, Event, Reasoning

WireEvent: TypeAlias = dict[str, Any]


class ContentBlocks:
    """Collects the content of one message. Each method returns the events for what it added."""

    def __init__(self) -> None:
        self._blocks: list[dict[str, Any]] = []
        self._inputs: dict[int, str] = {}  # JSON of the calls, by block
        self._open = False  # the last block is still growing

    def json(self) -> str:
        """The JSON of the content. The input of a call has the bytes that the model wrote."""
        return f"[{','.join(self._json(index, block) for index, block in enumerate(self._blocks))}]"

    def _json(self, index: int, block: dict[str, Any]) -> str:
        written = to_json(block)
        return f'{written[:-1]},"input":{self._inputs[index]}}}' if index in self._inputs else written

    def take(self, event: Event) -> Iterator[WireEvent]:
        """Add one parser event."""
        match event:
            case Reasoning(text=text):
                if not self._open:
                    yield self._start({"type": "thinking", "thinking": "", "signature": ""})
                self._blocks[-1]["thinking"] += text
                yield self._delta({"type": "thinking_delta", "thinking": text})
            case Content(text=text):
                if self._open and self._blocks[-1]["type"] == "thinking":
                    yield from self._stop()
                if not self._open:
                    yield self._start({"type": "text", "text": ""})
                self._blocks[-1]["text"] += text
                yield self._delta({"type": "text_delta", "text": text})
            case CallStarted(id=call_id, name=name):
                yield from self._stop()
                yield self._start({"type": "tool_use", "id": call_id, "name": name}, input={})
                self._inputs[self._last] = ""
            case Arguments(text=text):
                self._inputs[self._last] += text
                yield self._delta({"type": "input_json_delta", "partial_json": text})
            case CallEnded(complete=complete):
                if not complete:  # cut off: what there is of it is no JSON
                    self._inputs[self._last] = "{}"
                yield from self._stop()

    def finish(self) -> Iterator[WireEvent]:
        """End the content. Without any, it is one empty text: clients read the first block."""
        if not self._blocks:
            yield self._start({"type": "text", "text": ""})
        yield from self._stop()

    @property
    def _last(self) -> int:
        return len(self._blocks) - 1

    def _start(self, block: dict[str, Any], **beginning: Any) -> WireEvent:
        self._blocks.append(block)
        self._open = True
        return self._event("content_block_start", content_block={**block, **beginning})

    def _delta(self, delta: dict[str, Any]) -> WireEvent:
        return self._event("content_block_delta", delta=delta)

    def _stop(self) -> Iterator[WireEvent]:
        if self._open:
            self._open = False
            yield self._event("content_block_stop")

    def _event(self, kind: str, **data: Any) -> WireEvent:
        return {"type": kind, "index": self._last, **data}
