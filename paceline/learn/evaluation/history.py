"""History: the heads that have served, and which one serves now.

    heads/0003/             a head in the usual format, card.json, and the hashes of its files in it
    heads/current           {"number": 3, "before": [0, 2]}: replaced at once or not at all
    heads/decisions.jsonl   one line for each decision, with its evidence
    heads/live.json         the latest measurements of drafts on live traffic
    heads/lock              held while current is read and replaced

Number 0 is the head that the server was started with: shipped, or named by the user. It is never copied or
deleted. If a head's files are damaged, the one that served before it is used.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError

CARD, CURRENT, DECISIONS, LIVE = "card.json", "current", "decisions.jsonl", "live.json"
KEPT = 5  # heads that stay on the disk beside the current one
CHUNK = 1 << 20  # bytes hashed at a time
MAX_DECISIONS = 200  # lines that are kept


@dataclass(frozen=True)
class Head:
    """A head that serves or has served."""

    number: int  # 0: the one that the server was started with
    path: Path


@dataclass(frozen=True)
class _Current:
    number: int = 0
    before: tuple[int, ...] = ()  # heads that served before it, the last one last


class History:
    """The heads of a folder. Processes may share it: a command changes what a server then follows."""

    def __init__(
        self, folder: Path, first: Path, keep: int = KEPT, clock: Callable[[], float] = time.time
    ) -> None:
        """`first` is the head to begin with; `keep` heads stay beside the current one."""
        self.folder, self._first, self._keep, self._clock = folder, first, keep, clock
        self._intact: dict[int, tuple[object, ...]] = {}  # sizes and times of files whose hashes were right

    def current(self) -> Head:
        """The head to serve: the last one promoted whose files are intact."""
        return next(self.succession())

    def succession(self) -> Iterator[Head]:
        """The heads whose files are intact: the current one, those that served before it, the first."""
        state = self._read()
        for number in (state.number, *reversed(state.before)):
            if number and (found := self.find(number)) is not None:
                yield found
        yield Head(0, self._first)

    def find(self, number: int) -> Head | None:
        """The head of this number; None if it is not there or its files are damaged."""
        if number == 0:
            return Head(0, self._first)
        path = self._path(number)
        try:
            hashes = json.loads((path / CARD).read_text())["files"]
            stats = [(name, (path / name).stat()) for name in hashes]
            seen = tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
            if self._intact.get(number) != seen:  # hashed once, because a server calls this every few seconds
                if not hashes or any(_hash(path / name) != value for name, value in hashes.items()):
                    return None
                self._intact[number] = seen
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return Head(number, path)

    def numbers(self) -> list[int]:
        """The heads in the folder, the oldest first."""
        return sorted(int(path.name) for path in self.folder.glob("[0-9]*") if path.name.isdecimal())

    def card(self, number: int) -> dict[str, Any]:
        """What is recorded about a head; empty for number 0."""
        found: dict[str, Any] = {}
        if number and self.find(number) is not None:
            found = json.loads((self._path(number) / CARD).read_text())
        return found

    def trained(self, number: int) -> float:
        """When the training of a head began, in seconds since 1970; 0 if that is not known."""
        return float(self.card(number).get("evidence", {}).get("trained", 0.0))

    def add(self, candidate: Path, evidence: Mapping[str, Any]) -> Head:
        """A copy of a candidate in the history. It does not serve before it is promoted."""
        with self._locked():
            number = max([0, *self.numbers(), *self._read().before]) + 1
            unfinished = self.folder / "unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.copytree(candidate, unfinished)
            names = sorted(path.name for path in unfinished.iterdir() if path.is_file())
            card = {
                "number": number,
                "time": self._clock(),
                "evidence": dict(evidence),
                "files": {name: _hash(unfinished / name) for name in names},
            }
            _write(unfinished / CARD, json.dumps(card, indent=1))
            for name in names:
                _sync(unfinished / name)
            os.replace(unfinished, self._path(number))
        return Head(number, self._path(number))

    def promote(self, number: int) -> Head:
        """Let a head serve from now on. ConfigError if there is no intact head of this number."""
        if (found := self.find(number)) is None:
            there = ", ".join(str(each) for each in [0, *self.numbers()] if self.find(each))
            raise ConfigError(f"There is no intact head {number} in {self.folder}: choose one of {there}.")
        with self._locked():
            state = self._read()
            if state.number != number:
                before = [each for each in (*state.before, state.number) if each != number]
                self._replace(_Current(number, tuple(before)))
            self._prune()
        return found

    def rollback(self) -> Head:
        """Let the previous head serve again, if its files are intact."""
        with self._locked():
            state = self._read()
            before = list(state.before)
            while before and self.find(before[-1]) is None:
                before.pop()
            number = before.pop() if before else 0
            self._replace(_Current(number, tuple(before)))
        return self.current()

    def previous(self) -> Head | None:
        """The head that a rollback would bring back; None if none has served before."""
        state = self._read()
        found = (self.find(number) for number in reversed(state.before))
        return next((head for head in found if head is not None), None)

    def note(self, decision: str, **evidence: Any) -> None:
        """Append a decision to the log of decisions."""
        line = json.dumps({"time": self._clock(), "decision": decision, **evidence})
        with self._locked():
            lines = [*self._decision_lines()[1 - MAX_DECISIONS :], line]
            _write(self.folder / f"{DECISIONS}.unfinished", "\n".join(lines) + "\n")
            os.replace(self.folder / f"{DECISIONS}.unfinished", self.folder / DECISIONS)

    def note_live(self, **facts: Any) -> None:
        """Store the latest measurements of drafts on live traffic, in place of the earlier ones."""
        self._make_folder()
        unfinished = self.folder / f"{LIVE}.unfinished"
        unfinished.write_text(json.dumps({"time": self._clock(), **facts}))
        os.replace(unfinished, self.folder / LIVE)

    def live(self) -> dict[str, Any]:
        """The latest measurements of drafts on live traffic; empty if there are none."""
        try:
            found: dict[str, Any] = json.loads((self.folder / LIVE).read_text())
            return found
        except (OSError, ValueError):
            return {}

    def decisions(self) -> list[dict[str, Any]]:
        """The decisions so far, the oldest first."""
        found = []
        for line in self._decision_lines():
            try:
                found.append(json.loads(line))
            except ValueError:  # damaged: the others are shown
                continue
        return found

    def _decision_lines(self) -> list[str]:
        try:
            return (self.folder / DECISIONS).read_text(errors="replace").splitlines()
        except OSError:
            return []

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:04}"

    def _read(self) -> _Current:
        """The content of `current`; the first head if it is missing or damaged."""
        try:
            facts = json.loads((self.folder / CURRENT).read_text())
            return _Current(int(facts["number"]), tuple(int(number) for number in facts["before"]))
        except (OSError, ValueError, KeyError, TypeError):
            return _Current()

    def _replace(self, state: _Current) -> None:
        unfinished = self.folder / f"{CURRENT}.unfinished"
        _write(unfinished, json.dumps(asdict(state)) + "\n")
        os.replace(unfinished, self.folder / CURRENT)

    def _prune(self) -> None:
        """Delete all heads but the current one and the last ones that served before it."""
        state = self._read()
        kept = {state.number, *[number for number in state.before if number][-self._keep :]}
        for number in self.numbers():
            if number not in kept:
                shutil.rmtree(self._path(number), ignore_errors=True)

    def _make_folder(self) -> None:
        # heads can reveal what they were trained on
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """A context in which no other process changes the history."""
        self._make_folder()
        with (self.folder / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _hash(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def _write(path: Path, content: str) -> None:
    """Write a small file; it is on the disk when this returns."""
    with path.open("w") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
