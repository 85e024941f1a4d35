"""A `paceline serve` in its own process, for the duration of a measurement."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from paceline.bench.servers.client import ClientError, Server, get
from paceline.errors import PacelineError

START_SECONDS = 180.0
STOP_SECONDS = 30.0
ADDRESS = re.compile(r"http://([\w.]+):(\d+)")


class ServerProcessError(PacelineError):
    """The server could not start."""


class ServerProcess:
    """`paceline serve ARGUMENTS` on a free port."""

    def __init__(self, *arguments: str, api_key: str | None = None, own_group: bool = False) -> None:
        """Start it and wait until it is ready. `own_group`: signals can be sent to it and its children."""
        self._log = tempfile.NamedTemporaryFile(prefix="paceline-serve-", suffix=".log")  # noqa: SIM115  see stop
        keys = [] if api_key is None else ["--api-key", api_key]
        command = [sys.executable, "-m", "paceline", "serve", *arguments, "--port", "0", *keys]
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=own_group
        )
        try:
            self.server = self._ready(api_key)
        except BaseException:
            self.kill()
            raise

    @property
    def url(self) -> str:
        return f"http://{self.server.host}:{self.server.port}"

    @property
    def log(self) -> str:
        """Its output so far."""
        return Path(self._log.name).read_text(errors="replace")

    def stop(self) -> int:
        """Send SIGTERM, which lets running requests finish; returns the exit status."""
        self.process.terminate()
        try:
            return self.process.wait(STOP_SECONDS)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill it, if it still runs."""
        self.process.kill()
        self.process.wait()
        self._log.close()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _ready(self, api_key: str | None) -> Server:
        """The address in its log, once /health answers 200."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise ServerProcessError(
                    f"the server did not start. Its last words: {self.log.strip()[-800:]}"
                )
            if match := ADDRESS.search(self.log):
                server = Server(match[1], int(match[2]), api_key=api_key)
                if _is_well(server):
                    return server
            time.sleep(0.05)
        raise ServerProcessError(
            f"the server was not ready after {START_SECONDS:.0f} seconds. {self.log[-800:]}"
        )


def _is_well(server: Server) -> bool:
    try:
        return asyncio.run(get(server, "/health")).status == 200
    except ClientError:
        return False


def serve_flags(threads: int | None, quantization: str, others: Sequence[str] = ()) -> list[str]:
    """Engine options as flags of `paceline serve`."""
    flags = ["--quantization", quantization]
    return [*flags, *([] if threads is None else ["--threads", str(threads)]), *others]
