"""From logits and sampling options to a token, a distribution or the best draft candidates.

truncate -> argmax(logit / temperature + gumbel)      (the Gumbel-max trick)
"""

from __future__ import annotations

import math

import numpy as np

from paceline.core.arrays import Float32Array, Float64Array, Int64Array
from paceline.verify.kernels import (
    IdLogits,
    Key,
    Top,
    gumbel_top_k,
    log_normalizer,
    logit_top_k,
    write_probabilities,
)
from paceline.verify.truncation import Options, Scratch, truncate

ALL_IDS: Int64Array = np.empty(0, dtype=np.int64)  # the logits are those of the whole vocabulary, in order


def choose_token(logits: Float32Array, options: Options, scratch: Scratch, key: Key) -> int:
    """The token of argmax(log p + gumbel) over the kept ids, or -1 if the logits are not usable."""
    kept, peak = _truncated((logits, ALL_IDS), options, scratch)
    if not math.isfinite(peak):
        return -1
    top = _top_arrays(1)
    gumbel_top_k(kept, options[0], key, top)
    index = int(top[0][0])
    return int(kept[1][index]) if len(kept[1]) else index


def target_probabilities(logits: Float32Array, options: Options, scratch: Scratch, out: Float64Array) -> bool:
    """Whether the logits are usable; then `out` is the distribution that choose_token draws from.

    It is exactly zero for every id that is not kept.
    """
    kept, peak = _truncated((logits, ALL_IDS), options, scratch)
    if not math.isfinite(peak):
        return False
    write_probabilities(kept, peak, options[0], out)
    return True


def best_candidates(
    candidates: IdLogits, options: Options, scratch: Scratch, key: Key, coupled: bool, count: int
) -> tuple[Int64Array, Float64Array] | None:
    """The ids of the largest log p (+ gumbel if coupled), best first, at most `count`, and their log p.

    Ties to the first. None if the logits are not usable.
    """
    kept, peak = _truncated(candidates, options, scratch)
    if not math.isfinite(peak):
        return None
    logits, ids = kept
    top = _top_arrays(count)
    found = gumbel_top_k(kept, options[0], key, top) if coupled else logit_top_k(logits, top)
    indices = top[0][:found]
    scores = logits[indices].astype(np.float64) / options[0]
    scores -= log_normalizer(logits, peak, options[0])
    return ids[indices] if len(ids) else indices, scores


def _truncated(candidates: IdLogits, options: Options, scratch: Scratch) -> tuple[IdLogits, float]:
    """The candidates that the options keep, and the largest logit: not finite if they are not usable."""
    logits, ids = candidates
    peak = float(logits.max())
    if options[1].keeps_all or not math.isfinite(peak):
        return candidates, peak
    count = truncate(logits, (peak, float(logits.min())), options, scratch)
    kept = scratch[1][:count]
    return (logits[kept], ids[kept] if len(ids) else kept), peak


def _top_arrays(count: int) -> Top:
    return np.empty(count, dtype=np.int64), np.empty(count, dtype=np.float64)
