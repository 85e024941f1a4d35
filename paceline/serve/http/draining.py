"""DrainingServer: uvicorn, stopped by signals without losing a running request.

The first SIGTERM, SIGINT or SIGHUP drains: new requests are refused, running ones finish. The second
stops at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, cast

import uvicorn

from paceline.serve.engines import EngineGroup
from paceline.serve.http.connections import Connection, ConnectionLimits
from paceline.serve.observability.logs import log_event
from paceline.serve.observability.metrics import Metrics
from paceline.serve.options import ServeOptions

logger = logging.getLogger(__name__)

LAST_BYTES_SECONDS = 5.0  # for answers to reach their clients after the engine has stopped
SAME_SIGNAL_SECONDS = 0.5  # `timeout` sends a signal to the process and to its group: count it once


class DrainingServer(uvicorn.Server):
    """uvicorn with its own drain: the port stays open until the running requests have finished."""

    def __init__(self, app: Any, engine: EngineGroup, options: ServeOptions, metrics: Metrics) -> None:
        limits = ConnectionLimits(
            options.max_connections, options.client_timeout, partial(metrics.answered, "")
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=cast(Any, partial(Connection, limits=limits, idle={})),
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                lifespan="off",
                ws="none",
                root_path=options.root_path,
                timeout_keep_alive=options.timeout_keep_alive,
                timeout_graceful_shutdown=int(LAST_BYTES_SECONDS),
            )
        )
        self._engine = engine
        self._options = options
        self._signal_at: float | None = None  # time of the first signal
        self._stopping: asyncio.Task[None] | None = None  # held, or it could be collected before it ends
        self._loop = asyncio.get_running_loop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, and log the address."""
        await super().startup(sockets)
        assert sockets is not None
        log_event(logger, "listening", url=_url(self._options.host, sockets[0]))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while serving: uvicorn's, and SIGHUP unless it is ignored (nohup)."""
        with super().capture_signals():
            if (
                threading.current_thread() is not threading.main_thread()
                or signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            ):
                yield
                return
            before = signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal. (uvicorn's own handler would raise it again at the end: exit code not 0.)"""
        now = time.monotonic()
        if self._signal_at is None:
            self._signal_at = now
            self._loop.call_soon_threadsafe(self._begin_to_stop, sig)
        elif now - self._signal_at > SAME_SIGNAL_SECONDS:
            self._stop_now(sig)

    def _begin_to_stop(self, sig: int) -> None:
        self._stopping = asyncio.create_task(self._drain(sig))

    async def _drain(self, sig: int) -> None:
        """Let running requests finish within drain_timeout, then abort them and stop the server."""
        waiting = self._engine.num_requests
        log_event(logger, "draining", signal=signal.Signals(sig).name, requests=waiting)
        try:  # a stuck engine finishes no request
            async with asyncio.timeout(0 if self._engine.stuck else self._options.drain_timeout):
                await self._engine.drain()
        except TimeoutError:
            log_event(logger, "drain timed out", level=logging.WARNING, requests=self._engine.num_requests)
        try:
            async with asyncio.timeout(LAST_BYTES_SECONDS):
                await self._engine.stop()
        except TimeoutError:  # a pass that does not end
            self._stop_now(sig)
        self.should_exit = True

    def _stop_now(self, sig: int) -> None:
        """End the process at once, without waiting for a pass, a grammar or a slow client."""
        log_event(logger, "stopped now", level=logging.WARNING, signal=signal.Signals(sig).name)
        logging.shutdown()
        os._exit(128 + sig)


def _url(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
