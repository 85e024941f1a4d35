"""Collector: from finished requests to rows in the store, in a separate thread.

The event loop only puts a finished request into a bounded queue. If the queue is full, or the disk, requests
are served as before and not kept.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.params import SamplingParams
from paceline.engine.outputs import RequestOutput
from paceline.errors import PacelineError
from paceline.learn.data.rows import RowSampling, TrafficRow
from paceline.learn.data.split import unit_hash
from paceline.learn.data.store import TrafficStore
from paceline.learn.options import Decode, Redact

logger = logging.getLogger(__name__)

MAX_WAITING = 1024  # finished requests in the queue
EXPIRY_SECONDS = 60.0  # between two checks for rows that are too old
CLOSE_SECONDS = 5.0  # for the queue to be written at the end
COMPLETE = ("stop", "length")  # finish reasons of answers that are kept


@dataclass(frozen=True)
class Origin:
    """What is known about a request besides its tokens."""

    params: SamplingParams
    segment: str = ""
    cache_salt: str = ""  # of its body
    key: str = ""  # digest of its API key; empty: none
    allowed: bool = True  # false: its body says "store": false


@dataclass
class CollectorCounts:
    """Counts of finished requests by outcome. Each count is written by one thread."""

    kept: int = 0
    refused: int = 0  # by the client, by its key or by its salt
    not_sampled: int = 0  # not in --learn-share
    redacted: int = 0  # dropped by --learn-redact
    lost: int = 0  # the queue was full
    failed: int = 0  # could not be written, or redacted


@dataclass(frozen=True)
class Policy:
    """Which clients' requests are kept."""

    salts: str = "off"  # see LearnOptions
    only: str | None = None  # the one salt that is learned from, as salt_of gives it; None: by `salts`
    separate_keys: bool = False  # each API key is a salt of its own
    skipped_keys: frozenset[str] = frozenset()  # digests
    share: float = 1.0

    def salt_of(self, origin: Origin) -> str:
        """The salt that separates this request from others; empty: none."""
        return (origin.key if self.separate_keys else "") + origin.cache_salt

    def may_use_head(self, origin: Origin) -> bool:
        """Whether the learned head may draft for this request: not if it learns from another salt."""
        return self.only is None or self.salt_of(origin) == self.only

    def refuses(self, origin: Origin) -> bool:
        """Whether this request is not to be kept."""
        salt = self.salt_of(origin)
        salted = self.salts == "off" and bool(salt) if self.only is None else salt != self.only
        return salted or not origin.allowed or origin.key in self.skipped_keys


class Collector:
    """Keeps finished requests. `offer` is for the event loop and returns at once."""

    def __init__(
        self,
        store: TrafficStore,
        policy: Policy,
        redact: Redact | None = None,
        decode: Decode | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`redact` gets every row, and `decode` for its text; what it returns is kept, None is not."""
        self.counts = CollectorCounts()
        self._store, self.policy, self._clock = store, policy, clock
        self._redact, self._decode = redact, decode or (lambda ids: "")
        self._waiting: queue.Queue[list[TrafficRow] | None] = queue.Queue(MAX_WAITING)
        self._ended = False  # after a disk error: one warning, and nothing more is kept
        self._thread = threading.Thread(target=self._run, name="paceline-learn-rows", daemon=True)
        self._thread.start()

    def offer(self, output: RequestOutput, origin: Origin) -> None:
        """A request has finished."""
        if self._ended:
            return
        if self.policy.refuses(origin):
            self.counts.refused += 1
            return
        rows = self._rows(output, origin)
        self.counts.not_sampled += len(output.outputs) - len(rows)
        if not rows:
            return
        try:
            self._waiting.put_nowait(rows)
        except queue.Full:
            self.counts.lost += len(rows)

    def close(self) -> None:
        """Write what waits, and close the store."""
        try:
            self._waiting.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            return
        self._thread.join(CLOSE_SECONDS)

    def _rows(self, output: RequestOutput, origin: Origin) -> list[TrafficRow]:
        """The complete answers to a prompt that belong to the share that is kept."""
        answers = [each for each in output.outputs if each.finish_reason in COMPLETE]
        if not answers:
            return []
        params, store = origin.params, self._store
        sampling = RowSampling(
            params.temperature,
            params.truncation,
            constrained=params.structure is not None or params.allowed_token_ids is not None,
        )
        prompt, now = tuple(output.prompt_token_ids), self._clock()
        salt, key = store.hash(self.policy.salt_of(origin)), store.hash(origin.key)
        rows = [
            TrafficRow(prompt, tuple(answer.token_ids), origin.segment, sampling, salt, key, now)
            for answer in answers
        ]
        return [row for row in rows if self._sampled(row)]

    def _sampled(self, row: TrafficRow) -> bool:
        """Whether a row is in the share, by its hash: the same traffic gives the same rows."""
        share = self.policy.share
        return share >= 1.0 or unit_hash("share", row.prompt_ids + row.output_ids) < share

    # --- the collector's thread ---

    def _run(self) -> None:
        expiry = self._clock() + EXPIRY_SECONDS
        while True:
            try:
                rows = self._waiting.get(timeout=EXPIRY_SECONDS)
            except queue.Empty:
                rows = []
            try:
                if rows is None:
                    self._store.close()
                    return
                for row in rows:
                    self._keep(row)
                if (now := self._clock()) >= expiry:
                    self._store.expire()
                    expiry = now + EXPIRY_SECONDS
            except (OSError, PacelineError) as error:
                self._end(error, len(rows or ()))
                return

    def _keep(self, row: TrafficRow) -> None:
        if self._redact is not None:
            try:
                redacted = self._redact(row, self._decode)
            except Exception:  # of a user's function: a row that it cannot redact is not kept
                if not self.counts.failed:
                    logger.exception("--learn-redact has failed; such requests are not kept")
                self.counts.failed += 1
                return
            if redacted is None:
                self.counts.redacted += 1
                return
            row = redacted
        self.counts.kept += self._store.append(row)

    def _end(self, error: Exception, rows: int) -> None:
        """Stop collecting; serving continues."""
        self._ended = True
        self.counts.failed += rows
        logger.warning("no more traffic is kept: %s. Serving continues; make room, and restart.", error)
