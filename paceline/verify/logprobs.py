"""Log-probabilities of the raw logits, before any sampling option."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from paceline.core.arrays import Float32Array
from paceline.core.params import MAX_LOGPROBS
from paceline.core.verdict import Logprob
from paceline.errors import BackendError
from paceline.verify.kernels import log_normalizer

# What a device that samples gives of each row, as float64: the normalizer (not finite if a logit is NaN or
# +inf), the sampled token's logit and rank, the likeliest ids (-1: there are no more), and their logits.
FIRST_ID = 3
FIRST_LOGIT = FIRST_ID + MAX_LOGPROBS
NUM_FIELDS = FIRST_LOGIT + MAX_LOGPROBS


def token_logprobs(logits: Float32Array, token: int, count: int) -> dict[int, Logprob]:
    """The given token's Logprob, then those of the `count` likeliest ids, likeliest first.

    Raises BackendError if the logits hold NaN or +inf.
    """
    peak = float(logits.max())
    _check_finite(peak)
    normalizer = log_normalizer(logits, peak)
    chosen = logits[token]
    rank = int(np.count_nonzero(logits > chosen)) + 1
    entries = {token: Logprob(float(chosen) - normalizer, rank)}
    for index, likely in enumerate(_likeliest(logits, count)):
        if likely != token:
            entries[likely] = Logprob(float(logits[likely]) - normalizer, index + 1)
    return entries


def logprobs_of_fields(fields: Sequence[float], token: int, count: int) -> dict[int, Logprob]:
    """What `token_logprobs` gives or raises, from the fields of a device's row."""
    normalizer, chosen, rank = fields[:FIRST_ID]
    _check_finite(normalizer)
    entries = {token: Logprob(chosen - normalizer, int(rank))}
    for index in range(count):
        likely, logit = int(fields[FIRST_ID + index]), fields[FIRST_LOGIT + index]
        if likely >= 0 and likely != token:
            entries[likely] = Logprob(logit - normalizer, index + 1)
    return entries


def _check_finite(number: float) -> None:
    """Raise BackendError if the largest logit, or the normalizer, shows that logits are unusable."""
    if not math.isfinite(number):
        raise BackendError("the model's logits hold NaN or infinity: the model file may be damaged.")


def _likeliest(logits: Float32Array, count: int) -> list[int]:
    """The ids of the `count` largest logits, ties to the lowest id."""
    count = min(count, len(logits))
    if count == 0:
        return []
    threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
    candidates = np.flatnonzero(logits >= threshold)
    order = np.argsort(-logits[candidates], kind="stable")[:count]
    return [int(token) for token in candidates[order]]
