"""A whole server around the toy model: on a real socket in a thread, or in its own process."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.forward import ForwardBatch, ForwardOutput
from paceline.engine.engine import Engine
from paceline.serve.loading import ServedModel
from paceline.serve.observability.logs import set_up_logs
from paceline.serve.options import ServeOptions
from paceline.serve.routes.file import RouteTable
from paceline.serve.server import bind, run_models
from tests.toy import ToyBackend, roomy_engine, toy_engine

if TYPE_CHECKING:
    from paceline.serve.kv_events.publisher import Publisher

PATIENCE = 30.0  # seconds after which waiting fails
FACTS = {"version": "test"}
NAMES = ("toy",)


class Gate(ToyBackend):
    """A backend that a test can stop between two passes."""

    def __init__(self) -> None:
        super().__init__(max_rows=64)
        self.open = threading.Event()
        self.open.set()

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        assert self.open.wait(PATIENCE)
        return super().forward(batch)


@dataclass
class Answer:
    """An HTTP answer, read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def message(self) -> str:
        return str(self.json["error"]["message"])


@dataclass
class Client:
    """Speaks HTTP over its own socket, in bytes, so that requests may be malformed."""

    port: int
    headers: dict[str, str] = field(default_factory=dict)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def raw(self, data: bytes) -> Answer:
        """The answer to these bytes."""
        with self.connect() as connection:
            connection.sendall(data)
            return read_answer(connection)

    def get(self, path: str, **headers: str) -> Answer:
        return self.raw(self.request("GET", path, headers=headers))

    def post(self, path: str, body: object, **headers: str) -> Answer:
        return self.raw(self.request("POST", path, body, headers))

    def complete(self, **fields: object) -> Answer:
        """A completion with these fields besides the prompt."""
        return self.post("/v1/completions", {"prompt": "hello", **fields})

    def stream(self, **fields: object) -> socket.socket:
        """A connection on which the first event of a completion has arrived."""
        connection = self.connect()
        body = {"prompt": "hello", "stream": True, **fields}
        connection.sendall(self.request("POST", "/v1/completions", body))
        seen = b""
        while b"data: " not in seen:
            received = connection.recv(1 << 16)
            assert received, seen
            seen += received
        return connection

    def request(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> bytes:
        """A request as bytes; an underscore in a header's name stands for a dash."""
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        all_headers = {"Host": "localhost", **self.headers}
        if body is not None:
            all_headers |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
        all_headers |= {name.replace("_", "-"): value for name, value in (headers or {}).items()}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in all_headers.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + data


def read_answer(connection: socket.socket, data: bytes = b"") -> Answer:
    """The next answer on a connection, of which `data` was already read; ConnectionError if it is closed
    before.
    """
    while b"\r\n\r\n" not in data:
        data += _received(connection)
    head, body = data.split(b"\r\n\r\n", 1)
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        while not body.endswith(b"0\r\n\r\n"):
            body += _received(connection)
    while len(body) < int(headers.get("content-length", 0)):
        body += _received(connection)
    return Answer(int(status.split()[1]), headers, body)


def _received(connection: socket.socket) -> bytes:
    data = connection.recv(1 << 16)
    if not data:
        raise ConnectionError("closed without an answer")
    return data


def until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds; fail after PATIENCE seconds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


@contextmanager
def serving(
    engine: Engine | None = None,
    send_buffer: int | None = None,
    new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
    publisher: Publisher | None = None,
    facts: Mapping[str, str] = FACTS,
    models: tuple[Sequence[ServedModel], RouteTable] | None = None,
    **options: Any,
) -> Iterator[Client]:
    """A client of a server in a thread of this process, within the context.

    With a small `send_buffer`, the system buffers little of what a client does not read. `facts` describe it.
    `models` with their routes are served instead of one engine.
    """
    served, table = models or _one_model(engine or roomy_engine(), facts)
    listener = bind("127.0.0.1", 0)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    port = listener.getsockname()[1]
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = []

    how = ServeOptions(**options)

    async def main() -> None:
        work = run_models(served, table, how, listener, publisher)
        task = asyncio.ensure_future(work)
        loops.append((asyncio.get_running_loop(), task))
        await asyncio.wait([task])

    def serve() -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=serve)
    thread.start()
    client = Client(port)
    until(lambda: _is_open(port))
    try:
        yield client
    finally:
        loop, task = loops[0]
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


def _one_model(engine: Engine, facts: Mapping[str, str]) -> tuple[list[ServedModel], RouteTable]:
    return [ServedModel(NAMES, engine, engine.tokenizer, facts)], RouteTable.of(*NAMES)  # type: ignore[arg-type]


def _is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


class Slow(ToyBackend):
    """A pass takes a few milliseconds."""

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        time.sleep(0.003)
        return super().forward(batch)


@contextmanager
def serving_process(log: Path, **options: Any) -> Iterator[tuple[ForkProcess, Client]]:
    """A server in its own process, which logs to a file, and a client of it."""
    process = multiprocessing.get_context("fork").Process(target=_serve, args=(log, options))
    process.start()
    try:
        until(lambda: not process.is_alive() or (log.exists() and "listening" in log.read_text()))
        event = json.loads(log.read_text().splitlines()[-1])
        yield process, Client(int(event["url"].rsplit(":", 1)[1]))
    finally:
        process.kill()
        process.join()


def _serve(log: Path, options: dict[str, Any]) -> None:
    """Serve the toy model until a signal, as `paceline serve` does with a real one."""
    sys.stderr = log.open("w")
    own = ServeOptions(**{"port": 0, **options})
    listener = bind(own.host, own.port)
    set_up_logs("info", "json")
    engine = toy_engine(Slow(max_rows=64), max_model_len=4096, num_pages=4000)
    asyncio.run(run_models(*_one_model(engine, FACTS), own, listener))
