"""From a node's logits to its one token.

The order, which is vLLM's:

    logit_bias -> min_tokens -> repetition, presence, frequency penalties     on the node's own path
    greedy: argmax, ties to the lowest id
    else:   temperature -> min_p -> top_k -> top_p -> argmax(log p + gumbel)

Top-p is measured on what min_p and top_k have kept. The token depends on the logits, the options,
the path and (seed, position), and on nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from paceline.errors import BackendError
from paceline.verify.kernels import choose_token
from paceline.verify.params import SamplingParams

Float32Array = npt.NDArray[np.float32]


class Workspace:
    """Scratch of the vocabulary's size, made once and shared by all requests of an engine."""

    def __init__(self, vocab_size: int) -> None:
        self.logits = np.empty(vocab_size, dtype=np.float32)  # [vocab] logits with options applied
        self.scaled = np.empty(vocab_size, dtype=np.float64)  # [vocab]
        self.ids = np.empty(vocab_size, dtype=np.int64)  # [vocab]
        self.weights = np.empty(vocab_size, dtype=np.int64)  # [vocab]


class TokenCounts:
    """How often each distinct token occurs, as growing arrays ready for vector use."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._places: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Count a token once more."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        self._counts[place] += 1

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The distinct tokens: int64 [distinct]."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> Float32Array:
        """How often each of `ids` occurs: float32 [distinct]."""
        return self._counts[: len(self._places)]


class Sampler:
    """One request's way from logits to a token. It follows the request's path by `advance`."""

    def __init__(
        self, params: SamplingParams, seed: int, prompt: Sequence[int], ending_ids: Iterable[int]
    ) -> None:
        """`ending_ids` are the ids that min_tokens forbids: end-of-sequence and stop ids."""
        self._params = params
        self._seed = np.uint64(seed)
        self._bias_ids = np.array(list(params.logit_bias or ()), dtype=np.int64)  # [biased]
        self._bias = np.array(list((params.logit_bias or {}).values()), dtype=np.float32)  # [biased]
        self._ending_ids = np.array(sorted(ending_ids), dtype=np.int64)  # [ending]
        self._repeats = params.repetition_penalty != 1.0
        self._counts_output = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._seen = TokenCounts(prompt if self._repeats else ())
        self._output = TokenCounts()
        self._penalized = self._repeats or self._counts_output
        self._edits_always = self._penalized or len(self._bias_ids) > 0

    def advance(self, token: int) -> None:
        """Take a token into the path."""
        if self._penalized:
            self._seen.add(token)
            self._output.add(token)

    def sample(self, logits: Float32Array, position: int, num_output: int, workspace: Workspace) -> int:
        """The token at `position`, when `num_output` tokens of output precede it.

        Raises BackendError if the logits hold NaN or +inf, or if nothing may be chosen.
        """
        forbidden = num_output < self._params.min_tokens and len(self._ending_ids) > 0
        if self._edits_always or forbidden:
            logits = self._edited(logits, forbidden, workspace.logits)
        params = self._params
        if params.temperature == 0.0:
            token = int(logits.argmax())  # the first NaN, if there is one
            largest = float(logits[token])
            if largest - largest == 0.0:  # finite
                return token
        else:
            token = choose_token(
                logits,
                float(logits.max()),
                float(logits.min()),
                params.temperature,
                params.top_k,
                params.top_p,
                params.min_p,
                self._seed,
                np.uint64(position),
                workspace.scaled,
                workspace.ids,
                workspace.weights,
            )
            if token >= 0:
                return token
        raise BackendError(
            f"the model's logits at position {position} hold NaN or infinity, or allow no token. "
            "The model file or its quantization may be damaged; try --quantization none."
        )

    def _edited(self, logits: Float32Array, forbidden: bool, edited: Float32Array) -> Float32Array:
        """The logits with bias, min_tokens and penalties applied, written to `edited`."""
        params = self._params
        np.copyto(edited, logits)
        if len(self._bias_ids):
            edited[self._bias_ids] += self._bias
        if forbidden:
            edited[self._ending_ids] = -np.inf
        if self._repeats:
            seen = edited[self._seen.ids]
            penalty = np.float32(params.repetition_penalty)
            edited[self._seen.ids] = np.where(seen > 0, seen / penalty, seen * penalty)
        if self._counts_output:
            ids, counts = self._output.ids, self._output.counts
            edited[ids] -= np.float32(params.frequency_penalty) * counts
            edited[ids] -= np.float32(params.presence_penalty)
        return edited
