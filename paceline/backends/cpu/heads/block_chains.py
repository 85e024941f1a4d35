"""Drafting from the logits of a block: the correction by the previous token, and whole chains.

Markov head and pair selector are products of one row. One thread computes them: a barrier would cost more.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu.heads.draft_chains import likeliest
from paceline.backends.cpu.phases.residual import read_embedding
from paceline.backends.cpu.phases.sampling import sixteen
from paceline.backends.cpu.primitives.compiled import compiled
from paceline.backends.cpu.primitives.rows import write_records
from paceline.backends.cpu.primitives.simd import (
    LANES,
    fma,
    largest_lane,
    load,
    load_float,
    multiply,
    spread,
    store,
    store_float,
    sum_lanes,
)
from paceline.backends.cpu.tiles.matmul import multiply_rows, run_tile
from paceline.backends.cpu.tiles.weight_tile import GROUP, RECORD
from paceline.backends.cpu.weights.packing import pack
from paceline.backends.head_chains import RIVALS
from paceline.backends.heads import HeadChains
from paceline.core.arrays import Float32Array, Int32Array
from paceline.models.heads.checkpoint import HeadCheckpoint
from paceline.verify.kernels import gumbel_top_k

W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
SELECTOR = "candidate_selector."


class PairWeights(NamedTuple):
    """The weights of a Markov head or pair selector, for compiled code. `rank` 0: the head has neither.

    Markov head       logits + W2 W1[previous]
    pair selector     logit(b) + <A[previous] * W output, B[b]> for a slot's best candidates b, others -inf
    """

    rank: int
    candidates: int  # tokens that a pair selector scores; 0: a Markov head, which scores all
    quantized: int  # 1: its matrices are quantized
    run_tile: int  # address of the register tile kernel
    # [3, 5] of W1 or A [vocabulary, rank], of W2 or B [draft vocabulary, rank], of W [rank, hidden]
    descriptors: npt.NDArray[np.int64]
    floats: Float32Array  # [2, padded rank] the row of W1 or A; the row of B, or W output
    records: npt.NDArray[np.uint8]  # of the row of W1 or of the output, as the tiles read it
    best: Float32Array  # [candidates] the largest logits of a slot


class PairHead:
    """The packed matrices of a head's Markov head or pair selector."""

    def __init__(self, head: HeadCheckpoint, quantized: bool) -> None:
        block = head.config.block
        assert block is not None, "the head is a parallel one"
        names = [W1, W2] if block.markov_rank else []
        if block.selector_rank:
            parts = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
            names = [SELECTOR + part for part in parts]
        # 8 bits: of all but W2 and W only single rows are read, so 4 bits would save little
        self._matrices = [pack(head.tensors[name], "int8" if quantized else "none") for name in names]
        descriptors = np.zeros((3, 5), dtype=np.int64)
        for line, matrix in zip(descriptors, self._matrices, strict=False):
            line[:] = matrix.descriptor()
        widest = max([matrix.groups for matrix in self._matrices], default=0)
        self.weights = PairWeights(
            block.markov_rank or block.selector_rank,
            min(block.selector_candidates, head.config.draft_vocab_size),
            int(quantized),
            run_tile.address,
            descriptors,
            np.zeros((2, self._matrices[0].padded_depth if names else 0), dtype=np.float32),
            np.zeros(widest * (RECORD if quantized else 4 * GROUP), dtype=np.uint8),
            np.zeros(block.selector_candidates, dtype=np.float32),
        )
        self._vocabulary = head.config.draft_vocab_size

    def guess(
        self, base: Float32Array, states: Float32Array, slots: Int32Array, previous: Int32Array
    ) -> tuple[Float32Array, Float32Array]:
        """The logits of slots given their previous tokens [slots, padded vocabulary], and the rows of W1.

        `base` [rows, padded vocabulary] are the block's own logits, `states` [rows, padded hidden] its
        outputs. The rows of W1 are [slots, rank].
        """
        logits = base[slots]
        before = np.empty((len(slots), self.weights.rank), dtype=np.float32)
        if self.weights.rank:
            _guess(self.weights, self._vocabulary, states, slots, previous, logits, before)
        return logits, before


@compiled
def score_pairs(weights, previous, vocabulary, logits, output):  # type: ignore[no-untyped-def]
    """Correct the logits at an address by the previous token; leaves the row of W1 in weights.floats.

    `output` is the address of the slot's output.
    """
    table, other = address_at(weights.descriptors, 0), address_at(weights.descriptors, 5)
    values, records = weights.floats.ctypes.data, weights.records.ctypes.data
    read_embedding(table, previous, values)
    if weights.candidates > 0:
        _scale_by_output(weights, values, output)
        _score_candidates(weights, other, values, vocabulary, logits)
        return
    write_records(values, weights.descriptors[0, 2], records, 1, 0, weights.quantized)
    multiply_rows(weights.run_tile, other, 0, weights.descriptors[1, 3], records, 1, 1, logits, 0, 0, 1)


@compiled
def _scale_by_output(weights, values, output):  # type: ignore[no-untyped-def]
    """Multiply the row of A at `values` by W output."""
    matrix, scales = address_at(weights.descriptors, 10), values + 4 * weights.floats.shape[1]
    records = weights.records.ctypes.data
    write_records(output, weights.descriptors[2, 2], records, 1, 0, weights.quantized)
    multiply_rows(weights.run_tile, matrix, 0, weights.descriptors[2, 3], records, 1, 1, scales, 0, 0, 0)
    for place in range(0, weights.floats.shape[1], LANES):
        store(values + 4 * place, multiply(load(values + 4 * place), load(scales + 4 * place)))


@compiled
def _score_candidates(weights, table, values, vocabulary, logits):  # type: ignore[no-untyped-def]
    """Add <row at `values`, row of B> to the logits of the best candidates; -inf for all others."""
    least, row = _least_candidate(weights.best, vocabulary, logits), values + 4 * weights.floats.shape[1]
    for place in range(vocabulary):
        logit = load_float(logits + 4 * place)
        if logit < least:
            store_float(logits + 4 * place, np.float32(-np.inf))
        elif logit >= least:  # not NaN
            read_embedding(table, place, row)
            total = spread(np.float32(0))
            for part in range(0, weights.floats.shape[1], LANES):
                total = fma(load(values + 4 * part), load(row + 4 * part), total)
            store_float(logits + 4 * place, logit + sum_lanes(total))


@compiled
def _least_candidate(best, vocabulary, logits):  # type: ignore[no-untyped-def]
    """The smallest of the `len(best)` largest logits."""
    best[:] = -np.inf
    least = np.float32(-np.inf)
    for start in range(0, vocabulary, LANES):
        if not largest_lane(sixteen(logits, start, vocabulary)) > least:
            continue
        for place in range(start, min(start + LANES, vocabulary)):
            logit = load_float(logits + 4 * place)
            if logit > least:
                best[np.argmin(best)] = logit
                least = best.min()
    return least


@compiled
def address_at(array, place):  # type: ignore[no-untyped-def]
    """The address of an element of an array of int64."""
    return array.ctypes.data + 8 * place


@compiled(cached=True)
def _guess(weights, vocabulary, states, slots, previous, logits, before):  # type: ignore[no-untyped-def]
    for row in range(len(previous)):
        output, at = (
            states.ctypes.data + states.strides[0] * slots[row],
            logits.ctypes.data + logits.strides[0] * row,
        )
        score_pairs(weights, previous[row], vocabulary, at, output)
        before[row] = weights.floats[0, : weights.rank]


class Walk(NamedTuple):
    """The logits of one block per request, and how to draft from them."""

    logits: Float32Array  # [rows, padded vocabulary] of the blocks; corrected by previous tokens in place
    vocabulary: int  # logits without padding
    size: int  # rows of a block
    first: int  # the slot that drafts the first token
    anchors: Int32Array  # [requests] the last tokens
    contexts: Int32Array  # [requests] positions of the first drafted tokens
    most: Int32Array  # [requests] most tokens to draft
    seeds: npt.NDArray[np.uint64]  # [requests]
    temperatures: npt.NDArray[np.float64]  # [requests] 0: greedy
    target_ids: npt.NDArray[np.int64]  # [draft vocabulary] empty: the same ids
    states: Float32Array  # [rows, padded hidden] outputs of the blocks
    hidden: int  # numbers of an output without padding
    confidence: Float32Array  # [hidden (+ rank)] weights of the confidence head; empty: none
    bias: float  # of the confidence head


def walk_blocks(weights: PairWeights, walk: Walk, least_chance: float) -> HeadChains:
    """The chain drafted from each block, as backends/block_chains.py defines it."""
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
                at = walk.logits.ctypes.data + walk.logits.strides[0] * row
                output = walk.states.ctypes.data + walk.states.strides[0] * row
                score_pairs(weights, previous, walk.vocabulary, at, output)
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
                share = _confidence(walk, walk.states[row, : walk.hidden], weights.floats[0])
            chance *= share
            if chance < least_chance:
                break
            previous = best if len(walk.target_ids) == 0 else walk.target_ids[best]
            tokens[request, step], chances[request, step] = previous, chance
            lengths[request] = step + 1


@compiled
def _confidence(walk, state, before):  # type: ignore[no-untyped-def]
    """The confidence head's estimate of the chance that a slot's token is accepted."""
    total = walk.bias
    for place in range(len(state)):
        total += state[place] * walk.confidence[place]
    for place in range(len(walk.confidence) - len(state)):
        total += before[place] * walk.confidence[len(state) + place]
    return np.float32(1 / (1 + np.exp(-total)))
