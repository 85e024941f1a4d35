"""How a head drafts chains: the readable reference of every runner's `run_chains`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from paceline.backends.heads import ChainNoise, HeadBatch, HeadChains, HeadOutput
from paceline.core.arrays import Float32Array, Int32Array
from paceline.core.forward import ForwardBatch
from paceline.verify.kernels import gumbel_top_k

EXTEND_FACTOR = 1.4  # times `least_chance`, to extend a chain: one more token costs a pass of the head
RIVALS = 4  # runners-up in the softmax that estimates a coupled token's chance


def chains_by_passes(
    run: Callable[[HeadBatch], HeadOutput],
    batch: HeadBatch,
    target_ids: Int32Array | None,
    most: Sequence[int],
    least_chance: float,
    noise: ChainNoise | None = None,
) -> HeadChains:
    """A chain of at most `most` drafted tokens for each request: the best token of pass after pass.

    The chance of a chain is the product of its tokens' chances. A token is kept if the chain up to it has at
    least `least_chance`; the chain is extended if it has EXTEND_FACTOR times that. `target_ids`
    [draft vocabulary] map the head's ids to the target's; None: the same ids.
    """
    count = batch.rows.num_requests
    tokens, chances = np.zeros((count, max(most)), np.int32), np.zeros((count, max(most)), np.float32)
    lengths = np.zeros(count, np.int32)
    contexts = batch.rows.context_lengths + np.diff(
        batch.rows.row_offsets
    )  # KV indices of the first drafted tokens
    output, requests = run(batch), list(range(count))
    while True:
        going = []  # rows of the output whose chains are extended
        for row, request in enumerate(requests):
            logits, length = output.logits[row], lengths[request]
            if not np.isfinite(logits.max()):
                continue
            if noise is None or noise.temperatures[request] == 0.0:
                best, chance = likeliest(logits)
            else:
                key = noise.seeds[request], np.uint64(contexts[request] + length)
                best, chance = coupled_choice(logits, target_ids, noise.temperatures[request], key)
            chance *= chances[request, length - 1] if length else 1.0
            if chance >= least_chance:
                tokens[request, length] = best if target_ids is None else target_ids[best]
                chances[request, length] = chance
                lengths[request] += 1
                if lengths[request] < most[request] and chance >= EXTEND_FACTOR * least_chance:
                    going.append(row)
        if not going:
            return HeadChains(tokens, chances, lengths)
        requests = [requests[row] for row in going]
        last = lengths[requests] - 1
        rows = _one_row_each(batch.rows, requests, tokens[requests, last], contexts[requests] + last)
        output = run(HeadBatch(rows, output.states[going], from_target=False))


def likeliest(logits: Float32Array) -> tuple[int, float]:
    """The argmax of the logits, and the chance that it is also the target's argmax.

    The chance is estimated as the square root of the head's probability: under a greedy target it is higher
    than that probability (measured: docs/lab/2026-11-17-moved-from-guides.md).
    """
    best = int(logits.argmax())
    return best, float(np.exp(logits.astype(np.float64) - logits[best]).sum() ** -0.5)


def coupled_choice(
    logits: Float32Array, target_ids: Int32Array | None, temperature: float, key: tuple[np.uint64, np.uint64]
) -> tuple[int, float]:
    """Coupled drafting: the argmax of the head's logits plus the target's Gumbel noise, and its chance.

    The target adds the same noise, so it probably samples one of the best few tokens here. The chance is the
    softmax weight of the best one among these. `key` is the seed and the position.
    """
    ids = np.empty(0, dtype=np.int64) if target_ids is None else target_ids.astype(np.int64)
    places, scores = np.empty(1 + RIVALS, dtype=np.int64), np.empty(1 + RIVALS)
    found = gumbel_top_k((logits, ids), float(temperature), key, (places, scores))
    return int(places[0]), float(1.0 / np.exp(scores[:found] - scores[0]).sum())


def _one_row_each(
    rows: ForwardBatch, requests: Sequence[int], tokens: Int32Array, contexts: Int32Array
) -> ForwardBatch:
    """A pass with one row per request: its newest drafted token."""
    count = len(requests)
    return ForwardBatch(
        tokens=tokens,
        positions=contexts - 1,
        parents=np.full(count, -1, dtype=np.int32),
        row_offsets=np.arange(count + 1, dtype=np.int32),
        context_lengths=contexts,
        page_tables=rows.page_tables[requests],
        logit_rows=np.arange(count, dtype=np.int32),
        pool=rows.pool,
    )
