"""TrafficStore: finished requests on disk, bounded in bytes and age.

    target.json               the model whose token ids these are, and a key for hashes of salts
    00000012-1763400000.rows  a segment: its number, and the time of its first row; only appended to
    writer.lock               held by the process that appends

A record is appended by one write. A killed process loses no row that was appended, because the system has
it; a machine that loses power may lose the rows since the last fsync, which is at the end of each segment.
Readers need no lock: they skip damaged and incomplete records. Old rows are dropped by whole segments.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.learn.data.rows import Damage, TrafficRow, decode_rows
from paceline.models.heads.config import TargetName
from paceline.options import check_integer, check_number, refuse_unknown

logger = logging.getLogger(__name__)

TARGET = "target.json"
SEGMENTS = 16  # in a full store; the oldest one is dropped as a whole
DAY = 86400.0  # seconds


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class StoreLimits:
    """How much traffic is kept."""

    max_bytes: int = 256 * 1024 * 1024
    max_age_s: float = 14 * DAY  # of a row, on disk too
    share: float = 1.0  # of the requests; for the collector, which chooses them

    def __post_init__(self) -> None:
        check_integer(ConfigError, "max_bytes", self.max_bytes, 1 << 16, None)
        check_number(ConfigError, "max_age_s", self.max_age_s, 0.0, 1e10, low_open=True)
        check_number(ConfigError, "share", self.share, 0.0, 1.0, low_open=True)

    @property
    def segment_bytes(self) -> int:
        return self.max_bytes // SEGMENTS

    @property
    def segment_seconds(self) -> float:
        return self.max_age_s / SEGMENTS


@dataclass(frozen=True)
class StoreCount:
    """What a store holds."""

    rows: int = 0
    damage: Damage = field(default_factory=Damage)
    bytes: int = 0
    oldest: float | None = None  # time of its first row
    newest: float | None = None


@dataclass(frozen=True)
class _Segment:
    path: Path
    number: int
    started: float  # time of its first row


class DamagedStoreError(ConfigError):
    """The store does not say which model its token ids belong to, because `target.json` is damaged."""


class TrafficStore:
    """The rows of one target. Any number of readers, and one writer, may use the folder at a time."""

    def __init__(
        self,
        folder: Path,
        target: TargetName | None = None,
        vocab_size: int | None = None,
        limits: StoreLimits | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """The store in a folder, which is made if it does not exist and a target is given.

        ConfigError if it belongs to another target. Without a target the store can only be read.
        """
        self.folder = folder
        self.limits = limits or StoreLimits()
        self._max_age = math.inf if limits is None else limits.max_age_s  # readers see rows of any age
        self._clock = clock
        self._lock: int | None = None  # file descriptor; None: this process has not appended
        self._file: int | None = None
        self._segment: _Segment | None = None
        facts = self._read_target()
        if facts is None:
            if target is None or vocab_size is None:
                raise ConfigError(
                    f"{folder} has no stored traffic: give the folder of --learn-dir of a server that has "
                    "served with --learn."
                )
            facts = {
                "version": 1,
                "fingerprint": target.fingerprint,
                "name": target.name,
                "vocab_size": vocab_size,
                "hash_key": secrets.token_hex(16),
            }
            self._write_target(facts)
        self.target = TargetName(facts["fingerprint"], facts["name"])
        self.vocab_size: int = facts["vocab_size"]
        self._hash_key = bytes.fromhex(facts["hash_key"])
        if target is not None and target.fingerprint != self.target.fingerprint:
            raise ConfigError(
                f"{folder} has the traffic of {self.target.name} ({self.target.fingerprint}), not of "
                f"{target.name} ({target.fingerprint}): token ids mean something else there. Give this "
                "model another --learn-dir."
            )

    def hash(self, secret: str) -> str:
        """A hash of a salt or an API key by this store's own key; empty for an empty one."""
        if not secret:
            return ""
        return hashlib.blake2b(secret.encode(), key=self._hash_key, digest_size=8).hexdigest()

    def append(self, row: TrafficRow) -> bool:
        """Keep a row; False if it is larger than the store. OSError if the disk is full.

        The store is then as it was before.
        """
        record = row.encode()
        if len(record) > self.limits.max_bytes:
            return False
        file = self._writable(len(record))
        size = os.fstat(file).st_size
        try:
            rest = memoryview(record)
            while rest:
                rest = rest[os.write(file, rest) :]
        except OSError:
            os.ftruncate(file, size)
            raise
        return True

    def rows(self, since: float = 0.0, damage: Damage | None = None) -> Iterator[TrafficRow]:
        """The rows that finished at `since` or later and are not too old, the oldest first.

        What cannot be read is skipped, and added to `damage`.
        """
        damage = damage or Damage()
        for segment in self._segments():
            yield from self._rows_of(segment, since, damage)

    def newest(self, count: int) -> list[TrafficRow]:
        """At most this many of the newest rows, the oldest first. Segments before theirs are not read."""
        found: list[TrafficRow] = []
        for segment in reversed(self._segments()):
            found = [*self._rows_of(segment), *found]
            if len(found) >= count:
                break
        return found[-count:]

    def _rows_of(
        self, segment: _Segment, since: float = 0.0, damage: Damage | None = None
    ) -> Iterator[TrafficRow]:
        since = max(since, self._clock() - self._max_age)
        try:
            data = segment.path.read_bytes()
        except FileNotFoundError:  # dropped meanwhile
            return
        rows = decode_rows(data, self.vocab_size, damage or Damage())
        yield from (row for row in rows if row.time >= since)

    def count(self) -> StoreCount:
        """What the store holds, read from the files."""
        damage = Damage()
        times = [row.time for row in self.rows(damage=damage)]
        held = sum(_size(segment.path) for segment in self._segments())
        oldest, newest = (min(times), max(times)) if times else (None, None)
        return StoreCount(len(times), damage, held, oldest, newest)

    def clear(self) -> None:
        """Delete all rows. A process that appends meanwhile begins a new segment."""
        for segment in self._segments():
            segment.path.unlink(missing_ok=True)

    def expire(self, needed: int = 0) -> None:
        """Drop the oldest segments: those with rows that are too old, and for `needed` bytes of room."""
        now = self._clock()
        segments = self._segments()
        sizes = [_size(segment.path) for segment in segments]
        excess = sum(sizes) + needed - self.limits.max_bytes
        for segment, size in zip(segments, sizes, strict=True):
            if excess <= 0 and segment.started >= now - self.limits.max_age_s:
                break
            segment.path.unlink(missing_ok=True)
            excess -= size

    def close(self) -> None:
        """End appending; the rows are on the disk when this returns."""
        self._end_segment()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _segments(self) -> list[_Segment]:
        """The segments, the oldest first. Files with other names are not ours."""
        found = []
        for path in self.folder.glob("*-*.rows"):
            number, _, started = path.stem.partition("-")
            if number.isdecimal() and started.isdecimal():
                found.append(_Segment(path, int(number), float(started)))
        return sorted(found, key=lambda segment: segment.number)

    def _writable(self, needed: int) -> int:
        """The file to append `needed` bytes to: a new one if the current one is full, old or deleted."""
        self._take_lock()
        now, limits = self._clock(), self.limits
        if self._file is not None and self._segment is not None:
            status = os.fstat(self._file)
            full = status.st_size + needed > limits.segment_bytes
            old = now - self._segment.started > limits.segment_seconds
            if status.st_nlink and not full and not old:
                return self._file
            self._end_segment()
        # room for all of the segment at once, because looking through the folder takes longer than a row
        self.expire(needed=max(needed, limits.segment_bytes))
        # never one of an earlier process: its last record may be incomplete
        number = max((segment.number for segment in self._segments()), default=0) + 1
        path = self.folder / f"{number:08}-{int(now)}.rows"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        self._segment = _Segment(path, number, float(int(now)))
        return self._file

    def _end_segment(self) -> None:
        if self._file is not None:
            os.fsync(self._file)
            os.close(self._file)
            self._file = self._segment = None

    def _take_lock(self) -> None:
        """Become the only writer; ConfigError if another process is."""
        if self._lock is not None:
            return
        lock = os.open(self.folder / "writer.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ConfigError(
                f"Another server keeps its traffic in {self.folder}: give this one another --learn-dir."
            ) from None
        self._lock = lock

    def _read_target(self) -> dict[str, Any] | None:
        """The facts of target.json; None if there is none."""
        path = self.folder / TARGET
        try:
            facts = json.loads(path.read_text())
            if facts["version"] == 1:
                return {
                    "fingerprint": str(facts["fingerprint"]),
                    "name": str(facts["name"]),
                    "vocab_size": int(facts["vocab_size"]),
                    "hash_key": bytes.fromhex(facts["hash_key"]).hex(),
                }
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedStoreError(
                f"{path} cannot be read ({error!r}), so it is not known whose token ids are beside it: "
                "delete the folder, or give another --learn-dir."
            ) from None
        raise ConfigError(f"{path} is of version {facts['version']}, not 1: give another --learn-dir.")

    def _write_target(self, facts: dict[str, Any]) -> None:
        """Write target.json atomically: a kill leaves none or a complete one."""
        unfinished = self.folder / f"{TARGET}.unfinished"
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with unfinished.open("w") as file:
                file.write(json.dumps(facts) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, self.folder / TARGET)
        except OSError as error:
            raise ConfigError(
                f"{self.folder} cannot be written ({error}): give another folder with --learn-dir."
            ) from error


def open_store(
    folder: Path, target: TargetName, vocab_size: int, limits: StoreLimits | None = None
) -> TrafficStore:
    """The store of a server. One that is damaged is put aside: it must not keep the server from starting."""
    try:
        return TrafficStore(folder, target, vocab_size, limits)
    except DamagedStoreError as error:
        aside = folder.with_name(f"{folder.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(folder, aside)
        logger.warning("the traffic on disk starts empty, the old folder is now %s: %s", aside, error)
        return TrafficStore(folder, target, vocab_size, limits)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
