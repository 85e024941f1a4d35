"""Perplexity of a fixed text on any backend: the cost of quantization in one number."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.backends.base import Backend
from paceline.core.arrays import Float32Array, Int32Array
from paceline.core.forward import ForwardBatch, chain_parents
from paceline.errors import ConfigError, RequestError

CHUNK = 64  # rows per pass; with logits for all of them, more would need much memory


def perplexity(backend: Backend, token_ids: Sequence[int], context: int = 512) -> float:
    """exp(mean negative log-likelihood) of every token except the first.

    The text is cut into windows of `context` tokens that overlap by one, so that each token is predicted
    once, from what precedes it in its window.
    """
    if context < 2:
        raise ConfigError(
            f"context is {context}, but a token is predicted from one before it; give 2 or more."
        )
    if len(token_ids) < 2:
        raise RequestError(
            f"The text has {len(token_ids)} tokens, but perplexity needs at least 2; give more."
        )
    tokens = np.asarray(token_ids, dtype=np.int32)
    starts = range(0, len(tokens) - 1, context - 1)
    losses = [_window_losses(backend, tokens[start : start + context]) for start in starts]
    return math.exp(np.concatenate(losses).mean())


def _window_losses(backend: Backend, tokens: Int32Array) -> npt.NDArray[np.float64]:
    """Negative log-likelihood of tokens 1 to the last of one window: float64 [tokens - 1]."""
    inputs, targets = tokens[:-1], tokens[1:]
    num_pages = -(-len(inputs) // backend.page_size)
    pool = backend.make_pool(num_pages)
    chunk = min(CHUNK, backend.max_rows)
    losses = []
    for start in range(0, len(inputs), chunk):
        rows = len(inputs[start : start + chunk])
        output = backend.forward(
            ForwardBatch(
                tokens=inputs[start : start + rows],
                positions=np.arange(start, start + rows, dtype=np.int32),
                parents=chain_parents([rows]),
                row_offsets=np.array([0, rows], dtype=np.int32),
                context_lengths=np.array([start], dtype=np.int32),
                page_tables=np.arange(num_pages, dtype=np.int32)[None, :],
                logit_rows=np.arange(rows, dtype=np.int32),
                pool=pool,
            )
        )
        losses.append(negative_log_likelihood(output.logits, targets[start : start + rows]))
    return np.concatenate(losses)


def negative_log_likelihood(logits: Float32Array, targets: Int32Array) -> npt.NDArray[np.float64]:
    """-log softmax(logits)[target] of every row, in float64: [rows]."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)  # so that no exponential overflows
    result: npt.NDArray[np.float64] = np.log(np.exp(wide).sum(axis=-1)) - wide[np.arange(len(wide)), targets]
    return result
