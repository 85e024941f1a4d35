"""Checkpoints with 8 KV heads, and the ranks of a model as threads: quick, and the same code as processes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.backends.torch.backend import TorchBackend
from paceline.backends.torch.loading import find_dtype, load_pieces
from paceline.backends.torch.parallel.communicator import RankLostError
from paceline.backends.torch.parallel.ranks import Peer, Ranks
from paceline.backends.torch.parallel.worker import serve
from paceline.models.checkpoint import Checkpoint
from paceline.models.families.config_reader import model_config
from paceline.models.files.layout import expected_tensors
from paceline.models.files.safetensors_writer import encode, write_safetensors
from paceline.models.lora import Adapter

VOCAB = 173  # no number of ranks divides it, nor the intermediate size
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 60,
    "intermediate_size": 85,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 6,
    "max_position_embeddings": 256,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {},  # biases
    "qwen3": {},  # norms of queries and keys
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
}


def save_sharded(family: str, folder: Path) -> Path:
    """The folder, now with a random checkpoint of the family that 1, 2, 4 or 8 ranks can share."""
    values = {"model_type": family, "rms_norm_eps": 1e-5, "rope_theta": 500.0, **SIZES, **FAMILIES[family]}
    (folder / "config.json").write_text(json.dumps(values))
    random, tensors = np.random.default_rng(20), {}
    for name, shape in expected_tensors(model_config(values, family)):
        noise = random.standard_normal(shape, dtype=np.float32)
        tensors[name] = encode(1 + 0.2 * noise if "norm" in name else 0.25 * noise)
    write_safetensors(folder / "model.safetensors", tensors, {})
    return folder


class ThreadRank:
    """One rank of several threads of this process."""

    def __init__(self, rank: int, parts: list[Any], barrier: threading.Barrier, device: torch.device) -> None:
        self.rank, self.size = rank, len(parts)
        self._parts, self._barrier, self._device = parts, barrier, device

    def gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        try:
            self._parts[self.rank] = own.clone()
            self._barrier.wait(30)
            parts = list(self._parts)
            self._barrier.wait(30)  # or a quick rank would overwrite what a slow one has yet to read
        except threading.BrokenBarrierError as error:
            raise RankLostError("a thread is gone") from error
        assert len({part.shape for part in parts}) == 1, "collectives want equal shapes"
        return parts


def thread_ranks(size: int, device: str = "cpu") -> list[ThreadRank]:
    parts: list[Any] = [None] * size
    barrier = threading.Barrier(size)
    return [ThreadRank(rank, parts, barrier, torch.device(device)) for rank in range(size)]


@contextmanager
def sharded(
    checkpoint: Checkpoint,
    size: int,
    dtype: str = "float32",
    device: str = "cpu",
    max_rows: int = 512,
    adapters: Sequence[Adapter] = (),
) -> Iterator[TorchBackend]:
    """Rank 0 of `size`; the others are threads that run what processes would run."""
    communicators: Sequence[ThreadRank] = thread_ranks(size, device)
    models = [
        load_pieces(checkpoint, torch.device(device), find_dtype(dtype), communicator)
        for communicator in communicators
    ]
    made = partial(TorchBackend, max_rows=max_rows, adapters=adapters)
    peers, threads = [], []
    for model in models[1:]:
        own, other = Pipe()
        peers.append(Peer(own, None))
        threads.append(threading.Thread(target=_serve, args=(other, made(model))))
        threads[-1].start()
    ranks = Ranks(peers)
    ranks.wait_for_answers()
    backend = made(models[0], ranks=ranks if size > 1 else None)
    ranks.name(backend, 0)
    try:
        yield backend
    finally:
        ranks.close()
        for thread in threads:
            thread.join(30)


def _serve(connection: Any, backend: TorchBackend) -> None:
    try:
        serve(connection, backend)
    except (EOFError, OSError, RankLostError):
        connection.close()
