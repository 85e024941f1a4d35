"""What the slots of a block guess: the Markov head's part of their logits, and whole chains.

Both are small products of one row, which one thread does: dealing them out to others would take longer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.backends.base import HeadChains
from paceline.backends.cpu.compiled import compiled
from paceline.backends.cpu.draft_chains import likeliest
from paceline.backends.cpu.matmul import multiply_rows, run_tile
from paceline.backends.cpu.packing import pack
from paceline.backends.cpu.residual import read_embedding
from paceline.backends.cpu.rows import write_records
from paceline.backends.cpu.tiles import GROUP, RECORD
from paceline.backends.head_chains import RIVALS
from paceline.core.arrays import Float32Array, Int32Array
from paceline.models.heads.checkpoint import HeadCheckpoint
from paceline.verify.kernels import gumbel_top_k

W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"


class MarkovWeights(NamedTuple):
    """The Markov head for compiled code. Without one, `rank` is 0 and the rest is empty."""

    rank: int
    quantized: int  # whether its matrices are
    run_tile: int  # address of the kernel of a tile
    descriptors: npt.NDArray[np.int64]  # [2, 5] of W1 [vocabulary, rank] and W2 [draft vocabulary, rank]
    floats: Float32Array  # [padded rank] the row of W1 of the token before
    records: npt.NDArray[np.uint8]  # the same as the tiles read it


class MarkovHead:
    """The packed matrices of a head's Markov head."""

    def __init__(self, head: HeadCheckpoint, quantized: bool) -> None:
        tensors = [head.tensors[name] for name in (W1, W2) if name in head.tensors]
        # 8 bits: W2 is small, and of W1 only a row is read
        self._matrices = [pack(tensor, "int8" if quantized else "none") for tensor in tensors]
        groups = self._matrices[0].groups if tensors else 0
        descriptors = [matrix.descriptor() for matrix in self._matrices] or [[0] * 5] * 2
        self.weights = MarkovWeights(
            tensors[0].shape[1] if tensors else 0,
            int(quantized),
            run_tile.address,
            np.array(descriptors, dtype=np.int64),
            np.zeros(groups * GROUP, dtype=np.float32),
            np.zeros(groups * (RECORD if quantized else 4 * GROUP), dtype=np.uint8),
        )

    def guess(
        self, base: Float32Array, slots: Int32Array, previous: Int32Array
    ) -> tuple[Float32Array, Float32Array]:
        """The logits of slots after these tokens [slots, padded vocabulary]; the rows of W1 [slots, rank].

        `base` [rows, padded vocabulary] are those of the block alone.
        """
        logits = base[slots]
        before = np.empty((len(slots), self.weights.rank), dtype=np.float32)
        if self.weights.rank:
            _guess(self.weights, previous, logits, before)
        return logits, before


@compiled
def add_markov(weights, previous, logits):  # type: ignore[no-untyped-def]
    """Add W2 W1[previous] to the logits at an address; the row of W1 is left in weights.floats."""
    table = address_at(weights.descriptors, 0)
    matrix = address_at(weights.descriptors, 5)
    values, records = weights.floats.ctypes.data, weights.records.ctypes.data
    read_embedding(table, previous, values)
    write_records(values, weights.descriptors[0, 2], records, 1, 0, weights.quantized)
    multiply_rows(weights.run_tile, matrix, 0, weights.descriptors[1, 3], records, 1, 1, logits, 0, 0, 1)


@compiled
def address_at(array, place):  # type: ignore[no-untyped-def]
    """The address of an element of an array of int64."""
    return array.ctypes.data + 8 * place


@compiled(cached=True)
def _guess(weights, previous, logits, before):  # type: ignore[no-untyped-def]
    for row in range(len(previous)):
        add_markov(weights, previous[row], logits.ctypes.data + logits.strides[0] * row)
        before[row] = weights.floats[: weights.rank]


class Walk(NamedTuple):
    """The blocks behind some requests, and what is drafted for them."""

    logits: Float32Array  # [rows, padded vocabulary] of the blocks; the Markov head's part is added in place
    vocabulary: int  # logits that count
    size: int  # rows of a block
    first: int  # the slot that guesses the first token
    anchors: Int32Array  # [requests] the last tokens
    contexts: Int32Array  # [requests] positions of the first drafted tokens
    most: Int32Array  # [requests] tokens to draft
    seeds: npt.NDArray[np.uint64]  # [requests]
    temperatures: npt.NDArray[np.float64]  # [requests] 0: the likeliest is drafted
    target_ids: npt.NDArray[np.int64]  # [draft vocabulary] empty: the same ids
    states: Float32Array  # [rows, hidden] outputs of the blocks
    confidence: Float32Array  # [hidden (+ rank)] weights of the confidence head; empty: none
    bias: float  # of the confidence head


def walk_blocks(weights: MarkovWeights, walk: Walk, least_chance: float) -> HeadChains:
    """The chains of the best guesses behind each request: see block_chains.py beside the backends."""
    count, longest = len(walk.most), int(walk.most.max())
    tokens = np.zeros((count, longest), dtype=np.int32)
    chances = np.zeros((count, longest), dtype=np.float32)
    lengths = np.zeros(count, dtype=np.int32)
    _walk(weights, walk, np.float32(least_chance), tokens, chances, lengths)
    return HeadChains(tokens, chances, lengths)


@compiled(cached=True)
def _walk(weights, walk, least_chance, tokens, chances, lengths):  # type: ignore[no-untyped-def]
    places, scores = np.empty(1 + RIVALS, dtype=np.int64), np.empty(1 + RIVALS, dtype=np.float64)
    for request in range(len(walk.most)):
        previous, chance = walk.anchors[request], np.float32(1)
        for step in range(walk.most[request]):
            row = request * walk.size + walk.first + step
            if weights.rank > 0:
                add_markov(weights, previous, walk.logits.ctypes.data + walk.logits.strides[0] * row)
            logits = walk.logits[row, : walk.vocabulary]
            best, share = likeliest(logits.ctypes.data, walk.vocabulary)
            if not np.isfinite(share):
                break
            if walk.temperatures[request] > 0:
                key = walk.seeds[request], np.uint64(walk.contexts[request] + step)
                found = gumbel_top_k(
                    (logits, walk.target_ids), walk.temperatures[request], key, (places, scores)
                )
                best, total = places[0], 0.0
                for place in range(found):
                    total += np.exp(scores[place] - scores[0])
                share = np.float32(1 / total)
            if len(walk.confidence) > 0:
                share = _confidence(walk, walk.states[row], weights.floats)
            chance *= share
            if chance < least_chance:
                break
            previous = best if len(walk.target_ids) == 0 else walk.target_ids[best]
            tokens[request, step], chances[request, step] = previous, chance
            lengths[request] = step + 1


@compiled
def _confidence(walk, state, before):  # type: ignore[no-untyped-def]
    """The head's own estimate that the guess of a slot is accepted."""
    total = walk.bias
    for place in range(len(state)):
        total += state[place] * walk.confidence[place]
    for place in range(len(walk.confidence) - len(state)):
        total += before[place] * walk.confidence[len(state) + place]
    return np.float32(1 / (1 + np.exp(-total)))
