"""Rank 0's side: starts the other ranks, has them run what it runs, and notices when one is gone.

Calls go through a pipe to each rank, and tensors through the communicator. A rank answers only what `load`
and `make_pool` wait for; a pass needs no answer, because its collectives wait for every rank. If one dies,
its sockets close, the pass of every other fails, and rank 0 says why: nothing waits longer than TIMEOUT.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from paceline.backends.torch_parallel.communicator import GroupCommunicator, RankLostError
from paceline.backends.torch_pool import TorchPool
from paceline.core.forward import ForwardBatch
from paceline.errors import BackendLostError
from paceline.models.checkpoint import Checkpoint
from paceline.models.config import ModelConfig

TIMEOUT = 120.0  # seconds that a rank waits for the others in a pass; they compute the same at the same time
START_TIMEOUT = 1800.0  # seconds to read the weights, perhaps from a slow disk
LAST_WORDS = 2.0  # seconds for a dead rank's exit status or message to arrive
GOODBYE = 5.0  # seconds for a rank to end before it is killed


@dataclass(frozen=True)
class Orders:
    """What a rank must know to load its pieces of the model."""

    rank: int
    source: Path
    config: ModelConfig
    devices: tuple[torch.device, ...]  # of all ranks
    dtype: str
    quantization: str
    max_rows: int
    threads: int  # the same in all ranks: a product may add in another order with other ones
    store: str  # the file by which ranks meet
    timeout: float


@dataclass(frozen=True)
class Call:
    """A method of a model that a rank is to run."""

    model: int
    method: str
    arguments: tuple[Any, ...]  # pools as PoolNumber
    released: tuple[int, ...]  # pools that are no longer in use


@dataclass(frozen=True)
class PoolNumber:
    """A pool as ranks name it: each has its own part of it."""

    number: int


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
        self._numbers = count(1)
        self._released: list[int] = []
        self._failure: str | None = None
        self._end = weakref.finalize(self, _end, peers, folder)

    @property
    def processes(self) -> list[int]:
        """The process ids of ranks 1, 2, ..."""
        return [peer.process.pid for peer in self._peers if peer.process is not None]

    def new_number(self) -> int:
        return next(self._numbers)

    def release_with(self, pool: TorchPool) -> None:
        """Have the ranks drop their part of a pool once it is collected here."""
        weakref.finalize(pool, self._released.append, pool.number).atexit = False

    @contextmanager
    def run(self, model: int, method: str, *arguments: Any) -> Iterator[None]:
        """A context in which all ranks run a method of a model. BackendLostError if one is gone."""
        with self._lock:
            if self._failure is not None:
                raise BackendLostError(self._failure)
            released = tuple(self._released)
            del self._released[: len(released)]
            call = Call(model, method, tuple(map(_portable, arguments)), released)
            # not `send`: torch makes it hand tensors over by shared memory, which needs more than the pipe
            message = pickle.dumps(call, protocol=pickle.HIGHEST_PROTOCOL)
            try:
                for peer in self._peers:
                    peer.connection.send_bytes(message)
                yield
            except (OSError, RankLostError) as error:
                raise self._fail(str(error)) from error
            except BaseException as error:  # this rank's own: the others are in the middle of what it left
                self._failure = f"Rank 0 failed ({type(error).__name__}: {error}); restart the engine."
                self._end()
                raise

    def wait_for_answers(self, timeout: float = START_TIMEOUT) -> None:
        """Wait until every rank has done what it was told. BackendLostError if one could not."""
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
        """Stop the other ranks. What comes after is a BackendLostError."""
        with self._lock:
            self._failure = self._failure or "The other ranks of this model were stopped; load it again."
            self._end()

    def _fail(self, symptom: str, certain: bool = False) -> BackendLostError:
        """The error for a rank that is gone; the others end, as they have only parts of the model.

        `certain`: the symptom is the cause. Otherwise the first rank that has ended may say more.
        """
        cause = symptom if certain else self._cause() or symptom
        self._failure = (
            f"A rank of tensor parallelism is gone: {cause}. The others have only their own parts of the "
            "model and are stopped: restart the engine."
        )
        self._end()
        return BackendLostError(self._failure)

    def _cause(self) -> str | None:
        """Why a rank ended, by its last message or its exit status."""
        deadline = time.monotonic() + LAST_WORDS
        while time.monotonic() < deadline:
            for rank, peer in enumerate(self._peers, start=1):
                if peer.process is None:
                    return None
                code = peer.process.poll()
                if code is not None:
                    return f"rank {rank} (process {peer.process.pid}) {_ended(peer, code)}"
            time.sleep(0.01)
        return None


def _ended(peer: Peer, code: int) -> str:
    with suppress(EOFError, OSError):
        while peer.connection.poll():
            if (error := peer.connection.recv()) is not None:
                return f"failed: {error}"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"


def _portable(argument: Any) -> Any:
    """An argument as it goes through a pipe."""
    if isinstance(argument, ForwardBatch):
        return replace(argument, pool=_portable(argument.pool))
    if isinstance(argument, TorchPool):
        return PoolNumber(argument.number)
    return argument.cpu() if isinstance(argument, torch.Tensor) else argument


def start_ranks(
    checkpoint: Checkpoint,
    devices: Sequence[torch.device],
    dtype: str,
    quantization: str,
    max_rows: int,
    timeout: float = TIMEOUT,
) -> tuple[Ranks, GroupCommunicator]:
    """The other ranks, which now load their pieces of the model, and the communicator of rank 0."""
    folder = tempfile.mkdtemp(prefix="paceline-ranks-")
    store = str(Path(folder) / "store")
    peers: list[Peer] = []
    ranks = Ranks(peers, folder)
    for rank in range(1, len(devices)):
        peers.append(_start())
        model = checkpoint.source, checkpoint.config
        threads = torch.get_num_threads()
        peers[-1].connection.send(
            Orders(rank, *model, tuple(devices), dtype, quantization, max_rows, threads, store, timeout)
        )
    ranks.wait_for_answers()  # they have imported torch: from here on no rank waits for the start of another
    return ranks, GroupCommunicator(0, devices, store, timeout)


def _start() -> Peer:
    """A new process that runs worker.py."""
    own, other = Pipe()
    package_root = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.backends.torch_parallel.worker", str(other.fileno())],
        pass_fds=[other.fileno()],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )
    other.close()
    return Peer(own, process)


def _end(peers: Sequence[Peer], folder: str | None) -> None:
    """End all ranks: one that reads an end of file ends by itself."""
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
