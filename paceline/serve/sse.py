"""Server-sent events: `data: ...` lines, as OpenAI streams them."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import StreamingResponse

from paceline.serve.errors import describe

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


def event(data: object, name: str | None = None) -> bytes:
    """One event; `name` for protocols that name them."""
    line = f"data: {to_json(data)}\n\n"
    return (line if name is None else f"event: {name}\n{line}").encode()


def to_json(data: object) -> str:
    """Compact JSON, characters as they are. Lone surrogates, which a model cannot write, would raise."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


class EventResponse(StreamingResponse):
    """A stream of events. An error after the beginning is an event too, as there is no status any more."""

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        super().__init__(
            _with_errors(events),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )


async def _with_errors(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for data in events:
            yield data
    except Exception as error:
        status, body = describe(error)
        if status == 500:
            logger.error("a stream failed", exc_info=error)
        body["error"]["code"] = body["error"]["code"] or status
        yield event(body)
        yield DONE


def without_none(data: dict[str, Any]) -> dict[str, Any]:
    """The entries that say something."""
    return {name: value for name, value in data.items() if value is not None}
