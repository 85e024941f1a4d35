"""LogitEdits: how a request's options change its logits, for a device that samples its tokens.

The order is that of verify/sampling.py: bias, min_tokens, repetition, frequency and presence penalties.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.arrays import Float32Array, Int64Array


class Penalties(NamedTuple):
    """Each default changes nothing. A device keeps them as float32 [slots, 3], in this order."""

    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0


@dataclass(frozen=True)
class LogitEdits:
    """The edits of one request and the tokens that they currently depend on."""

    penalties: Penalties
    bias_ids: Int64Array  # [biased]
    bias: Float32Array  # [biased]
    ending_ids: Int64Array  # [ending] suppressed until the text has min_length tokens
    min_length: int  # tokens of prompt and output
    seen_ids: Int64Array  # [seen] that occur in prompt or output, if repetition is penalized
    output_ids: Int64Array  # [distinct] of the output
    output_counts: Float32Array  # [distinct] how often each occurs there
