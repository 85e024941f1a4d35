"""Learned draft heads on replicas: an ingress sends them, and replicas report their steps to it.

    ingress                                       replica
    trainer: the path of its Activity       -->   on the same machine, its passes are known to be disturbed
    report                                  -->   from now on, what each of its steps did:
                                           <--    step: requests, rows, tokens, seconds, drafts
    head: its id, its method                -->   if it has the files of this id, it loads them, else
                                           <--    wants: id
    part: id, file, bytes in base64         -->   written to a folder of its own
                                           <--    serves: id, and why not if it could not be used

A replica's state names the head that it drafts with. An ingress that learns sends a `head` message to every
replica that uses another head than the current one, so new and restarted replicas get it too.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from paceline.core.request import Request
from paceline.core.stats import DraftStats, StepStats
from paceline.draft.base import UnboundDrafter
from paceline.engine.frontend.async_engine import AsyncEngine, Observer
from paceline.engine.output_processor import Delta
from paceline.errors import BackendError
from paceline.learn.activity import Activity
from paceline.models.heads.checkpoint import WEIGHTS
from paceline.models.heads.fingerprint import head_fingerprint
from paceline.scale.remote.channel import Connection, Link, Message

logger = logging.getLogger(__name__)

FIRST = ""  # id of the head that replicas are started with: it is never sent
FILES = ("config.json", WEIGHTS[0])
PART_BYTES = 1 << 20  # of a message; requests can be sent between two of them
LOOK_SECONDS = 1.0  # the longest time between two checks of which head replicas use
KEPT = 3  # heads on the disk of a replica: the two of a trial, and the previous one
UNFINISHED = ".unfinished"  # the suffix of a head's folder until all parts are there
FOLDERS = "paceline-heads-"  # of replicas, with their process ids
ORDERED = ("report", "trainer", "head", "part")  # kinds of messages for HeadReceiver


# --- at a replica ---


class StepReports:
    """An Observer of a replica's engine that tells ingresses what each step did. Made in the event loop."""

    def __init__(self) -> None:
        self.listeners: WeakSet[Connection] = WeakSet()
        self._loop = asyncio.get_running_loop()

    def step(self, stats: StepStats, deltas: Sequence[Delta]) -> None:
        if self.listeners and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._send, encode_step(stats))

    def aborted(self, requests: Sequence[Request]) -> None:
        return

    def _send(self, message: Message) -> None:
        for connection in list(self.listeners):
            connection.send(message)


class HeadReceiver:
    """Lets a replica's engine draft with the heads that ingresses send. Used in the event loop only."""

    def __init__(
        self, engine: AsyncEngine, load: Callable[[str, Path | None], UnboundDrafter], reports: StepReports
    ) -> None:
        """`load` gives a drafter of a method with the head in a folder; None: the one it was started with."""
        self.serving = FIRST
        self._engine, self._load, self._reports = engine, load, reports
        remove_orphans()
        self._folder = TemporaryDirectory(prefix=f"{FOLDERS}{os.getpid()}-", ignore_cleanup_errors=True)
        self._turn = asyncio.Lock()  # one head after the other, in the order in which they are ordered
        self._tasks: set[asyncio.Task[None]] = set()

    def received(self, connection: Connection, kind: str, content: Mapping[str, Any]) -> None:
        """Handle a message from an ingress."""
        if kind == "report":
            self._reports.listeners.add(connection)
        elif kind == "trainer":
            with suppress(OSError):  # it is on another machine, where this file is missing or another one
                self._engine.watch_trainer(Activity(Path(content["path"]), readonly=True))
        elif kind == "head":
            task = asyncio.create_task(self._serve(connection, content["id"], content["method"]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            try:
                self._write(**content)
            except OSError as error:  # such as a full disk: not of the connection, on which requests run
                logger.warning("the head %s cannot be stored: %s", content["id"], error)
                shutil.rmtree(self._path(content["id"]).with_suffix(UNFINISHED), ignore_errors=True)
                connection.send(["serves", content["id"], str(error)])

    async def _serve(self, connection: Connection, head: str, method: str) -> None:
        async with self._turn:
            folder = None if head == FIRST else self._path(head)
            if folder is not None and not folder.is_dir():
                connection.send(["wants", head])
                return
            try:
                await self._engine.replace_head(method, await asyncio.to_thread(self._load, method, folder))
            except Exception as error:  # whatever is wrong with the new head, the current one stays in use
                logger.warning("the head %s cannot be used: %s", head, error)
                connection.send(["serves", head, str(error)])
                return
            self.serving = head
            connection.send(["serves", head, None])

    def _write(self, id: str, file: str, start: int, data: str, last: bool) -> None:
        """Add a part to a file of a head. The folder gets its name when the last one is there."""
        if file not in FILES:
            raise ValueError(f"a head with a file {file!r}")
        unfinished = self._path(id).with_suffix(UNFINISHED)
        unfinished.mkdir(exist_ok=True)
        with (unfinished / file).open("ab" if start else "wb") as target:
            if target.tell() != start:
                raise OSError(f"a part of {file} before byte {start} was not stored")
            target.write(base64.b64decode(data))
        if last:
            shutil.rmtree(self._path(id), ignore_errors=True)
            unfinished.rename(self._path(id))
            heads = sorted(Path(self._folder.name).iterdir(), key=lambda path: path.stat().st_mtime)
            for path in heads[:-KEPT]:
                if path.name != self.serving:
                    shutil.rmtree(path, ignore_errors=True)

    def _path(self, head: str) -> Path:
        binascii.unhexlify(head)  # ValueError if it could be any other path
        return Path(self._folder.name) / head


def remove_orphans() -> None:
    """Delete the heads of replicas that were killed."""
    for folder in Path(gettempdir()).glob(f"{FOLDERS}*-*"):
        owner = folder.name.removeprefix(FOLDERS).partition("-")[0]
        try:
            os.kill(int(owner), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except (ValueError, PermissionError):  # not ours
            continue


def encode_step(stats: StepStats) -> Message:
    """The fields of a step that a Learner's observers read."""
    drafts = [[draft.drafter, draft.segment, draft.count, draft.accepted] for draft in stats.drafts]
    counts = (stats.requests, stats.rows, stats.prefill_tokens, stats.new_tokens)
    return ["step", counts, [stats.failed, stats.disturbed], stats.total_time, drafts]


def decode_step(
    counts: Sequence[int], flags: Sequence[bool], seconds: float, drafts: Sequence[Any]
) -> StepStats:
    """The step, with the fields that a Learner's observers read."""
    requests, rows, prefill_tokens, new_tokens = counts
    drafts = tuple(
        DraftStats("", segment, drafter, 0, 0, accepted, count=count)
        for drafter, segment, count, accepted in drafts
    )
    return StepStats(
        requests=requests,
        rows=rows,
        prefill_tokens=prefill_tokens,
        new_tokens=new_tokens,
        failed=flags[0],
        disturbed=flags[1],
        forward_time=seconds,
        drafts=drafts,
    )


# --- at the ingress ---


@dataclass(frozen=True)
class _Order:
    """The head that replicas are to draft with."""

    id: str
    method: str
    folder: Path


class HeadPush:
    """Lets all replicas of an ingress draft with one head. Used in the event loop only."""

    def __init__(
        self, links: Callable[[], Mapping[str, Link]], first: Path, observers: Sequence[Observer]
    ) -> None:
        """`links`: to the current replicas; `observers` get their steps."""
        self._links, self._first, self._observers = links, first, observers
        self._order: _Order | None = None
        self._activity: Path | None = None  # of the trainer
        self._asked: WeakSet[Link] = WeakSet()  # to report their steps
        self._ordered: WeakKeyDictionary[Link, str] = WeakKeyDictionary()  # the ids that were ordered last
        self._sending: set[tuple[str, str]] = set()  # replica and id
        self._refused: dict[Link, str] = {}  # why a replica does not use the current head
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def handlers(self) -> Mapping[str, Callable[..., None]]:
        """What to do with a replica's messages, by their kind."""
        return {
            "state": self._state,
            "wants": self._start_sending,
            "serves": self._serves,
            "step": self._step,
        }

    async def replace(self, method: str, folder: Path) -> None:
        """Return when all current replicas draft with the head in this folder.

        BackendError if one of them cannot: the others draft with it until another head is ordered.
        """
        identity = FIRST if folder == self._first else await asyncio.to_thread(head_fingerprint, folder)
        self._order, self._refused = _Order(identity, method, folder), {}
        for link in self._links().values():
            self._send_order(link)
        while any(link.state.get("head") != identity for link in self._links().values()):
            if self._refused:
                link, why = next(iter(self._refused.items()))
                raise BackendError(f"replica {link.replica} cannot use the head in {folder}: {why}")
            self._changed.clear()
            with suppress(TimeoutError):  # a replica that is lost says nothing
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._changed.wait()

    def watch_trainer(self, activity: Path) -> None:
        """Send the path of the trainer's Activity to all replicas, also to later ones."""
        self._activity = activity
        for link in self._asked:
            self._send_activity(link)

    def _send_activity(self, link: Link) -> None:
        if self._activity is not None:
            link.send(["trainer", {"path": str(self._activity)}])

    def _send_order(self, link: Link) -> None:
        assert self._order is not None
        self._ordered[link] = self._order.id
        link.send(["head", {"id": self._order.id, "method": self._order.method}])

    def _state(self, link: Link, state: Mapping[str, Any]) -> None:
        self._changed.set()
        if link not in self._asked:
            self._asked.add(link)
            link.send(["report", {}])
            self._send_activity(link)
        order = self._order
        if order is not None and state["head"] != order.id and self._ordered.get(link) != order.id:
            self._send_order(link)

    def _serves(self, link: Link, head: str, why_not: str | None) -> None:
        if why_not is None:
            link.state["head"] = head
        elif self._order is not None and head == self._order.id:
            self._refused[link] = why_not
        self._changed.set()

    def _start_sending(self, link: Link, head: str) -> None:
        order = self._order
        if order is None or head != order.id or link in self._refused:
            return
        if (link.replica, head) not in self._sending:
            self._sending.add((link.replica, head))
            task = asyncio.create_task(self._send_files(link, order))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send_files(self, link: Link, order: _Order) -> None:
        """The files in parts; each is on its way before the next one is read."""
        try:
            for file in FILES:
                with (order.folder / file).open("rb") as source:
                    start, size = 0, (order.folder / file).stat().st_size
                    while data := await asyncio.to_thread(source.read, PART_BYTES):
                        if link in self._refused:  # it has no room
                            return
                        last = file == FILES[-1] and start + len(data) == size
                        part = {"id": order.id, "file": file, "start": start, "last": last}
                        link.send(["part", {**part, "data": base64.b64encode(data).decode()}])
                        start += len(data)
                        await link.drain()
            self._send_order(link)
        except OSError as error:  # of the disk here, or the replica is gone
            self._refused[link] = str(error)
            self._changed.set()
        finally:
            self._sending.discard((link.replica, order.id))

    def _step(self, link: Link, *step: Any) -> None:
        stats = decode_step(*step)
        for observer in self._observers:
            observer.step(stats, ())
