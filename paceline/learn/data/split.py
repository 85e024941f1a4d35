"""Which rows train a head, which end its training, and which judge it: by a hash, so that all agree.

A row's side depends on its prompt alone. All answers to a prompt are on one side, in every process and
after every restart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import Enum

import numpy as np

GATE_SHARE = 0.1  # of the prompts; seen only by the gate
STOP_SHARE = 0.1  # of the prompts; the trainer keeps the weights that draft best on them


class Side(Enum):
    """What a row is used for."""

    TRAIN = "train"
    STOP = "stop"  # measured while training, never trained on
    GATE = "gate"  # the trainer never reads it: it judges the result


def side_of(prompt_ids: Sequence[int]) -> Side:
    """The side of all rows with this prompt."""
    place = unit_hash("split", prompt_ids)
    if place < GATE_SHARE:
        return Side.GATE
    return Side.STOP if place < GATE_SHARE + STOP_SHARE else Side.TRAIN


def unit_hash(purpose: str, ids: Sequence[int]) -> float:
    """A number from 0 to 1 by which these ids are chosen; other purposes give independent numbers."""
    content = purpose.encode() + b"\0" + np.array(ids, dtype="<i4").tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") / 2**64
