"""Applying the options that edit logits. The name is vLLM's.

allowed_token_ids -> bad_words -> min_tokens -> logit_bias -> repetition, presence, frequency penalties
"""

from __future__ import annotations

import numpy as np

from paceline.core.arrays import BoolArray, Float32Array
from paceline.core.logit_edits import LogitOptions
from paceline.errors import ExhaustedError


def apply_options(
    options: LogitOptions,
    logits: Float32Array,
    mask: BoolArray | None,
    num_output: int,
    edited: Float32Array,
) -> Float32Array:
    """`edited`, which becomes the logits that `mask` (a constraint; None: all) allows, edited by the options.

    A constraint goes first: where it allows only tokens that the options forbid, they are allowed.
    Without one that is an ExhaustedError.
    """
    _copy_allowed(logits, mask, edited)
    if _forbid(options, edited, num_output) and edited.max() == -np.inf:
        if mask is None and logits.max() > -np.inf:
            raise ExhaustedError(
                f"after {num_output} tokens of output allowed_token_ids, bad_words and min_tokens leave "
                "no token to sample. Allow more ids, or leave one of these options out."
            )
        _copy_allowed(logits, mask, edited)
    if len(options.bias_ids):
        edited[options.bias_ids] += options.bias
    if options.penalizes:
        _penalize(options, edited)
    return edited


def _forbid(options: LogitOptions, edited: Float32Array, num_output: int) -> bool:
    """Whether tokens were forbidden: those not allowed, the ends of bad words, endings by min_tokens."""
    forbids_endings = options.forbids_endings(num_output)
    if len(options.allowed_ids):
        allowed = edited[options.allowed_ids]
        edited.fill(-np.inf)
        edited[options.allowed_ids] = allowed
    if options.bad_words:
        edited[options.bad_words.after(options.recent)] = -np.inf
    if forbids_endings:
        edited[options.ending_ids] = -np.inf
    return options.bans or forbids_endings


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


def _copy_allowed(logits: Float32Array, mask: BoolArray | None, edited: Float32Array) -> None:
    """Make `edited` the logits, -inf where the mask does not allow them."""
    if mask is None:
        np.copyto(edited, logits)
    else:
        edited.fill(-np.inf)
        np.copyto(edited, logits, where=mask)
