"""From logits and options to a token, a distribution or the best guesses.

min_p, top_k, top_p: what they keep -> argmax(logit / temperature + gumbel)
"""

from __future__ import annotations

import math

import numpy as np

from paceline.verify.keeping import Float32Array, Float64Array, Int64Array, Options, Scratch, keep
from paceline.verify.kernels import Best, Key, Known, log_normalizer, race, rank, write_probabilities

EVERY: Int64Array = np.empty(0, dtype=np.int64)  # no ids named: the logits are those of all


def choose_token(logits: Float32Array, options: Options, scratch: Scratch, key: Key) -> int:
    """The token of argmax(log p + gumbel) over the kept ids, or -1 if the logits are not usable."""
    known, peak = _kept((logits, EVERY), options, scratch)
    if not math.isfinite(peak):
        return -1
    best = _places(1)
    race(known, options[0], key, best)
    place = int(best[0][0])
    return int(known[1][place]) if len(known[1]) else place


def target_probabilities(logits: Float32Array, options: Options, scratch: Scratch, out: Float64Array) -> bool:
    """Whether the logits are usable; then `out` is the distribution that choose_token draws from.

    It is exactly zero for every id that is not kept.
    """
    known, peak = _kept((logits, EVERY), options, scratch)
    if not math.isfinite(peak):
        return False
    write_probabilities(known, peak, options[0], out)
    return True


def best_candidates(
    known: Known, options: Options, scratch: Scratch, key: Key, coupled: bool, count: int
) -> tuple[Int64Array, Float64Array] | None:
    """The ids of the largest log p (+ gumbel if coupled), best first, at most `count`, and their log p.

    Ties to the first. None if the logits are not usable.
    """
    known, peak = _kept(known, options, scratch)
    if not math.isfinite(peak):
        return None
    logits, names = known
    best = _places(count)
    found = race(known, options[0], key, best) if coupled else rank(logits, best)
    places = best[0][:found]
    scores = logits[places].astype(np.float64) / options[0]
    scores -= log_normalizer(logits, peak, options[0])
    return names[places] if len(names) else places, scores


def _kept(known: Known, options: Options, scratch: Scratch) -> tuple[Known, float]:
    """What the options keep of the logits, and the largest, which is not finite if they are not usable."""
    logits, names = known
    peak = float(logits.max())
    _, top_k, top_p, min_p = options
    if (top_k <= 0 and top_p >= 1.0 and min_p <= 0.0) or not math.isfinite(peak):
        return known, peak
    count = keep(logits, (peak, float(logits.min())), options, scratch)
    ids = scratch[1][:count]
    return (logits[ids], names[ids] if len(names) else ids), peak


def _places(count: int) -> Best:
    return np.empty(count, dtype=np.int64), np.empty(count, dtype=np.float64)
