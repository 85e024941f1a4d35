"""The process of a rank other than 0: loads its pieces, then executes rank 0's calls until rank 0 ends.

`python -m paceline.backends.torch.parallel.worker FD`, where FD is one end of rank 0's pipe.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from paceline.backends.base import Backend
from paceline.backends.torch.backend import TorchBackend
from paceline.backends.torch.loading import find_dtype, load_pieces
from paceline.backends.torch.parallel.calls import Call, Unpickler
from paceline.backends.torch.parallel.communicator import GroupCommunicator
from paceline.backends.torch.parallel.ranks import Orders
from paceline.models.checkpoint import Checkpoint
from paceline.models.registry import load_checkpoint


def main() -> None:
    # rank 0 decides when to end; a Ctrl-C at the terminal reaches all processes
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    try:
        orders: Orders = connection.recv()
        connection.send(None)
        serve(connection, load(orders))
    except EOFError:
        os._exit(0)  # rank 0 has ended. No destructors: they might wait for other ranks
    except Exception as error:
        tell(connection, error)
        os._exit(1)


def tell(connection: Connection[Any, Any], error: Exception) -> None:
    """Send rank 0 the error that ends this rank."""
    try:
        connection.send(f"{type(error).__name__}: {error}")
    except OSError:
        return  # rank 0 has ended, which may be the cause of the error


def load(orders: Orders) -> Backend:
    """This rank's part of the model."""
    torch.set_num_threads(orders.threads)
    communicator = GroupCommunicator(orders.rank, orders.devices, orders.store, orders.timeout)
    checkpoint = replace(load_checkpoint(orders.source), config=orders.config)
    return _LOADERS[orders.backend](orders, checkpoint, communicator)


def _load_torch(orders: Orders, checkpoint: Checkpoint, communicator: GroupCommunicator) -> Backend:
    device, dtype = orders.devices[orders.rank], find_dtype(orders.dtype)
    model = load_pieces(checkpoint, device, dtype, communicator, quantization=orders.quantization)
    return TorchBackend(model, orders.max_rows, adapters=orders.adapters)


def _load_cuda(orders: Orders, checkpoint: Checkpoint, communicator: GroupCommunicator) -> Backend:
    from paceline.backends.cuda.backend import CudaBackend  # needs Triton
    from paceline.backends.cuda.weights.shard import Shard

    device = orders.devices[orders.rank]
    if device.type == "cuda":  # not in Triton's interpreter
        torch.cuda.set_device(device)
    part = orders.max_rows, Shard(communicator), None, orders.adapters
    return CudaBackend.load_part(checkpoint, device, orders.dtype, orders.quantization, *part)


_LOADERS: dict[str, Callable[[Orders, Checkpoint, GroupCommunicator], Backend]] = {
    "torch": _load_torch,
    "cuda": _load_cuda,
}


def serve(connection: Connection[Any, Any], backend: Backend) -> None:
    """Execute rank 0's calls. EOFError when its end of the pipe is closed."""
    connection.send(None)
    made: dict[int, Any] = {0: backend}
    while True:
        call: Call = Unpickler(connection.recv_bytes(), made).load()
        for number in call.released:
            del made[number]
        result = call.function(*call.arguments)
        if call.makes is not None:
            made[call.makes] = result
            connection.send(None)


if __name__ == "__main__":
    main()
