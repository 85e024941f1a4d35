"""Log-probabilities of the raw logits, before any sampling option."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from paceline.core.verdict import Logprob
from paceline.errors import BackendError
from paceline.verify.kernels import log_normalizer


def token_logprobs(logits: npt.NDArray[np.float32], token: int, count: int) -> dict[int, Logprob]:
    """The given token's Logprob, then those of the `count` likeliest ids, likeliest first.

    Raises BackendError if the logits hold NaN or +inf.
    """
    peak = float(logits.max())
    if not math.isfinite(peak):
        raise BackendError("the model's logits hold NaN or infinity: the model file may be damaged.")
    normalizer = log_normalizer(logits, peak)
    chosen = logits[token]
    rank = int(np.count_nonzero(logits > chosen)) + 1
    entries = {token: Logprob(float(chosen) - normalizer, rank)}
    for index, likely in enumerate(_likeliest(logits, count)):
        if likely != token:
            entries[likely] = Logprob(float(logits[likely]) - normalizer, index + 1)
    return entries


def _likeliest(logits: npt.NDArray[np.float32], count: int) -> list[int]:
    """The ids of the `count` largest logits, ties to the lowest id."""
    count = min(count, len(logits))
    if count == 0:
        return []
    threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
    candidates = np.flatnonzero(logits >= threshold)
    order = np.argsort(-logits[candidates], kind="stable")[:count]
    return [int(token) for token in candidates[order]]
