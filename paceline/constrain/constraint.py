"""Constraint: a request's state in its grammar. It gives the token mask, and the forced tokens."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.arrays import Int32Array, Int64Array
from paceline.core.token_masks import forbid, packed_id
from paceline.errors import GrammarError

if TYPE_CHECKING:
    from llguidance import LLMatcher


MAX_FORCED = 32  # tokens of look-ahead


@dataclass(frozen=True)
class Endings:
    """The ids that end an output."""

    ids: tuple[int, ...]  # end-of-sequence; the first one is used where the end is forced
    eager: bool = True  # False: only where nothing else may follow


class Constraint:
    """The grammar state of one output. What it allows is a pure function of the tokens so far.

    Where the grammar leaves only one continuation of bytes, only their canonical tokens are allowed. They are
    forced with and without speculation, so drafts of them are always accepted.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, endings: Endings) -> None:
        """`matcher` is at the start of an output, and no one else uses it."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._endings = endings
        self._ending_ids: Int64Array = np.array(endings.ids, dtype=np.int64)  # [ending]
        self._ended = False
        self._forced: tuple[int, ...] | None = None  # tokens from here on; None: not computed yet
        self._mask: Int32Array | None = None  # where there is a choice; None: not computed yet

    def forced(self) -> tuple[int, ...]:
        """The tokens that must come next, at most MAX_FORCED of them. Empty: there is a choice."""
        if self._forced is None:
            self._forced = self._look_ahead()
        return self._forced

    def allows(self, token: int) -> bool:
        """Whether the token may come next."""
        if self.forced():
            return token == self.forced()[0]
        if self._mask is None and token not in self._endings.ids:  # faster than the whole mask
            return bool(self._matcher.validate_tokens([token]))
        return bool(self._allowed()[token >> 5] >> (token & 31) & 1)

    def packed_mask(self) -> Int32Array:
        """The tokens that may come next, as a mask of core/token_masks.py. Do not change it."""
        if self.forced():
            return packed_id(self.forced()[0], self._vocab_size)
        return self._allowed()

    def advance(self, token: int) -> None:
        """Append a token to the output. GrammarError if it may not come next."""
        forced = self.forced()  # always: the start of a forced run decides how it is split into tokens
        if forced and token != forced[0]:
            raise self._error()
        self._take(token)
        self._forced = forced[1:] or None

    def _take(self, token: int) -> None:
        """Advance without checking the forced tokens."""
        if token in self._endings.ids and not self._ended and self._matcher.is_accepting():
            self._ended = True
        elif self._ended or not self._matcher.consume_token(token):
            raise self._error()
        self._forced = self._mask = None

    def branch(self) -> Constraint:
        """An independent copy in the same state."""
        twin = copy.copy(self)
        twin._matcher = self._matcher.deep_copy()
        return twin

    def _look_ahead(self) -> tuple[int, ...]:
        """The forced tokens from here on."""
        ahead = self.branch()
        run: list[int] = []
        while len(run) < MAX_FORCED and not ahead._ended:
            tokens = ahead._next_run()
            if not tokens:
                break
            try:
                for token in tokens[: MAX_FORCED - len(run)]:
                    ahead._take(token)
                    run.append(token)
            except GrammarError:  # a limit of the library; the output may end before it
                break
        return tuple(run)

    def _next_run(self) -> list[int]:
        """The canonical tokens of the bytes that must come next, as far as the library has computed them."""
        if self._ended:
            return []
        if self._matcher.is_stopped():
            return [self._endings.ids[0]] if not self._matcher.is_error() else []
        return list(self._matcher.compute_ff_tokens())

    def _allowed(self) -> Int32Array:
        """The mask where no token is forced."""
        if self._mask is None:
            mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
            if self._ended or self._matcher.is_error():
                raise self._error()
            if not self._endings.eager:
                without_endings = mask.copy()
                forbid(without_endings, self._ending_ids)
                mask = without_endings if without_endings.any() else mask
            self._mask = mask
        return self._mask

    def _error(self) -> GrammarError:
        reason = self._matcher.get_error().split("\n")[0][:200] or "nothing may follow"
        return GrammarError(
            f"the grammar allows no next token: {reason}. Use a simpler schema, regex or grammar."
        )
