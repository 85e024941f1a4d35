"""Recorded traces of requests: when each came, how long it was, and what its prompt shares with others.

Two formats are read, by the file's ending:

    .csv     TIMESTAMP (seconds, or dates), ContextTokens, GeneratedTokens: as of the Azure LLM traces
    .jsonl   timestamp (milliseconds), input_length, output_length, hash_ids: as of the Mooncake traces.
             Each hash id stands for 512 prompt tokens; prompts that begin with the same ids share them
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.options import check_number

TIME, PROMPT, ANSWER = "TIMESTAMP", "ContextTokens", "GeneratedTokens"  # columns; the last two may be missing
JSON_LINES = ".jsonl"
BLOCK_TOKENS = 512  # of a hash id


@dataclass(frozen=True)
class Arrival:
    """One request of a trace."""

    due: float  # seconds since the first one
    prompt_tokens: int | None = None  # None: the trace does not tell
    answer_tokens: int | None = None
    blocks: tuple[int, ...] = ()  # what the prompt's blocks of BLOCK_TOKENS contain, the first ones first


def read_trace(path: Path, time_scale: float = 1.0) -> list[Arrival]:
    """The requests of a trace, in order. With `time_scale` 0.1 they arrive ten times as fast."""
    check_number(ConfigError, "--time-scale", time_scale, 0, 1e6, low_open=True)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {path} cannot be read ({error}). Give a file of CSV or .jsonl.") from None
    arrivals = _json_lines(text, path) if path.suffix == JSON_LINES else _csv(text, path)
    if not all(math.isfinite(arrival.due) for arrival in arrivals):
        raise ConfigError(f"--trace {path}: a time is not finite. Give seconds, milliseconds or dates.")
    if any(after.due < before.due for before, after in pairwise(arrivals)):
        raise ConfigError(f"--trace {path}: the arrivals are not in order. Sort them by {TIME}.")
    first = arrivals[0].due
    return [replace(arrival, due=time_scale * (arrival.due - first)) for arrival in arrivals]


def _csv(text: str, path: Path) -> list[Arrival]:
    try:
        lines = list(csv.DictReader(text.splitlines()))
    except csv.Error as error:
        raise ConfigError(f"--trace {path} cannot be read ({error}). Give a file of CSV or .jsonl.") from None
    if not lines or TIME not in lines[0]:
        raise ConfigError(
            f"--trace {path} has no column {TIME}. Its first line must name the columns: {TIME} and, if "
            f"wanted, {PROMPT} and {ANSWER}; and at least one arrival must follow."
        )
    arrivals = []
    for number, line in enumerate(lines, start=2):
        where = f"--trace {path}, line {number}"
        prompt, answer = (
            _count(line[name], name, where) if name in line else None for name in (PROMPT, ANSWER)
        )
        arrivals.append(Arrival(_seconds(line[TIME], where), prompt, answer))
    return arrivals


def _json_lines(text: str, path: Path) -> list[Arrival]:
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"--trace {path} is empty. Give a file with at least one request.")
    return [_json_line(line, f"--trace {path}, line {number}") for number, line in lines]


def _json_line(line: str, where: str) -> Arrival:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON ({error}). Give one object per line.") from None
    if not isinstance(fields, Mapping):
        raise ConfigError(f"{where} must be an object with timestamp, input_length and output_length.")

    def field(name: str, usual: Any, is_valid: Callable[[Any], bool], wanted: str) -> Any:
        value = fields.get(name, usual)
        if isinstance(value, bool) or not is_valid(value):
            raise ConfigError(f"{where}: {name} must be {wanted}, got {value!r}.")
        return value

    def is_count(value: Any) -> bool:
        return isinstance(value, int) and value >= 0

    milliseconds = field("timestamp", None, lambda value: isinstance(value, int | float), "milliseconds")
    prompt, answer = (
        max(1, field(name, None, is_count, "a count of tokens")) for name in ("input_length", "output_length")
    )
    blocks = field(
        "hash_ids", [], lambda ids: isinstance(ids, list) and all(map(is_count, ids)), "a list of counts"
    )
    return Arrival(milliseconds / 1e3, prompt, answer, tuple(blocks))


def _seconds(text: str | None, where: str) -> float:
    """Seconds, from a number or from a date such as 2023-11-16 18:17:03.9799600."""
    try:
        return float(text or "")
    except ValueError:
        pass
    whole, _, fraction = (text or "").partition(".")
    try:
        return datetime.fromisoformat(whole).timestamp() + float(f"0.{fraction or 0}")
    except ValueError:
        raise ConfigError(
            f"{where}: {text!r} is neither seconds nor a date such as 2026-01-31 12:00:00.5."
        ) from None


def _count(text: str | None, column: str, where: str) -> int:
    if text is None or not text.isdecimal():
        raise ConfigError(f"{where}: {column} must be a count, got {text!r}.")
    return max(int(text), 1)
