"""The sampling options that edit logits, as they stand on one path. The name is vLLM's.

    allowed_token_ids -> bad_words -> min_tokens -> logit_bias -> repetition, presence, frequency penalties

Penalties and bad_words depend on the path: `advance` appends a token to it, `branch` copies it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from paceline.core.arrays import BoolArray, Float32Array, Int64Array
from paceline.core.logit_edits import LogitEdits, Penalties
from paceline.core.params import SamplingParams
from paceline.errors import ExhaustedError


class TokenCounts:
    """How often each distinct token occurs, as growing arrays for vectorized use."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._indices: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Count a token once more."""
        index = self._indices.setdefault(token, len(self._indices))
        if index == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[index] = token
        self._counts[index] += 1

    def copy(self) -> TokenCounts:
        """An independent copy."""
        twin = copy.copy(self)
        twin._indices = self._indices.copy()
        twin._ids = self._ids.copy()
        twin._counts = self._counts.copy()
        return twin

    @property
    def ids(self) -> Int64Array:
        """The distinct tokens: int64 [distinct]."""
        return self._ids[: len(self._indices)]

    @property
    def counts(self) -> Float32Array:
        """How often each of `ids` occurs: float32 [distinct]."""
        return self._counts[: len(self._indices)]


class BadWords:
    """Token sequences that may not occur in the output: the last token is banned where the others precede."""

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        """No sequence may be empty."""
        banned: dict[tuple[int, ...], set[int]] = {}
        for sequence in sequences:
            banned.setdefault(tuple(sequence[:-1]), set()).add(sequence[-1])
        self._banned: Mapping[tuple[int, ...], list[int]] = {
            prefix: sorted(tokens) for prefix, tokens in banned.items()
        }
        self._lengths = sorted({len(prefix) for prefix in banned})

    def __bool__(self) -> bool:
        return bool(self._banned)

    @property
    def longest_prefix(self) -> int:
        """How many tokens of the output decide what is banned next, at most."""
        return max(self._lengths, default=0)

    def after(self, output: tuple[int, ...]) -> list[int]:
        """The tokens that may not follow an output that ends with these."""
        found: list[int] = []
        for length in self._lengths:
            if length <= len(output):
                found += self._banned.get(output[len(output) - length :], ())
        return found


# Most requests have none of these options, and share what is empty: making it took 7 of the 60 microseconds
# that a request takes to be added.
_NO_IDS: Int64Array = np.zeros(0, dtype=np.int64)
_NO_BIAS: tuple[Int64Array, Float32Array] = _NO_IDS, np.zeros(0, dtype=np.float32)
_NO_BAD_WORDS = BadWords(())
_NOTHING_COUNTED = TokenCounts()  # never added to


def _ids(ids: Sequence[int]) -> Int64Array:
    return np.array(ids, dtype=np.int64) if ids else _NO_IDS


def _bias_of(bias: Mapping[int, float]) -> tuple[Int64Array, Float32Array]:
    return np.array(list(bias), dtype=np.int64), np.array(list(bias.values()), dtype=np.float32)


class LogitsProcessors:
    """The logit-editing options of one request. They know the request's path from `advance`."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        ending_ids: Iterable[int],
        bad_words: Collection[Sequence[int]] = (),
    ) -> None:
        """`ending_ids` are those that min_tokens forbids; `bad_words` are token sequences."""
        self._params = params
        self._prompt_length = len(prompt)
        # [biased] each
        self._bias_ids, self._bias = _bias_of(params.logit_bias) if params.logit_bias else _NO_BIAS
        self._ending_ids = _ids(sorted(ending_ids))  # [ending]
        self._allowed_ids = _ids(params.allowed_token_ids or ())  # [allowed]; empty: all
        self._bad_words = BadWords(bad_words) if bad_words else _NO_BAD_WORDS
        self._lookback = self._bad_words.longest_prefix
        self._recent: tuple[int, ...] = ()  # the last tokens of the output, at most `_lookback`
        self._repeats = params.repetition_penalty != 1.0
        self._counts_output = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._penalizes = self._repeats or self._counts_output
        self._seen = self._output = _NOTHING_COUNTED
        if self._penalizes:
            self._seen, self._output = TokenCounts(prompt if self._repeats else ()), TokenCounts()
        self.follows_path = self._penalizes or self._lookback > 0
        self.bans = bool(self._bad_words) or len(self._allowed_ids) > 0  # tokens, besides min_tokens
        self._edits_always = self._penalizes or self.bans or len(self._bias_ids) > 0

    def edits(self, num_output: int) -> bool:
        """Whether any option edits logits from here on."""
        return self._edits_always or self._forbids_endings(num_output)

    def for_device(self) -> LogitEdits:
        """All but `bans`, which a device does not do, for one that samples the next tokens."""
        params = self._params
        return LogitEdits(
            Penalties(params.repetition_penalty, params.frequency_penalty, params.presence_penalty),
            self._bias_ids,
            self._bias,
            self._ending_ids,
            self._prompt_length + params.min_tokens,
            self._seen.ids,
            self._output.ids,
            self._output.counts,
        )

    def advance(self, token: int) -> None:
        """Append a token to the path."""
        if self._penalizes:
            self._seen.add(token)
            self._output.add(token)
        if self._lookback:
            self._recent = (*self._recent, token)[-self._lookback :]

    def branch(self) -> LogitsProcessors:
        """An independent copy; itself where nothing depends on the path."""
        if not self.follows_path:
            return self
        twin = copy.copy(self)
        if self._penalizes:
            twin._seen, twin._output = self._seen.copy(), self._output.copy()
        return twin

    def apply(
        self, logits: Float32Array, mask: BoolArray | None, num_output: int, edited: Float32Array
    ) -> Float32Array:
        """`edited`, which becomes the logits that `mask` (a constraint; None: all) allows, edited.

        A constraint goes first: where it allows only tokens that the options forbid, they are allowed.
        Without one that is an ExhaustedError.
        """
        _copy_allowed(logits, mask, edited)
        if self._forbid(edited, num_output) and edited.max() == -np.inf:
            if mask is None and logits.max() > -np.inf:
                raise ExhaustedError(
                    f"after {num_output} tokens of output allowed_token_ids, bad_words and min_tokens leave "
                    "no token to sample. Allow more ids, or leave one of these options out."
                )
            _copy_allowed(logits, mask, edited)
        if len(self._bias_ids):
            edited[self._bias_ids] += self._bias
        if self._penalizes:
            self._penalize(edited)
        return edited

    def _forbid(self, edited: Float32Array, num_output: int) -> bool:
        """Whether tokens were forbidden: those not allowed, the ends of bad words, endings by min_tokens."""
        forbids_endings = self._forbids_endings(num_output)
        if len(self._allowed_ids):
            allowed = edited[self._allowed_ids]
            edited.fill(-np.inf)
            edited[self._allowed_ids] = allowed
        if self._bad_words:
            edited[self._bad_words.after(self._recent)] = -np.inf
        if forbids_endings:
            edited[self._ending_ids] = -np.inf
        return self.bans or forbids_endings

    def _forbids_endings(self, num_output: int) -> bool:
        return num_output < self._params.min_tokens and len(self._ending_ids) > 0

    def _penalize(self, edited: Float32Array) -> None:
        params = self._params
        if self._repeats:
            seen = edited[self._seen.ids]
            penalty = np.float32(params.repetition_penalty)
            edited[self._seen.ids] = np.where(seen > 0, seen / penalty, seen * penalty)
        if self._counts_output:
            ids, counts = self._output.ids, self._output.counts
            edited[ids] -= np.float32(params.frequency_penalty) * counts
            edited[ids] -= np.float32(params.presence_penalty)


def _copy_allowed(logits: Float32Array, mask: BoolArray | None, edited: Float32Array) -> None:
    """Make `edited` the logits, -inf where the mask does not allow them."""
    if mask is None:
        np.copyto(edited, logits)
    else:
        edited.fill(-np.inf)
        np.copyto(edited, logits, where=mask)
