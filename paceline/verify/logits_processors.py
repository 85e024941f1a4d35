"""Applying the options that edit logits. The name is vLLM's.

token mask (constraint, allowed_token_ids, bad_words, min_tokens) -> logit_bias
    -> repetition, presence, frequency penalties
"""

from __future__ import annotations

import numpy as np

from paceline.core.arrays import BoolArray, Float32Array
from paceline.core.logit_edits import LogitOptions


def apply_options(
    options: LogitOptions, logits: Float32Array, mask: BoolArray | None, edited: Float32Array
) -> Float32Array:
    """`edited`, which becomes the logits with bias and penalties, -inf where `mask` (None: all) forbids."""
    if mask is None:
        np.copyto(edited, logits)
    else:
        edited.fill(-np.inf)
        np.copyto(edited, logits, where=mask)
    if len(options.bias_ids):
        edited[options.bias_ids] += options.bias
    if options.penalizes:
        _penalize(options, edited)
    return edited


def _penalize(options: LogitOptions, edited: Float32Array) -> None:
    penalties = options.penalties
    if options.repeats:
        seen = edited[options.seen.ids]
        penalty = np.float32(penalties.repetition)
        edited[options.seen.ids] = np.where(seen > 0, seen / penalty, seen * penalty)
    if options.counts_output:
        ids, counts = options.output.ids, options.output.counts
        edited[ids] -= np.float32(penalties.frequency) * counts
        edited[ids] -= np.float32(penalties.presence)
