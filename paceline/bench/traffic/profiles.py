"""Arrival profiles: a fixed concurrency, a Poisson rate, or a recorded trace."""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from pathlib import Path

from paceline.errors import ConfigError
from paceline.options import check_integer, check_number

TIME_COLUMN = "TIMESTAMP"
LENGTH_COLUMN = "GeneratedTokens"  # may be missing


@dataclass(frozen=True)
class Profile:
    """When requests arrive. Closed: each of `concurrency` clients sends its next request after its answer.
    Open: requests arrive at their due times, however many are still running."""

    label: str
    concurrency: int | None = 1  # None: open
    due: tuple[float, ...] = ()  # open: seconds from the start, ascending; [request]
    lengths: tuple[int, ...] = ()  # maximum tokens per answer; empty: as in the workload; [request]

    def check_room(self, num_requests: int, workload: str) -> None:
        """Raise ConfigError if the workload has more requests than there are arrivals."""
        if self.concurrency is None and len(self.due) < num_requests:
            raise ConfigError(
                f"{self.label} has {len(self.due)} arrivals, and the workload {workload} {num_requests} "
                f"requests. Add --limit {len(self.due)}, or give a longer trace."
            )


def closed(concurrency: int) -> Profile:
    """A fixed number of concurrent requests."""
    check_integer(ConfigError, "--concurrency", concurrency, 1, None)
    return Profile(f"x{concurrency}", concurrency)


def poisson(rate: float, seed: int, num_requests: int) -> Profile:
    """Independent requests, `rate` per second on average."""
    check_number(ConfigError, "--rate", rate, 0, 1e6, low_open=True)
    rng = random.Random(f"arrivals {seed}")
    return Profile(f"{rate:g}/s", None, tuple(accumulate(rng.expovariate(rate) for _ in range(num_requests))))


def replay(path: Path, time_scale: float = 1.0) -> Profile:
    """The arrivals of a CSV file, the first of them at 0.

    Its column TIMESTAMP has seconds or dates, GeneratedTokens the maximum length of each answer. With
    `time_scale` 0.1, requests arrive ten times as fast.
    """
    check_number(ConfigError, "--time-scale", time_scale, 0, 1e6, low_open=True)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"--trace {path} cannot be read ({error}). Give a file of CSV.") from None
    if not lines or TIME_COLUMN not in lines[0]:
        raise ConfigError(
            f"--trace {path} has no column {TIME_COLUMN}. Its first line must name the columns: "
            f"{TIME_COLUMN} and, if wanted, {LENGTH_COLUMN}; and at least one arrival must follow."
        )
    times = [_seconds(line[TIME_COLUMN], path, number) for number, line in enumerate(lines, start=2)]
    if times != sorted(times):
        raise ConfigError(f"--trace {path}: the arrivals are not in order. Sort them by {TIME_COLUMN}.")
    lengths: Sequence[int] = ()
    if LENGTH_COLUMN in lines[0]:
        lengths = [_length(line[LENGTH_COLUMN], path, number) for number, line in enumerate(lines, start=2)]
    due = tuple(time_scale * (time - times[0]) for time in times)
    return Profile(f"trace {path.stem}", None, due, tuple(lengths))


def _seconds(text: str | None, path: Path, number: int) -> float:
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
            f"--trace {path}, line {number}: {text!r} is neither seconds nor a date such as "
            "2026-01-31 12:00:00.5."
        ) from None


def _length(text: str | None, path: Path, number: int) -> int:
    if text is None or not text.isdecimal():
        raise ConfigError(f"--trace {path}, line {number}: {LENGTH_COLUMN} must be a count, got {text!r}.")
    return max(int(text), 1)
