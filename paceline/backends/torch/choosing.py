"""Sampling across ranks: each rank finds its best token, and only these candidates are gathered."""

from __future__ import annotations

import numpy as np
import torch

from paceline.core.arrays import Float32Array, Int32Array
from paceline.core.forward import Choices
from paceline.models.transformer.blocks import Vocabulary

NO_TOKEN = -1  # of unusable logits: the largest is not finite


def choose(
    lm_head: Vocabulary, parts: list[torch.Tensor], choices: Choices, positions: Int32Array
) -> Int32Array:
    """The sampled tokens [choices], from the logits [choices, piece] of each piece that a rank has.

    `positions` [choices] are those of the tokens. Ties go to the lowest token id.
    """
    begin = lm_head.parallel.rows(lm_head.size)[0].start
    logits = torch.cat(parts, dim=-1).float().cpu().numpy()
    own = np.empty((len(logits), 3))  # the largest logit, the score of the best token, and the token
    for row, scores in enumerate(logits):
        key = choices.seeds[row], np.uint64(positions[row])
        own[row] = _best(scores, begin, float(choices.temperatures[row]), key)
    gathered = lm_head.parallel.ranks.gather(torch.from_numpy(own).to(parts[0].device))
    largest, scores, tokens = np.moveaxis(torch.stack(gathered).cpu().numpy(), -1, 0)  # each [ranks, choices]
    first = scores.argmax(0)  # token ids ascend with the rank, so of equal scores the lowest rank's wins
    chosen = tokens[first, np.arange(len(first))]
    return np.where(np.isfinite(largest.max(0)), chosen, NO_TOKEN).astype(np.int32)


def _best(
    logits: Float32Array, begin: int, temperature: float, key: tuple[np.uint64, np.uint64]
) -> tuple[float, float, int]:
    """For one row of a rank's logits: the largest logit, the best score, and the token with that score."""
    largest = float(logits.max())  # NaN if one is
    if not np.isfinite(largest):
        return largest, -np.inf, NO_TOKEN
    if temperature == 0.0:
        return largest, largest, begin + int(logits.argmax())
    # imported here: it compiles kernels, which ranks that never sample do not need
    from paceline.verify.kernels import gumbel_top_k

    ids = np.arange(begin, begin + len(logits), dtype=np.int64)
    best = np.empty(1, dtype=np.int64), np.empty(1)
    gumbel_top_k((logits, ids), temperature, key, best)
    return largest, float(best[1][0]), begin + int(best[0][0])
