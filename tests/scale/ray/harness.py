"""A `paceline serve` process, and clients that stream from it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

MODEL = "smollm2-135m"
CLIENTS = 50
BEGUN = 1500  # characters that all clients have, together, when harm is done
START_SECONDS = 300.0
Answers = list[tuple[str, str]]  # text and finish reason of each client

TOPICS = ("rivers", "bread", "the moon", "chess", "steel", "bees", "winter", "maps", "glass", "salt")


def body(number: int) -> dict[str, Any]:
    """The request of a client: greedy, sampled, constrained or with penalties, in turn."""
    options: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": number},
        {"temperature": 0.9, "seed": number, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"temperature": 0.8, "seed": number, "structured_outputs": {"regex": "[A-Za-z ,]{60,200}\\."}},
        {"temperature": 0, "stop": ["zzz"], "min_tokens": 10},
    ]
    prompt = f"Question {number}: what should everyone know about {TOPICS[number % len(TOPICS)]}?\nAnswer:"
    return {"prompt": prompt, "max_tokens": 40 + number % 3 * 10, "stream": True, **options[number % 5]}


class Clients:
    """Streams answers of a server, all at once, and knows how far they are."""

    def __init__(self, url: str, count: int = CLIENTS, **options: Any) -> None:
        """`options` are fields of every request."""
        self._options = options
        self._url = url
        self._count = count
        self.texts = [""] * count
        self.answers: list[tuple[str, str] | None] = [None] * count

    @property
    def num_characters(self) -> int:
        return sum(map(len, self.texts))

    async def run(self) -> Answers:
        limits = httpx.Limits(max_connections=self._count)
        async with httpx.AsyncClient(base_url=self._url, timeout=300, limits=limits) as client:
            answers = await asyncio.gather(*[self._ask(client, number) for number in range(self._count)])
        return list(answers)

    async def _ask(self, client: httpx.AsyncClient, number: int) -> tuple[str, str]:
        finish = ""
        async with client.stream(
            "POST", "/v1/completions", json={**body(number), **self._options}
        ) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    event = json.loads(line[6:])
                    assert "choices" in event, event
                    for choice in event["choices"]:
                        self.texts[number] += choice["text"]
                        finish = choice["finish_reason"] or finish
        return self.texts[number], finish


class Server:
    """`paceline serve` as a process."""

    def __init__(self, folder: Path, *flags: str, model: str | None = MODEL) -> None:
        """`model`: None if the flags say it."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "log.txt"
        self._flags = (*flags, *([] if model is None else [model]))
        self._client = httpx.Client(base_url=self.url, timeout=30)

    def __enter__(self) -> Server:
        command = [sys.executable, "-m", "paceline", "serve", "--port", str(self.port), *self._flags]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            self.wait_until(lambda: healthy(self.url), START_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def get(self, path: str) -> Any:
        return self._client.get(path).json()

    def replicas(self) -> list[dict[str, Any]]:
        return self.get("/replicas")["replicas"]

    def wait_until(self, condition: Callable[[], bool], seconds: float = START_SECONDS) -> None:
        def ended_or_true() -> bool:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            return condition()

        wait_until(ended_or_true, seconds)

    def wait_for_replicas(self, count: int, without: frozenset[int] = frozenset()) -> None:
        """Wait until this number of replicas answer, none of them one of these processes."""

        def there() -> bool:
            pids = {replica["pid"] for replica in self.replicas()}
            return len(pids) == count and 0 not in pids and not pids & without

        self.wait_until(there, START_SECONDS)


def healthy(url: str) -> bool:
    """Whether a server answers and is well."""
    try:
        return httpx.get(url + "/health", timeout=30).status_code == 200
    except httpx.HTTPError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = START_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.3)


async def disturbed(url: str, harm: Callable[[], None], truth: Answers, later: Answers | None = None) -> None:
    """Check all answers while harm is done: those that were begun before, and others until it is done.

    The others may also be as `later`.
    """
    clients = Clients(url)
    asking = asyncio.create_task(clients.run())
    while clients.num_characters < BEGUN and not asking.done():
        await asyncio.sleep(0.01)
    assert not asking.done(), "the answers ended too early"
    harming = asyncio.create_task(asyncio.to_thread(harm))
    assert await asking == truth
    while not harming.done():
        answers = zip(await Clients(url).run(), truth, later or truth, strict=True)
        assert all(answer in expected for answer, *expected in answers)
    await harming


def asked_alone(*flags: str) -> Answers:
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder), "--threads", "1", *flags) as server:
        return asyncio.run(Clients(server.url).run())


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def pause(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
