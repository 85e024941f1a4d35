"""A rank other than 0: loads its pieces of the model, then runs what rank 0 calls, until rank 0 is gone.

`python -m paceline.backends.torch_parallel.worker FD`, where FD is one end of rank 0's pipe.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from paceline.backends.torch_backend import TorchBackend
from paceline.backends.torch_loading import find_dtype, load_pieces
from paceline.backends.torch_parallel.communicator import GroupCommunicator
from paceline.backends.torch_parallel.ranks import Call, Orders, PoolNumber
from paceline.backends.torch_pool import TorchPool
from paceline.core.forward import ForwardBatch
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
        os._exit(0)  # rank 0 has ended. At once: a destructor might wait for other ranks
    except Exception as error:
        tell(connection, error)
        os._exit(1)


def tell(connection: Connection[Any, Any], error: Exception) -> None:
    """Tell rank 0 why this one ends."""
    try:
        connection.send(f"{type(error).__name__}: {error}")
    except OSError:
        return  # rank 0 has ended, which may be why


def load(orders: Orders) -> TorchBackend:
    """This rank's pieces of the model."""
    torch.set_num_threads(orders.threads)
    device = orders.devices[orders.rank]
    communicator = GroupCommunicator(orders.rank, orders.devices, orders.store, orders.timeout)
    checkpoint = replace(load_checkpoint(orders.source), config=orders.config)
    dtype = find_dtype(orders.dtype)
    model = load_pieces(checkpoint, device, dtype, communicator, quantization=orders.quantization)
    return TorchBackend(model, orders.max_rows)


def serve(connection: Connection[Any, Any], backend: TorchBackend) -> None:
    """Run calls until the pipe ends, which is an EOFError."""
    connection.send(None)
    models, pools = {0: backend}, dict[int, TorchPool]()
    while True:
        call: Call = pickle.loads(connection.recv_bytes())
        for number in call.released:
            del pools[number]
        model = models[call.model]
        arguments = [_here(argument, pools, model) for argument in call.arguments]
        if call.method == "make_pool":
            number, pages = arguments
            pools[number] = model.make_pool(pages)
            connection.send(None)
        elif call.method == "first_layers":
            number, count = arguments
            models[number] = model.first_layers(count)
        else:
            getattr(model, call.method)(*arguments)


def _here(argument: Any, pools: dict[int, TorchPool], model: TorchBackend) -> Any:
    """An argument of rank 0 as this rank has it."""
    if isinstance(argument, PoolNumber):
        return pools[argument.number]
    if isinstance(argument, ForwardBatch):
        assert isinstance(argument.pool, PoolNumber)
        return replace(argument, pool=pools[argument.pool.number])
    return argument.to(model.device) if isinstance(argument, torch.Tensor) else argument


if __name__ == "__main__":
    main()
