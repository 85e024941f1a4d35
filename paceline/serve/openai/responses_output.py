"""The output items of /v1/responses, and the stream events that announce them.

response.output_item.added              reasoning, a message or a function call
  response.reasoning_text.delta ...
  response.reasoning_text.done
  response.content_part.added           a message's text
    response.output_text.delta ...
    response.output_text.done
  response.content_part.done
  response.function_call_arguments.delta ...
  response.function_call_arguments.done
response.output_item.done
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from paceline.serve.tools.events import Arguments, CallEnded, CallStarted, Content, Event, Reasoning

WireEvent: TypeAlias = dict[str, Any]


class OutputItems:
    """Collects the output of one response. Each method returns the events for what it added."""

    def __init__(self, new_id: Callable[[str], str]) -> None:
        """`new_id` makes an id with the given prefix."""
        self.items: list[dict[str, Any]] = []
        self._new_id = new_id
        self._open = False  # the last item is still growing

    def take(self, event: Event) -> Iterator[WireEvent]:
        """Add one parser event."""
        match event:
            case Reasoning(text=text):
                if not self._open:
                    yield from self._start_reasoning()
                self._last["content"][0]["text"] += text
                yield self._of_part("response.reasoning_text.delta", delta=text)
            case Content(text=text):
                if self._open and self._last["type"] == "reasoning":
                    yield from self._end_open("completed")
                if not self._open:
                    yield from self._start_message()
                self._last["content"][0]["text"] += text
                yield self._of_part("response.output_text.delta", delta=text, logprobs=[])
            case CallStarted(id=call_id, name=name):
                if self._open:
                    yield from self._end_open("completed")
                yield from self._start_call(call_id, name)
            case Arguments(text=text):
                self._last["arguments"] += text
                yield self._of_item("response.function_call_arguments.delta", delta=text)
            case CallEnded(complete=complete):
                yield from self._end_call("completed" if complete else "incomplete")

    def finish(self, cut_off: bool) -> Iterator[WireEvent]:
        """End the output. Without any content, it is one empty message."""
        if not self.items:
            yield from self._start_message()
        if self._open:
            yield from self._end_open("incomplete" if cut_off else "completed")

    @property
    def _last(self) -> dict[str, Any]:
        return self.items[-1]

    def _start_message(self) -> Iterator[WireEvent]:
        item = {"type": "message", "id": self._new_id("msg"), "status": "in_progress", "role": "assistant"}
        yield self._start({**item, "content": []})
        self._last["content"].append({"type": "output_text", "text": "", "annotations": [], "logprobs": []})
        yield self._of_part("response.content_part.added", part=dict(self._last["content"][0]))

    def _start_reasoning(self) -> Iterator[WireEvent]:
        item = {"type": "reasoning", "id": self._new_id("rs"), "status": "in_progress", "summary": []}
        yield self._start({**item, "content": [{"type": "reasoning_text", "text": ""}]})

    def _end_open(self, status: str) -> Iterator[WireEvent]:
        """End a message, or the reasoning before it."""
        part = self._last["content"][0]
        if self._last["type"] == "reasoning":
            yield self._of_part("response.reasoning_text.done", text=part["text"])
            yield self._end(status)
            return
        yield self._of_part("response.output_text.done", text=part["text"], logprobs=[])
        yield self._of_part("response.content_part.done", part=dict(part))
        yield self._end(status)

    def _start_call(self, call_id: str, name: str) -> Iterator[WireEvent]:
        item = {"type": "function_call", "id": self._new_id("fc"), "call_id": call_id, "name": name}
        yield self._start({**item, "arguments": "", "status": "in_progress"})

    def _end_call(self, status: str) -> Iterator[WireEvent]:
        call = self._last
        yield self._of_item(
            "response.function_call_arguments.done", name=call["name"], arguments=call["arguments"]
        )
        yield self._end(status)

    def _start(self, item: dict[str, Any]) -> WireEvent:
        self.items.append(item)
        self._open = True
        return self._whole("response.output_item.added")

    def _end(self, status: str) -> WireEvent:
        self._last["status"] = status
        self._open = False
        return self._whole("response.output_item.done")

    def _whole(self, kind: str) -> WireEvent:
        item = dict(self._last)  # a snapshot
        if "content" in item:
            item["content"] = [dict(part) for part in item["content"]]
        return {"type": kind, "output_index": len(self.items) - 1, "item": item}

    def _of_item(self, kind: str, **more: Any) -> WireEvent:
        return {"type": kind, "item_id": self._last["id"], "output_index": len(self.items) - 1, **more}

    def _of_part(self, kind: str, **more: Any) -> WireEvent:
        return self._of_item(kind, content_index=0, **more)
