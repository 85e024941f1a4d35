"""Logs: one line for each event, JSON for machines or text for a terminal. Never a prompt, never a key."""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

# the request at hand: whatever is logged on its behalf carries its id
current_request: ContextVar[str] = ContextVar("current_request")

# what libraries tell of their own accord and we tell better, or not at all
_QUIET = ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio")


def set_up_logs(level: str, form: str) -> None:
    """From now on everything logged goes to standard error, in this form."""
    text = sys.stderr.isatty() if form == "auto" else form == "text"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Text() if text else _Json())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel("ERROR")


def log_event(logger: logging.Logger, event: str, *, level: int = logging.INFO, **facts: Any) -> None:
    """Log an event with what there is to know of it; facts that are None are left out."""
    known = {name: value for name, value in facts.items() if value is not None}
    logger.log(level, event, extra={"facts": known})


def facts_of(record: logging.LogRecord) -> dict[str, Any]:
    """What a line has to tell: its time, level and event, then the facts."""
    facts: dict[str, Any] = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "event": record.getMessage(),
        **getattr(record, "facts", {}),
    }
    request_id = current_request.get(None)
    if request_id is not None:
        facts["request_id"] = request_id
    if record.exc_info:
        facts["traceback"] = logging.Formatter().formatException(record.exc_info)
    return facts


class _Json(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(facts_of(record), default=str)


class _Text(logging.Formatter):
    """Time, event, and name=value for the rest; a traceback on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        facts = facts_of(record)
        time, level, event = facts.pop("time")[11:19], facts.pop("level"), facts.pop("event")
        traceback = facts.pop("traceback", "")
        words = [time, "" if level == "info" else f"{level}:", event]
        words += [f"{name}={json.dumps(value, default=str)}" for name, value in facts.items()]
        return " ".join(filter(None, words)) + (f"\n{traceback}" if traceback else "")
