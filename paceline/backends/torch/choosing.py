"""Tokens sampled where their logits are: each rank has its best one, and only those are gathered."""

from __future__ import annotations

import numpy as np
import torch

from paceline.core.arrays import Float32Array, Int32Array
from paceline.core.forward import Choices
from paceline.models.transformer.blocks import Vocabulary

NO_TOKEN = -1  # where the logits give none: the largest is not a finite number


def choose(
    lm_head: Vocabulary, parts: list[torch.Tensor], choices: Choices, positions: Int32Array
) -> Int32Array:
    """The token of each choice [choices], from the logits [choices, piece] of each piece that a rank has.

    `positions` [choices] are those of the tokens. Of equal scores the lowest token wins, as everywhere.
    """
    begin = lm_head.parallel.rows(lm_head.size)[0].start
    logits = torch.cat(parts, dim=-1).float().cpu().numpy()
    own = np.empty((len(logits), 3))  # the largest logit, the score of the best token, and the token
    for row, scores in enumerate(logits):
        key = choices.seeds[row], np.uint64(positions[row])
        own[row] = _best(scores, begin, float(choices.temperatures[row]), key)
    gathered = lm_head.parallel.ranks.gather(torch.from_numpy(own).to(parts[0].device))
    largest, scores, tokens = np.moveaxis(torch.stack(gathered).cpu().numpy(), -1, 0)  # each [ranks, choices]
    first = scores.argmax(0)  # ranks have ascending tokens: of equal scores, the lowest rank's wins
    chosen = tokens[first, np.arange(len(first))]
    return np.where(np.isfinite(largest.max(0)), chosen, NO_TOKEN).astype(np.int32)


def _best(
    logits: Float32Array, begin: int, temperature: float, key: tuple[np.uint64, np.uint64]
) -> tuple[float, float, int]:
    """The largest of a rank's logits of one row, its best score and the token that has it."""
    largest = float(logits.max())  # NaN if one is
    if not np.isfinite(largest):
        return largest, -np.inf, NO_TOKEN
    if temperature == 0.0:
        return largest, largest, begin + int(logits.argmax())
    from paceline.verify.kernels import gumbel_top_k  # here: ranks that never sample need no kernels

    ids = np.arange(begin, begin + len(logits), dtype=np.int64)
    best = np.empty(1, dtype=np.int64), np.empty(1)
    gumbel_top_k((logits, ids), temperature, key, best)
    return largest, float(best[1][0]), begin + int(best[0][0])
