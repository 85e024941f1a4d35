"""What a chain of guesses is: the readable reference of every runner's `run_chains`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from paceline.backends.base import ForwardBatch, HeadBatch, HeadChains, HeadOutput, Int32Array

TO_GO_ON = 1.4  # times the least chance: another guess costs a pass of the head, and not only a row


def chains_by_passes(
    run: Callable[[HeadBatch], HeadOutput],
    batch: HeadBatch,
    target_ids: Int32Array | None,
    most: Sequence[int],
    least_chance: float,
) -> HeadChains:
    """At most so many guesses behind each request: the likeliest token, then the likeliest after that, ...

    A guess is kept if the chance of the chain up to it, the product of its tokens' chances, is at least
    `least_chance`; another one follows it if it is TO_GO_ON times that. The chance that the likeliest token
    is also the target's likeliest is the root of its share of the softmax: the target is surer than its
    softmax, too, when it takes the largest (measured: docs/heads.md). `target_ids` [draft vocabulary] are
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
            logits, length = output.logits[row].astype(np.float64), lengths[request]
            best = int(logits.argmax())
            share = 1.0 / np.exp(logits - logits[best]).sum() if np.isfinite(logits[best]) else np.nan
            chance = np.sqrt(share) * (chances[request, length - 1] if length else 1.0)
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
