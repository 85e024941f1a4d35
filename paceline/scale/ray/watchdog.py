"""Watchdog: a child process that kills its parent when the parent is silent for too long.

Ray asks a process to end. A process that is stopped or deadlocked never does, and keeps its CPUs or GPU, so
that no other replica can replace it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import suppress

_PROGRAM = """
import os, select, signal, sys
seconds, parent = float(sys.argv[1]), int(sys.argv[2])
while True:
    if not select.select([0], [], [], seconds)[0]:
        os.kill(parent, signal.SIGKILL)
        break
    if not os.read(0, 4096):  # the parent has ended
        break
"""
FEEDS = 10  # per timeout


class Watchdog:
    """Kills this process if its event loop does nothing for `seconds`."""

    def __init__(self, seconds: float) -> None:
        """Start it. Call this in the event loop."""
        self._seconds = seconds
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, str(seconds), str(os.getpid())],
            stdin=subprocess.PIPE,
            bufsize=0,
        )
        self._feeding = asyncio.create_task(self._feed())

    def stop(self) -> None:
        """End the watch: this process may then be silent."""
        self._feeding.cancel()
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()

    async def _feed(self) -> None:
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):  # somebody killed the child
            while True:
                self._child.stdin.write(b".")
                await asyncio.sleep(self._seconds / FEEDS)
