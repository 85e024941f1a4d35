"""What a chain of guesses is: the readable reference of every runner's `run_chains`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from paceline.backends.base import ChainNoise, HeadBatch, HeadChains, HeadOutput
from paceline.core.arrays import Float32Array, Int32Array
from paceline.core.forward import ForwardBatch
from paceline.verify.kernels import gumbel_top_k

TO_GO_ON = 1.4  # times the least chance: another guess costs a pass of the head, and not only a row
RIVALS = 4  # that the chance of a guess is measured against where the noise decides


def chains_by_passes(
    run: Callable[[HeadBatch], HeadOutput],
    batch: HeadBatch,
    target_ids: Int32Array | None,
    most: Sequence[int],
    least_chance: float,
    noise: ChainNoise | None = None,
) -> HeadChains:
    """At most so many guesses behind each request: the best token, then the best after that, ...

    A guess is kept if the chance of the chain up to it, the product of its tokens' chances, is at least
    `least_chance`; another one follows it if it is TO_GO_ON times that. `target_ids` [draft vocabulary] are
    what the head guesses; None: every id of the target.
    """
    count = batch.rows.num_requests
    tokens, chances = np.zeros((count, max(most)), np.int32), np.zeros((count, max(most)), np.float32)
    lengths = np.zeros(count, np.int32)
    contexts = batch.rows.context_lengths + np.diff(batch.rows.row_offsets)  # KV indices of first guesses
    output, requests = run(batch), list(range(count))
    while True:
        going = []  # rows of the output whose chains go on
        for row, request in enumerate(requests):
            logits, length = output.logits[row], lengths[request]
            if not np.isfinite(logits.max()):
                continue
            if noise is None or noise.temperatures[request] == 0.0:
                best, chance = likeliest(logits)
            else:
                key = noise.seeds[request], np.uint64(contexts[request] + length)
                best, chance = favoured(logits, target_ids, noise.temperatures[request], key)
            chance *= chances[request, length - 1] if length else 1.0
            if chance >= least_chance:
                tokens[request, length] = best if target_ids is None else target_ids[best]
                chances[request, length] = chance
                lengths[request] += 1
                if lengths[request] < most[request] and chance >= TO_GO_ON * least_chance:
                    going.append(row)
        if not going:
            return HeadChains(tokens, chances, lengths)
        requests = [requests[row] for row in going]
        last = lengths[requests] - 1
        rows = _one_row_each(batch.rows, requests, tokens[requests, last], contexts[requests] + last)
        output = run(HeadBatch(rows, output.states[going], from_target=False))


def likeliest(logits: Float32Array) -> tuple[int, float]:
    """The largest of the logits, and the chance that it is also the target's.

    That is the root of its share of the softmax: the target is surer than its softmax, too, when it takes the
    largest (measured: docs/heads.md).
    """
    best = int(logits.argmax())
    return best, float(np.exp(logits.astype(np.float64) - logits[best]).sum() ** -0.5)


def favoured(
    logits: Float32Array, target_ids: Int32Array | None, temperature: float, key: tuple[np.uint64, np.uint64]
) -> tuple[int, float]:
    """What the noise of the target's own choice favours, and the chance that the target chooses it.

    The target adds the same noise: what it chooses is among those that are ahead with it, so the chance is
    the share of the best among the best few. `key` is the seed and the position.
    """
    names = np.empty(0, dtype=np.int64) if target_ids is None else target_ids.astype(np.int64)
    places, scores = np.empty(1 + RIVALS, dtype=np.int64), np.empty(1 + RIVALS)
    found = gumbel_top_k((logits, names), float(temperature), key, (places, scores))
    return int(places[0]), float(1.0 / np.exp(scores[:found] - scores[0]).sum())


def _one_row_each(
    rows: ForwardBatch, requests: Sequence[int], tokens: Int32Array, contexts: Int32Array
) -> ForwardBatch:
    """A pass over one guess of each of these requests."""
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
