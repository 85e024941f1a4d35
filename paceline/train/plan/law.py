"""The law that pilots fit: the chance of each drafted token grows with training tokens and with the head.

For position k of a draft, the chance that it is accepted if all before it were is a logistic function:

    logit chance[k] = a[k] + b[k] * log(trained tokens) + c[k] * log(layers)

(Acceptance that is log-linear in data and capacity: Scylla, arXiv 2505.07858.) A draft's acceptance length,
the bonus token included, is 1 plus the sum of the products of the chances up to each position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.errors import ConfigError

Floats = npt.NDArray[np.float64]

SMALLEST_CHANCE = 1e-3  # of a position; 0 and 1 have no logit
SCENARIOS = 2000  # samples of the coefficients, for the interval
INTERVAL = (5.0, 95.0)  # percentiles
MIN_SCATTER = 0.02  # logits: pilots that a line happens to meet exactly are no proof of certainty


@dataclass(frozen=True)
class Pilot:
    """A short training run and what its head accepts."""

    layers: int
    vocabulary: int  # tokens that it may guess: see vocabulary.py
    tokens: int  # answered tokens that it was trained on, repetitions included
    survival: tuple[float, ...]  # [positions] share of drafts whose first k + 1 tokens are right
    seconds_per_token: float  # of training

    @property
    def length(self) -> float:
        """The acceptance length, the bonus token included."""
        return 1.0 + sum(self.survival)


@dataclass(frozen=True)
class Prediction:
    """An acceptance length and its 90 % interval: all lengths there are, if pilots tell nothing of theirs."""

    length: float
    low: float
    high: float


class Law:
    """The law fitted to pilots."""

    def __init__(self, pilots: Sequence[Pilot], seed: int = 0) -> None:
        """ConfigError unless the pilots differ in data; a law of one size of head has no term for it."""
        if len({pilot.tokens for pilot in pilots}) < 2:
            raise ConfigError(
                "The pilots were trained on one amount of data: give two or more numbers of --steps."
            )
        self._with_layers = len({pilot.layers for pilot in pilots}) > 1
        rows = np.stack([self._terms(pilot.layers, pilot.tokens) for pilot in pilots])  # [pilots, terms]
        logits = np.stack([_logits(pilot.survival) for pilot in pilots])  # [pilots, positions]
        inverse = np.linalg.pinv(rows.T @ rows)
        self._coefficients = inverse @ rows.T @ logits  # [terms, positions]
        # a law that meets every pilot tells nothing of its own error
        self.has_interval = len(pilots) > rows.shape[1]
        spare = max(1, len(pilots) - rows.shape[1])
        errors = logits - rows @ self._coefficients
        scatter = np.maximum(np.sqrt((errors**2).sum(0) / spare), MIN_SCATTER)  # [positions]
        # Positions err together (a better head is better everywhere), so one sample moves all of them. Few
        # pilots tell little about their own scatter: a sample of Student's distribution, not the normal one.
        random = np.random.default_rng(seed)
        widths = np.sqrt(spare / random.chisquare(spare, SCENARIOS))
        self._shifts = random.multivariate_normal(np.zeros(len(inverse)), inverse, SCENARIOS)
        self._shifts *= widths[:, None]  # [scenarios, terms] of the coefficients, in units of the scatter
        self._noise = widths * random.standard_normal(SCENARIOS)  # of the planned run itself
        self._scatter = scatter

    def predict(self, layers: int, tokens: float, drafts: int | None = None) -> Prediction:
        """The acceptance length of a head of this size, trained on this number of tokens.

        `drafts`: drafted tokens of a pass; None: all positions of the pilots.
        """
        terms = self._terms(layers, tokens)
        logits = (terms @ self._coefficients)[:drafts]  # [positions]
        length = float(_length(logits[None])[0])
        if not self.has_interval:
            return Prediction(length, 1.0, 1.0 + len(logits))
        moved = self._shifts @ terms + self._noise  # [scenarios] in units of the scatter
        lengths = _length(logits + moved[:, None] * self._scatter[:drafts])
        low, high = np.percentile(lengths, INTERVAL)
        return Prediction(length, float(low), float(high))

    def _terms(self, layers: int, tokens: float) -> Floats:
        terms = [1.0, np.log(tokens), *([np.log(layers)] if self._with_layers else [])]
        return np.array(terms)


def _logits(survival: Sequence[float]) -> Floats:
    """The logit of each position's chance, given that all before it were accepted."""
    reached = np.array([1.0, *survival])
    chances = reached[1:] / np.maximum(reached[:-1], SMALLEST_CHANCE)
    chances = chances.clip(SMALLEST_CHANCE, 1 - SMALLEST_CHANCE)
    logits: Floats = np.log(chances / (1 - chances))
    return logits


def _length(logits: Floats) -> Floats:
    """Acceptance lengths [scenarios] of chances [scenarios, positions]."""
    lengths: Floats = 1.0 + ((1 + np.tanh(logits / 2)) / 2).cumprod(1).sum(1)
    return lengths
