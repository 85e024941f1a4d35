"""A process that hangs is killed, one that lives is not."""

from __future__ import annotations

import signal
import subprocess
import sys

PROGRAM = """
import asyncio, os, signal, sys
from paceline.scale.ray.watchdog import Watchdog

async def main():
    watchdog = Watchdog(0.5)
    await asyncio.sleep(1.2)
    if sys.argv[1] == "hang":
        os.kill(os.getpid(), signal.SIGSTOP)
    watchdog.stop()

asyncio.run(main())
"""


def test_a_stopped_process_is_killed() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM, "hang"], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL


def test_a_living_process_is_not() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM, "live"], timeout=60, check=True)
