"""From a node's logits to its one token.

The order, which is vLLM's:

    constraint -> allowed_token_ids, bad_words, min_tokens -> logit_bias -> penalties
    greedy: argmax, ties to the lowest id
    else:   temperature -> truncation -> argmax(log p + gumbel)

all on the node's own path. A constraint goes first: a token that it forces is taken whatever the other
options say, and so are its tokens where they forbid them all. `logits_processors.py` has the options.
The order within truncation is that of `truncation.py`. The token depends on the logits, the options, the
path and (seed, position), and on nothing else.
"""

from __future__ import annotations

import math

import numpy as np

from paceline.core.arrays import Float32Array, Float64Array, Int64Array
from paceline.core.sampling import SamplingState
from paceline.core.token_masks import unpacked
from paceline.core.truncation import KEEPS_ALL
from paceline.errors import BackendError
from paceline.verify.choosing import ALL_IDS, best_candidates, choose_token, target_probabilities
from paceline.verify.logits_processors import apply_options

_PLAIN_OPTIONS = (1.0, KEEPS_ALL)  # temperature, truncation: the plain softmax


class Sampler:
    """Samples tokens from logits, for any request, in scratch arrays that it allocates once."""

    def __init__(self, vocab_size: int) -> None:
        self._edited = np.empty(vocab_size, dtype=np.float32)  # [vocab] logits with options applied
        self._scratch = (  # [vocab] each, for the kernels
            np.empty(vocab_size, dtype=np.float64),
            np.empty(vocab_size, dtype=np.int64),
            np.empty(vocab_size, dtype=np.int64),
        )
        self._lines = np.empty((0, vocab_size), dtype=np.float64)  # [lines, vocab]

    def lines(self, count: int) -> Float64Array:
        """Uninitialized distributions: float64 [count, vocab]. The next call may return the same memory."""
        if count > len(self._lines):
            self._lines = np.empty((count, self._lines.shape[1]), dtype=np.float64)
        return self._lines[:count]

    def sample(self, state: SamplingState, logits: Float32Array, position: int, num_output: int) -> int:
        """The token at `position`, when `num_output` tokens of output precede it.

        Raises BackendError if the logits hold NaN or +inf, or if no token is allowed.
        """
        forced = _forced(state, logits)
        if forced is not None:
            return forced
        if state.greedy and not state.edits_logits(num_output):
            token = int(logits.argmax())  # if the largest of all is allowed, it is the largest allowed
            if math.isfinite(logits[token]) and (state.constraint is None or state.constraint.allows(token)):
                return token
        logits = self.edited_logits(state, logits, num_output)
        if state.greedy:
            token = int(logits.argmax())  # the first NaN, if there is one
            if math.isfinite(logits[token]):
                return token
        else:
            key = (np.uint64(state.seed), np.uint64(position))
            token = choose_token(logits, state.options, self._scratch, key)
            if token >= 0:
                return token
        raise unusable_logits(f"at position {position}")

    def probabilities(
        self, state: SamplingState, logits: Float32Array, num_output: int, out: Float64Array | None = None
    ) -> Float64Array:
        """The distribution that `sample` draws from, all options applied: float64 [vocab], in `out` if given.

        Exactly zero for what the options exclude; one-hot at temperature 0. Raises BackendError
        where `sample` does.
        """
        if out is None:
            out = np.empty(len(logits), dtype=np.float64)
        forced = _forced(state, logits)
        if forced is not None:
            out[:] = 0.0
            out[forced] = 1.0
            return out
        logits = self.edited_logits(state, logits, num_output)
        if state.greedy:
            token = int(logits.argmax())
            usable = math.isfinite(logits[token])
            out[:] = 0.0
            out[token] = 1.0
        else:
            usable = target_probabilities(logits, state.options, self._scratch, out)
        if not usable:
            raise unusable_logits(f"after {num_output} tokens of output")
        return out

    def candidates(
        self,
        state: SamplingState,
        logits: Float32Array,
        position: int,
        num_output: int,
        count: int,
        coupled: bool,
        known: Int64Array = ALL_IDS,
    ) -> tuple[Int64Array, Float64Array]:
        """The `count` best ids, best first, and their log p: int64 and float64 [at most count].

        Best by log p + gumbel if coupled: the first is then the token that `sample` would return. Else by
        log p, ties to the lowest id. Fewer where the options keep fewer. At temperature 0, where p is
        one-hot, they are ranked by the logits, and log p is that of temperature 1. The logits may be those
        of the ids `known` only, if `state.leaves_logits`.
        """
        forced = _forced(state, logits)
        if forced is not None:
            return np.array([forced]), np.zeros(1)
        logits = self.edited_logits(state, logits, num_output)
        best = best_candidates(
            (logits, known),
            _PLAIN_OPTIONS if state.greedy else state.options,
            self._scratch,
            (np.uint64(state.seed), np.uint64(position)),
            coupled and not state.greedy,
            count,
        )
        if best is None:
            raise unusable_logits(f"at position {position}")
        return best

    def edited_logits(self, state: SamplingState, logits: Float32Array, num_output: int) -> Float32Array:
        """The logits that the constraint allows, edited by the options, if there are any."""
        if state.leaves_logits(num_output):
            return logits
        mask = None
        if state.needs_mask(num_output):
            mask = unpacked(state.token_mask(num_output, len(logits)), len(logits))
        return apply_options(state.logit_options, logits, mask, self._edited)


def _forced(state: SamplingState, logits: Float32Array) -> int | None:
    """The token that the constraint forces, if it allows exactly one."""
    if state.constraint is None:
        return None
    forced = state.constraint.forced()
    if not forced:
        return None
    if not math.isfinite(logits[forced[0]]):
        raise unusable_logits(f"of token {forced[0]}")
    return forced[0]


def unusable_logits(where: str) -> BackendError:
    """The error for a request whose logits give no token."""
    return BackendError(
        f"the model's logits {where} hold NaN or infinity, or allow no token. "
        "The model file or its quantization may be damaged; try --quantization none."
    )
