"""The sampling options that edit logits, as they stand on one path: data that host and device read.

The host applies them in verify/logits_processors.py; a device that samples gets them as LogitEdits.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paceline.core.arrays import Float32Array, Int32Array, Int64Array
from paceline.core.params import SamplingParams
from paceline.core.token_masks import forbid, packed_ids


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


class LogitOptions:
    """The logit-editing options of one request. They know the request's path from `advance`."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        ending_ids: Iterable[int],
        bad_words: Collection[Sequence[int]] = (),
    ) -> None:
        """`ending_ids` are those that min_tokens forbids; `bad_words` are token sequences."""
        self.penalties = Penalties(
            params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        )
        # [biased] each
        self.bias_ids, self.bias = _bias_of(params.logit_bias) if params.logit_bias else _NO_BIAS
        self.ending_ids = _ids(sorted(ending_ids))  # [ending]
        self.min_tokens = params.min_tokens
        self.allowed_ids = _ids(params.allowed_token_ids or ())  # [allowed]; empty: all
        self._allowed_mask: Int32Array | None = None  # of `allowed_ids`; None: not needed yet
        self.bad_words = BadWords(bad_words) if bad_words else _NO_BAD_WORDS
        self.recent: tuple[int, ...] = ()  # the last tokens of the output, as many as `bad_words` looks at
        self.repeats = self.penalties.repetition != 1.0
        self.counts_output = self.penalties.presence != 0.0 or self.penalties.frequency != 0.0
        self.penalizes = self.repeats or self.counts_output
        self.seen = self.output = _NOTHING_COUNTED
        if self.penalizes:
            self.seen, self.output = TokenCounts(prompt if self.repeats else ()), TokenCounts()
        self._prompt_length = len(prompt)
        self._lookback = self.bad_words.longest_prefix
        self.follows_path = self.penalizes or self._lookback > 0
        self.bans = bool(self.bad_words) or len(self.allowed_ids) > 0  # tokens, besides min_tokens
        self.adjusts = self.penalizes or len(self.bias_ids) > 0  # logits of tokens that may come next

    def edits(self, num_output: int) -> bool:
        """Whether any option edits logits from here on."""
        return self.adjusts or self.forbids(num_output)

    def forbids_endings(self, num_output: int) -> bool:
        """Whether min_tokens forbids the ids that end the output, after so many tokens of it."""
        return num_output < self.min_tokens and len(self.ending_ids) > 0

    def forbids(self, num_output: int) -> bool:
        """Whether tokens are forbidden after so many tokens of output."""
        return self.bans or self.forbids_endings(num_output)

    def without_forbidden(self, allowed: Int32Array, num_output: int, vocab_size: int) -> Int32Array:
        """A copy of the token mask `allowed`, without what these options forbid on this path."""
        mask = allowed.copy()
        if len(self.allowed_ids):
            if self._allowed_mask is None:
                self._allowed_mask = packed_ids(self.allowed_ids, vocab_size)
            mask &= self._allowed_mask
        if self.bad_words:
            forbid(mask, _ids(self.bad_words.after(self.recent)))
        if self.forbids_endings(num_output):
            forbid(mask, self.ending_ids)
        return mask

    def for_device(self, is_masked: bool) -> LogitEdits:
        """The edits that a device makes when it samples the next tokens.

        `is_masked`: it gets token masks, which forbid the endings.
        """
        return LogitEdits(
            self.penalties,
            self.bias_ids,
            self.bias,
            _NO_IDS if is_masked else self.ending_ids,
            self._prompt_length + self.min_tokens,
            self.seen.ids,
            self.output.ids,
            self.output.counts,
        )

    def advance(self, token: int) -> None:
        """Append a token to the path."""
        if self.penalizes:
            self.seen.add(token)
            self.output.add(token)
        if self._lookback:
            self.recent = (*self.recent, token)[-self._lookback :]

    def branch(self) -> LogitOptions:
        """An independent copy; itself where nothing depends on the path."""
        if not self.follows_path:
            return self
        twin = copy.copy(self)
        if self.penalizes:
            twin.seen, twin.output = self.seen.copy(), self.output.copy()
        return twin


def _ids(ids: Sequence[int]) -> Int64Array:
    return np.array(ids, dtype=np.int64) if ids else _NO_IDS


def _bias_of(bias: Mapping[int, float]) -> tuple[Int64Array, Float32Array]:
    return np.array(list(bias), dtype=np.int64), np.array(list(bias.values()), dtype=np.float32)
