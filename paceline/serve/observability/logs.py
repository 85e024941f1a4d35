"""Logs on standard error: one line per event, JSON or text. Never a prompt or a key."""

from __future__ import annotations

import json
import logging
import re
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

# id of the current request; added to every line logged while it is handled
current_request: ContextVar[str] = ContextVar("current_request")

# loggers of libraries whose lines we drop or replace with our own
_WORD = re.compile(r"[\w./:,+-]+")  # a text that needs no quotes
_QUIET = ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio")


def set_up_logs(level: str, form: str) -> None:
    """Send all logs to standard error in this format."""
    text = sys.stderr.isatty() if form == "auto" else form == "text"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Text() if text else _Json())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel("ERROR")


def log_event(logger: logging.Logger, event: str, *, level: int = logging.INFO, **facts: Any) -> None:
    """Log an event with named facts. Facts that are None are omitted."""
    given = {name: value for name, value in facts.items() if value is not None}
    logger.log(level, event, extra={"facts": given})


def facts_of(record: logging.LogRecord) -> dict[str, Any]:
    """The fields of a log line: time, level and event, then the facts."""
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
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(facts_of(record), default=str)


def _shown(value: Any) -> str:
    """A value as JSON; a text of one plain word without its quotes."""
    return value if isinstance(value, str) and _WORD.fullmatch(value) else json.dumps(value, default=str)


class _Text(logging.Formatter):
    """Time, event and name=value pairs; a traceback on its own lines."""

    def format(self, record: logging.LogRecord) -> str:
        facts = facts_of(record)
        time, level, event = facts.pop("time")[11:19], facts.pop("level"), facts.pop("event")
        traceback = facts.pop("traceback", "")
        words = [time, "" if level == "info" else f"{level}:", event]
        words += [f"{name}={_shown(value)}" for name, value in facts.items()]
        return " ".join(filter(None, words)) + (f"\n{traceback}" if traceback else "")
