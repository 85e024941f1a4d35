"""Ranks of tensor parallelism as threads of one process, on one GPU or in Triton's interpreter.

NCCL refuses two ranks on one GPU. Here one thread runs at a time, and hands over where ranks gather. All
launch on one stream, so what one has launched before a gather is done before what another launches after it.
A CUDA graph is captured by rank 0, and the others launch into it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import Pipe
from typing import Any, TypeVar

import pytest
import torch

from paceline.backends.torch.parallel.ranks import Peer, Ranks
from paceline.backends.torch.parallel.worker import serve

PATIENCE = 600  # seconds for another rank's launches; interpreted ones are slow
Result = TypeVar("Result")
_here = threading.local()  # .rank: the LogicalRank whose thread this is


class LogicalRank:
    """One of several ranks: a Collective."""

    def __init__(self, rank: int, group: LogicalRanks) -> None:
        self.rank, self.size, self.group = rank, group.size, group

    def gather_into(self, full: Sequence[torch.Tensor], local: Sequence[torch.Tensor]) -> None:
        self.group.parts[self.rank] = [part.clone() for part in local]
        self.group.meet()
        for to, parts in zip(full, zip(*self.group.parts, strict=True), strict=True):
            for line, part in zip(to, parts, strict=True):
                line.copy_(part)
        self.group.meet()


class LogicalRanks:
    """`size` ranks that take turns."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: list[Any] = [()] * size
        self.stream: torch.cuda.Stream | None = None  # on which a graph is captured
        self.turn = threading.Lock()
        self._barrier = threading.Barrier(size, timeout=PATIENCE)

    def meet(self) -> None:
        """Wait for all ranks, and for the turn."""
        self.turn.release()
        try:
            self._barrier.wait()
        finally:
            self.turn.acquire()

    def in_turn(self, work: Callable[[], Result]) -> Result:
        """What `work` returns, which may be part of what has the turn already."""
        if getattr(_here, "has_turn", False):
            return work()
        with self.turn:
            _here.has_turn = True
            try:
                return work()
            finally:
                _here.has_turn = False

    def run(self, work: Callable[[LogicalRank], Result]) -> list[Result]:
        """What each rank returns."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            _here.rank = LogicalRank(rank, self)
            with self.turn:
                try:
                    results[rank] = work(_here.rank)
                except BaseException as error:
                    errors.append(error)
                    self._barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next(
                (one for one in errors if not isinstance(one, threading.BrokenBarrierError)), errors[0]
            )
        return results


class InTurn(Ranks):
    """The other ranks, whose rank 0 takes turns with them."""

    def __init__(self, group: LogicalRanks, peers: Sequence[Peer]) -> None:
        super().__init__(peers)
        self.group = group

    def call(self, function: Any, arguments: Any, here: Callable[[], Any], makes: bool = False) -> Any:
        return super().call(function, arguments, partial(self.group.in_turn, here), makes)


class _Waiting:
    """A connection that lets others have the turn while nothing is received."""

    def __init__(self, connection: Any, turn: threading.Lock) -> None:
        self._connection, self._turn, self.send = connection, turn, connection.send

    def recv_bytes(self) -> Any:
        self._turn.release()
        try:
            return self._connection.recv_bytes()
        finally:
            self._turn.acquire()


@contextmanager
def driven(size: int, load: Callable[[Any, Any], Any]) -> Iterator[Any]:
    """Rank 0 of `size`, as `load` makes it of a shard and other ranks; these are threads that it drives."""
    from paceline.backends.cuda.weights.shard import Shard

    group, peers, threads = LogicalRanks(size), [], []

    def run(rank: int, connection: Any) -> None:
        _here.rank = LogicalRank(rank, group)
        with group.turn, suppress(EOFError, OSError, threading.BrokenBarrierError):
            serve(_Waiting(connection, group.turn), load(Shard(_here.rank), None))  # type: ignore[arg-type]

    for rank in range(1, size):
        own, other = Pipe()
        peers.append(Peer(own, None))
        threads.append(threading.Thread(target=run, args=(rank, other)))
        threads[-1].start()
    ranks = InTurn(group, peers)
    ranks.wait_for_answers()
    _here.rank = LogicalRank(0, group)
    backend = load(Shard(_here.rank), ranks)
    ranks.name(backend, 0)
    try:
        yield backend
    finally:
        _here.rank = None
        ranks.close()
        for thread in threads:
            thread.join(PATIENCE)


@contextmanager
def captured_together() -> Iterator[None]:
    """Within it, the graphs of logical ranks are one: their threads cannot capture several at once."""
    from paceline.backends.cuda.passes.graphs import Graphs

    alone = Graphs.run

    def run(graphs: Graphs, name: Hashable, work: Callable[[], None]) -> None:
        own: LogicalRank | None = getattr(_here, "rank", None)
        if own is None or graphs._device.type != "cuda":
            alone(graphs, name, work)
        else:
            _run_together(graphs, name, work, own)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(Graphs, "run", run)
        yield


def _run_together(graphs: Any, name: Hashable, work: Callable[[], None], own: LogicalRank) -> None:
    group, captured = own.group, graphs._captured
    group.meet()
    if name in captured:
        if own.rank == 0:
            captured[name].replay()
        group.meet()
        return
    torch.cuda.synchronize()
    work()
    torch.cuda.synchronize()
    group.meet()
    captured[name] = torch.cuda.CUDAGraph() if own.rank == 0 else None
    capture = torch.cuda.graph(captured[name], capture_error_mode="relaxed") if own.rank == 0 else None
    if capture is not None:
        capture.__enter__()
        group.stream = torch.cuda.current_stream()
    group.meet()
    with torch.cuda.stream(group.stream):
        work()
    group.meet()
    if capture is not None:
        capture.__exit__(None, None, None)
    group.meet()
