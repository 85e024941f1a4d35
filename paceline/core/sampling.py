"""SamplingState: how a request's next token is to be sampled. The Sampler in verify/ acts on it."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from paceline.core.arrays import Int32Array
from paceline.core.logit_edits import LogitEdits, LogitOptions
from paceline.core.params import SamplingParams
from paceline.core.token_masks import all_tokens
from paceline.errors import ExhaustedError


class TokenConstraint(Protocol):
    """The state of one output in its grammar: which tokens may come next. See constrain/constraint.py."""

    def forced(self) -> tuple[int, ...]:
        """The tokens that must come next. Empty: there is a choice."""
        ...

    def allows(self, token: int) -> bool:
        """Whether the token may come next."""
        ...

    def packed_mask(self) -> Int32Array:
        """The tokens that may come next, as a mask of core/token_masks.py. Do not change it."""
        ...

    def advance(self, token: int) -> None:
        """Append a token to the output. GrammarError if it may not come next."""
        ...

    def branch(self) -> TokenConstraint:
        """An independent copy in the same state."""
        ...


class SamplingState:
    """The sampling options of one request, and the state of its path that they depend on. `advance` extends
    the path."""

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt: Sequence[int],
        ending_ids: Iterable[int],
        constraint: TokenConstraint | None = None,
        bad_words: Collection[Sequence[int]] = (),
    ) -> None:
        """`ending_ids` are the ids that min_tokens forbids: end-of-sequence and stop ids.

        `bad_words` are the token sequences of the params' bad_words.
        """
        truncation = params.truncation
        self.seed = seed  # the key of all noise of the request
        self.options = params.temperature, truncation
        self.greedy = params.greedy  # the token is the largest logit, without noise
        self.keeps_all = truncation.keeps_all  # nothing is truncated
        self.constraint = constraint  # None: any token may follow
        self.logit_options = LogitOptions(params, prompt, ending_ids, bad_words)
        # whether every token needs a mask: by a constraint, allowed_token_ids or bad_words
        self.is_masked = constraint is not None or self.logit_options.bans

    def leaves_logits(self, num_output: int) -> bool:
        """Whether neither a constraint nor an option edits logits from here on."""
        return self.constraint is None and not self.logit_options.edits(num_output)

    def edits_logits(self, num_output: int) -> bool:
        """Whether options (bias, min_tokens, penalties, allowed ids, bad words) edit logits from here on."""
        return self.logit_options.edits(num_output)

    def needs_mask(self, num_output: int) -> bool:
        """Whether a constraint, or an option, forbids tokens after so many tokens of output."""
        return self.constraint is not None or self.logit_options.forbids(num_output)

    def token_mask(self, num_output: int, vocab_size: int) -> Int32Array:
        """The tokens that may come next, as a mask of core/token_masks.py. Do not change it.

        It depends on the path alone. A constraint goes first: where the options forbid all that it allows,
        they do not count. Without a constraint that is an ExhaustedError.
        """
        constraint, options = self.constraint, self.logit_options
        allowed = all_tokens(vocab_size) if constraint is None else constraint.packed_mask()
        if not options.forbids(num_output):
            return allowed
        remaining = options.without_forbidden(allowed, num_output, vocab_size)
        if remaining.any():
            return remaining
        if constraint is None:
            raise ExhaustedError(
                f"after {num_output} tokens of output allowed_token_ids, bad_words and min_tokens leave "
                "no token to sample. Allow more ids, or leave one of these options out."
            )
        return allowed

    def needs_edits(self, num_output: int) -> bool:
        """Whether a device must edit logits besides applying the mask of `is_masked`."""
        options = self.logit_options
        return options.adjusts or (not self.is_masked and options.forbids_endings(num_output))

    def logit_edits(self) -> LogitEdits:
        """The edits that a device makes when it samples the next tokens, if `needs_edits`."""
        return self.logit_options.for_device(self.is_masked)

    def advance(self, token: int) -> None:
        """Append a token to the path."""
        if self.constraint is not None:
            self.constraint.advance(token)
        if self.logit_options.follows_path:
            self.logit_options.advance(token)

    def branch(self, tokens: Iterable[int]) -> SamplingState:
        """The state whose path is this one's plus these tokens. This one is not changed."""
        if not self.logit_options.follows_path and self.constraint is None:
            return self  # nothing depends on the path
        twin = copy.copy(self)
        twin.logit_options = self.logit_options.branch()
        if self.constraint is not None:
            twin.constraint = self.constraint.branch()
        for token in tokens:
            twin.advance(token)
        return twin
