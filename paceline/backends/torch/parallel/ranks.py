"""Ranks: rank 0's side of tensor parallelism. It starts the other ranks, broadcasts calls, detects failures.

Calls go through a pipe to each rank, and tensors through the communicator. Objects that exist on all ranks
(models, pools, decoders), each rank with its part, have numbers, and calls refer to them by number. A rank
acknowledges calls that create an object; a pass needs no acknowledgement, because its collectives wait for
every rank. If a rank dies, the communicator is aborted, which ends the pass on all others, and rank 0 raises
an error with the cause: nothing waits longer than TIMEOUT.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from paceline.backends.torch.parallel.calls import Call, pickled, portable
from paceline.backends.torch.parallel.communicator import GroupCommunicator, RankLostError
from paceline.errors import BackendLostError
from paceline.models.checkpoint import Checkpoint
from paceline.models.config import ModelConfig
from paceline.models.lora import Adapter

TIMEOUT = 120.0  # seconds that a rank waits for the others within a pass
START_TIMEOUT = 1800.0  # seconds to load the weights, perhaps from a slow disk
LAST_WORDS = 2.0  # seconds to wait for a dead rank's exit status or message
GOODBYE = 5.0  # seconds for a rank to end before it is killed
Result = TypeVar("Result")


@dataclass(frozen=True)
class Orders:
    """What a rank needs to load its pieces of the model."""

    rank: int
    backend: str  # torch or cuda
    source: Path
    config: ModelConfig
    devices: tuple[torch.device, ...]  # of all ranks
    dtype: str
    quantization: str
    max_rows: int
    adapters: tuple[Adapter, ...]  # unsharded: each rank takes its rows
    threads: int  # the same in all ranks, because a product's summation order may depend on it
    store: str  # the file of torch.distributed's FileStore
    timeout: float  # seconds


@dataclass(frozen=True)
class Peer:
    """Another rank."""

    connection: Connection[Any, Any]
    process: subprocess.Popen[bytes] | None  # None: a thread, in tests


class Ranks:
    """The other ranks of a model."""

    def __init__(self, peers: Sequence[Peer], folder: str | None = None) -> None:
        self._peers = peers
        self._lock = threading.RLock()
        self._depth = 0  # of nested calls: only the outermost is sent, because it makes the inner ones
        self._numbers = count(1)
        self._named: dict[int, int] = {}  # {id of an object: its number}
        self._released: list[int] = []
        self._failure: str | None = None
        self._closing, self._lost = threading.Event(), threading.Event()
        self._end = weakref.finalize(self, _end, peers, folder, self._closing)

    @property
    def processes(self) -> list[int]:
        """The process ids of ranks 1, 2, ..."""
        return [peer.process.pid for peer in self._peers if peer.process is not None]

    def watch(self, abort: Callable[[], None]) -> None:
        """Call `abort` as soon as a rank ends, from now on: NCCL would wait for it forever."""
        for peer in self._peers:
            if peer.process is not None:
                watched = peer.process, self._closing, self._lost, abort
                threading.Thread(target=_watch, args=watched, daemon=True).start()

    def name(self, made: Any, number: int) -> None:
        """Let calls refer to an object by this number, until it is garbage-collected on rank 0."""
        if made is None:
            return
        self._named[id(made)] = number
        weakref.finalize(made, self._forget, id(made), number).atexit = False

    def _forget(self, identity: int, number: int) -> None:
        del self._named[identity]
        self._released.append(number)

    def call(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        here: Callable[[], Result],
        makes: bool = False,
    ) -> Result:
        """The result of `here`, while the other ranks call the function. BackendLostError if a rank is gone.

        `makes`: the function returns a new object, which gets a number.
        """
        with self._lock:
            if self._depth:
                return here()
            number = next(self._numbers) if makes else None
            with self._run(function, arguments, number):
                result = here()
                self.check()
            if number is not None:
                self.wait_for_answers()  # a rank may be out of memory
                self.name(result, number)
            return result

    def check(self) -> None:
        """RankLostError if a rank has ended: results gathered since then are wrong."""
        if self._lost.is_set() and not self._closing.is_set():
            raise RankLostError("a rank has ended")

    @contextmanager
    def _run(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], number: int | None
    ) -> Iterator[None]:
        if self._failure is not None:
            raise BackendLostError(self._failure)
        released = tuple(self._released)
        del self._released[: len(released)]
        call = Call(function, tuple(map(portable, arguments)), number, released)
        try:
            message = pickled(call, self._named)
            for peer in self._peers:
                peer.connection.send_bytes(message)
            self._depth += 1
            yield
        except (OSError, RankLostError) as error:
            raise self._fail(str(error)) from error
        except BaseException as error:  # rank 0 itself failed; the others are still in the middle of the call
            self._failure = f"Rank 0 failed ({type(error).__name__}: {error}); restart the engine."
            self._end()
            raise
        finally:
            self._depth = 0

    def wait_for_answers(self, timeout: float = START_TIMEOUT) -> None:
        """Wait until every rank has acknowledged its calls. BackendLostError if one failed."""
        with self._lock:
            deadline = time.monotonic() + timeout
            for rank, peer in enumerate(self._peers, start=1):
                try:
                    if not peer.connection.poll(max(0.0, deadline - time.monotonic())):
                        raise self._fail(f"rank {rank} did not answer within {timeout:g} seconds")
                    error = peer.connection.recv()
                except (EOFError, OSError) as gone:
                    raise self._fail(f"rank {rank} is gone") from gone
                if error is not None:
                    raise self._fail(f"rank {rank}: {error}", certain=True)

    def close(self) -> None:
        """Stop the other ranks. Any later call is a BackendLostError."""
        with self._lock:
            self._failure = self._failure or "The other ranks of this model were stopped; load it again."
            self._end()

    def _fail(self, symptom: str, certain: bool = False) -> BackendLostError:
        """The error for a lost rank. Stops the others too, which hold only parts of the model.

        `certain`: the symptom is the cause. Otherwise the message of the first rank that ended is added.
        """
        cause = symptom if certain else self._cause() or symptom
        self._failure = (
            f"A rank of tensor parallelism is gone: {cause}. The others have only their own parts of the "
            "model and are stopped: restart the engine."
        )
        self._end()
        return BackendLostError(self._failure)

    def _cause(self) -> str | None:
        """Why a rank ended: its last message or exit status. Ranks that only lost another rank come last."""
        deadline, said = time.monotonic() + LAST_WORDS, dict[int, str]()
        while time.monotonic() < deadline and len(said) < len(self._peers):
            for rank, peer in enumerate(self._peers, start=1):
                if peer.process is None:
                    return None
                code = peer.process.poll()
                if code is not None and rank not in said:
                    said[rank] = f"rank {rank} (process {peer.process.pid}) {_ended(peer, code)}"
                    if RankLostError.__name__ not in said[rank]:
                        return said[rank]
            time.sleep(0.01)
        return next(iter(said.values()), None)


def _watch(
    process: subprocess.Popen[bytes],
    closing: threading.Event,
    lost: threading.Event,
    abort: Callable[[], None],
) -> None:
    process.wait()
    if not closing.is_set():
        lost.set()
        abort()


def _ended(peer: Peer, code: int) -> str:
    with suppress(EOFError, OSError):
        while peer.connection.poll():
            if (error := peer.connection.recv()) is not None:
                return f"failed: {error}"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"


def start_ranks(
    checkpoint: Checkpoint,
    devices: Sequence[torch.device],
    dtype: str,
    quantization: str,
    max_rows: int,
    adapters: Sequence[Adapter] = (),
    timeout: float = TIMEOUT,
    backend: str = "torch",
) -> tuple[Ranks, GroupCommunicator]:
    """The other ranks, which load their pieces meanwhile, and the communicator of rank 0."""
    folder = tempfile.mkdtemp(prefix="paceline-ranks-")
    store = str(Path(folder) / "store")
    peers: list[Peer] = []
    ranks = Ranks(peers, folder)
    for rank in range(1, len(devices)):
        peers.append(_start())
        model = checkpoint.source, checkpoint.config, tuple(devices), dtype, quantization
        limits = max_rows, tuple(adapters), torch.get_num_threads()
        peers[-1].connection.send(Orders(rank, backend, *model, *limits, store, timeout))
    ranks.wait_for_answers()  # all have imported torch, so no collective has to wait for a process to start
    communicator = GroupCommunicator(0, devices, store, timeout)
    ranks.watch(communicator.abort)
    return ranks, communicator


def _start() -> Peer:
    """A new process that runs worker.py."""
    own, other = Pipe()
    package_root = str(Path(__file__).parents[4])
    path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.backends.torch.parallel.worker", str(other.fileno())],
        pass_fds=[other.fileno()],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )
    other.close()
    return Peer(own, process)


def _end(peers: Sequence[Peer], folder: str | None, closing: threading.Event) -> None:
    """End all ranks: one that reads an end of file ends by itself."""
    closing.set()
    for peer in peers:
        peer.connection.close()
    for peer in peers:
        if peer.process is None:
            continue
        try:
            peer.process.wait(GOODBYE)
        except subprocess.TimeoutExpired:
            peer.process.kill()
            peer.process.wait()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
