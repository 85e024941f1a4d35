"""Jobs: training and scoring in separate processes.

A process that is killed, runs out of memory or crashes while it reads a candidate's files gives no result,
and the server is not affected. Each runs at the lowest priority and ends with the server, even if that is
killed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from paceline.learn.data.folder import NOTHING_BETTER, LearnFolder
from paceline.learn.evaluation.gate import Replay

logger = logging.getLogger(__name__)

CANDIDATE = "candidate.json"  # the last file that the trainer writes
LAST_LINES = 400  # characters of stderr in a warning


class Jobs(Protocol):
    """Training and scoring by other processes. They may be killed at any time, and then give no result."""

    steps: int  # of all trainings so far
    planned_steps: int  # of the training that runs; 0: none does, or it still loads
    scored_rows: int  # of the scoring that runs
    planned_rows: int  # to score, at most; 0: none is scored, or it still loads

    async def train(self, present: Path, since: float) -> Path | None:
        """The folder of a new candidate, trained from the current head; None if there is none.

        Rows since this time, in seconds since 1970, are new; older ones are replayed.
        """
        ...

    async def score(self, present: Path, candidate: Path) -> Replay | None:
        """The scores of both heads on the same held-back rows; None if they could not be scored."""
        ...

    def pause(self, wanted: bool) -> None:
        """Stop the processes, or let them continue. A call that changes nothing is cheap."""
        ...

    def discard(self, candidate: Path) -> None:
        """Delete a candidate that was judged."""
        ...


class ProcessJobs:
    """Starts `paceline learn train` and `paceline learn score`, one at a time."""

    def __init__(
        self, folder: LearnFolder, model: str, train: Sequence[str], both: Sequence[str] = ()
    ) -> None:
        """`train` are further arguments of the training, such as its length; `both` of both commands."""
        self._folder, self._model = folder, model
        self._both, self._train = tuple(both), tuple(train)
        self.steps = self.planned_steps = self.scored_rows = self.planned_rows = 0
        self._paused = False
        self._process: asyncio.subprocess.Process | None = None  # that runs now

    async def train(self, present: Path, since: float) -> Path | None:
        out = self._folder.candidate
        shutil.rmtree(out, ignore_errors=True)  # of a run that was killed
        how = ("--since", str(since), "--json", *self._train)
        status = await self._run("train", present, "--out", str(out), *how)
        whole = status == 0 and (out / CANDIDATE).is_file()
        if status not in (0, NOTHING_BETTER):
            raise OSError(f"the trainer has ended with status {status}")
        return out if whole else None

    async def score(self, present: Path, candidate: Path) -> Replay | None:
        out = self._folder.scores
        out.unlink(missing_ok=True)
        how = ("--candidate", str(candidate), "--out", str(out), "--json")
        status = await self._run("score", present, *how)
        if status not in (0, NOTHING_BETTER):  # the gate judges the scores
            return None
        try:
            return Replay.from_json(json.loads(out.read_text()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("learn: the scores cannot be read: %s", error)
            return None

    def pause(self, wanted: bool) -> None:
        """Pause by signals: a process stops at once, in the middle of a step, without needing a core to
        notice."""
        if wanted or self._paused:  # stop it again, in case another process has let it continue
            self._paused = wanted
            self._signal()

    def _signal(self) -> None:
        if self._process is not None and self._process.returncode is None:
            _send(self._process, signal.SIGSTOP if self._paused else signal.SIGCONT)

    def discard(self, candidate: Path) -> None:
        shutil.rmtree(candidate, ignore_errors=True)

    async def _run(self, command: str, present: Path, *arguments: str) -> int:
        """The exit status of a command over the stored traffic. Cancelling this ends the command."""
        traffic = ("--from", str(self._folder.root), "--head", str(present))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "paceline", "learn", command, self._model, *traffic, *arguments),
            *("--end-with-parent", *self._both),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        self._process = process
        try:
            if self._paused:
                self._signal()
            assert process.stdout is not None
            assert process.stderr is not None
            _, errors = await asyncio.gather(self._count(process.stdout), process.stderr.read())
            await process.wait()
        finally:
            self._process = None
            if process.returncode is None:  # cancelled
                _send(process, signal.SIGKILL)
                await process.wait()
        status = process.returncode or 0
        if status not in (0, NOTHING_BETTER):
            tail = errors.decode(errors="replace").strip()[-LAST_LINES:]
            logger.warning("learn: `paceline learn %s` has ended with status %d: %s", command, status, tail)
        return status

    async def _count(self, records: asyncio.StreamReader) -> None:
        """Count the steps or rows that a job reports, one JSON object per line."""
        before = self.steps
        async for line in records:
            with suppress(ValueError, TypeError, KeyError):
                record = json.loads(line)
                total = int(record["total"])
                if "step" in record:
                    self.steps, self.planned_steps = before + int(record["step"]), total
                else:
                    self.scored_rows, self.planned_rows = int(record["scored"]), total
        self.planned_steps = self.scored_rows = self.planned_rows = 0


def _send(process: asyncio.subprocess.Process, number: int) -> None:
    """Send a signal to a job and to what it has started."""
    # not process.send_signal: it would reap an ended process before the task that waits for it
    try:
        os.killpg(process.pid, number)  # its group, see Yielding
    except ProcessLookupError:  # it has just started, or has ended
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
