"""The app over the toy model, on a real socket, in a thread of this process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from paceline.engine.async_engine import AsyncEngine
from paceline.engine.engine import Engine
from paceline.serve.app import make_app
from paceline.serve.service import Service
from tests.toy import ToyTokenizer


@contextmanager
def toy_server(engine: Engine, max_queue: int = 100) -> Iterator[str]:
    """The address of a server over this engine, for as long as the context lasts."""
    listener = socket.create_server(("127.0.0.1", 0))
    ready = threading.Event()
    servers: list[uvicorn.Server] = []

    async def main() -> None:
        tokenizer = ToyTokenizer()
        front = AsyncEngine(engine, tokenizer, max_queue=max_queue)
        front.start()
        app = make_app(Service(front, tokenizer, ("toy",)))  # type: ignore[arg-type]
        servers.append(uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", ws="none")))
        ready.set()
        await servers[0].serve([listener])
        await front.stop()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    ready.wait()  # the socket listens already: who connects now is served soon
    try:
        yield "http://{}:{}".format(*listener.getsockname())
    finally:
        servers[0].should_exit = True
        thread.join()
