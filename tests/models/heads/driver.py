"""Requests driven by hand through a head runner, as a drafter does it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paceline.backends.heads import HeadBatch, HeadOutput, HeadRunner
from paceline.core.forward import ForwardBatch, KVPool
from paceline.models.files.safetensors_writer import encode
from paceline.models.heads.checkpoint import HeadCheckpoint
from paceline.models.heads.config import HeadConfig
from tests.models.heads.tiny_heads import random_tensors


def random_checkpoint(config: HeadConfig, seed: int = 3) -> HeadCheckpoint:
    """A random head, its guesses every second id of the target's if it has fewer."""
    tensors = {name: encode(values) for name, values in random_tensors(config, seed).items()}
    trimmed = config.draft_vocab_size < config.vocab_size
    ids = np.sort(np.random.default_rng(9).permutation(config.vocab_size)[: config.draft_vocab_size])
    return HeadCheckpoint(config, tensors, ids.astype(np.int32) if trimmed else None, Path("random"))


class DrivenHead:
    """One request's pages in a head's pool, and how many KV indices hold its committed slots."""

    def __init__(self, runner: HeadRunner, pool: KVPool, pages: Sequence[int]) -> None:
        self.runner, self.pool = runner, pool
        self.pages = np.array(pages, dtype=np.int32)
        self.length = 1  # index 0 has no slot
        self.states = np.zeros((0, 0), dtype=np.float32)
        self.tokens: Sequence[int] = ()
        self.parents: Sequence[int] = ()

    def ask(
        self, states: np.ndarray, tokens: Sequence[int], parents: Sequence[int] | None = None
    ) -> DrivenHead:
        """Itself, with the rows of the next pass set; without parents they are a chain."""
        self.states, self.tokens = states, tokens
        self.parents = range(-1, len(tokens) - 1) if parents is None else parents
        return self

    @property
    def positions(self) -> list[int]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return [self.length - 1 + depth for depth in depths]


def drive_heads(runner: HeadRunner, pages_each: int, count: int = 1) -> list[DrivenHead]:
    """Requests with `pages_each` pages each, scattered over one pool in no order."""
    pool = runner.make_pool(pages_each * count)
    pages = np.random.default_rng(5).permutation(pages_each * count).reshape(count, pages_each)
    return [DrivenHead(runner, pool, row) for row in pages]


def run_heads(
    requests: Sequence[DrivenHead], from_target: bool, outputs: Sequence[int] | None = None, keep: bool = True
) -> HeadOutput:
    """One pass over the rows all requests ask for; their slots count from then on, if `keep`."""
    output = requests[0].runner.run(batch_of(requests, from_target, outputs))
    for request in requests if keep else ():
        request.length += len(request.tokens)
    return HeadOutput(output.logits.copy(), output.states.copy())


def batch_of(
    requests: Sequence[DrivenHead], from_target: bool, outputs: Sequence[int] | None = None
) -> HeadBatch:
    """The rows all requests ask for, and which of them give logits: all if nothing is said."""
    offsets = np.cumsum([0, *(len(request.tokens) for request in requests)], dtype=np.int32)
    batch = ForwardBatch(
        tokens=np.concatenate([request.tokens for request in requests]).astype(np.int32),
        positions=np.concatenate([request.positions for request in requests]).astype(np.int32),
        parents=np.concatenate([request.parents for request in requests]).astype(np.int32),
        row_offsets=offsets,
        context_lengths=np.array([request.length for request in requests], np.int32),
        page_tables=np.stack([request.pages for request in requests]),
        logit_rows=np.arange(offsets[-1], dtype=np.int32) if outputs is None else np.array(outputs, np.int32),
        pool=requests[0].pool,
    )
    states = np.concatenate([request.states for request in requests])
    return HeadBatch(batch, states, from_target)
