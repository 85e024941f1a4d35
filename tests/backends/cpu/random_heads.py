"""Slots of a draft head, at random, and passes over those of one request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.backends.heads import HeadOutput
from paceline.models.heads.config import HeadConfig
from tests.models.heads.driver import DrivenHead, run_heads


def random_slots(config: HeadConfig, count: int) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Tokens, features of a target [count, features * Ht], and states as a head gives them [count, H]."""
    rng = np.random.default_rng(8)
    features = rng.standard_normal((count, config.feature_width), dtype=np.float32)
    states = rng.standard_normal((count, config.hidden_size), dtype=np.float32)
    return rng.integers(0, config.vocab_size, count).tolist(), 2 * features, states


def extend(request: DrivenHead, tokens: Sequence[int], features: np.ndarray) -> HeadOutput:
    """Logits and states of a chain that the target feeds, which is kept."""
    return run_heads([request.ask(features, tokens)], from_target=True)


def draft(
    request: DrivenHead, tokens: Sequence[int], states: np.ndarray, parents: Sequence[int] | None = None
) -> HeadOutput:
    """Logits and states of a tree, or a chain, that the head feeds itself, which is not kept."""
    return run_heads([request.ask(states, tokens, parents)], from_target=False, keep=False)
