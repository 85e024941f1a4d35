"""A request's place in its grammar: which tokens may follow, and which must."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paceline.errors import GrammarError

if TYPE_CHECKING:
    from llguidance import LLMatcher

BoolArray = npt.NDArray[np.bool_]
UInt8Array = npt.NDArray[np.uint8]

MOST_FORCED = 32  # tokens that are looked ahead


@dataclass(frozen=True)
class Endings:
    """The ids that end a text that fits its grammar."""

    ids: tuple[int, ...]  # end-of-sequence; the first is the one that is forced
    eager: bool = True  # False: only where nothing else may follow


class Constraint:
    """Follows one output by `advance`. What it allows is a pure function of the tokens it has followed.

    Where the grammar leaves one continuation of bytes, their canonical tokens are the only ones
    allowed: they are forced, with and without speculation, so that drafting them is always right.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, endings: Endings) -> None:
        """`matcher` is at the start of a text, and this constraint's own."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._endings = endings
        self._ended = False
        self._forced: tuple[int, ...] | None = None  # from here on; None: not looked for yet
        self._bits: UInt8Array | None = None  # [(vocab + 7) // 8] what is allowed here, if asked before

    def forced(self) -> tuple[int, ...]:
        """The tokens that must come next, at most MOST_FORCED of them. Empty: there is a choice."""
        if self._forced is None:
            self._forced = self._look_ahead()
        return self._forced

    def allows(self, token: int) -> bool:
        """Whether the token may come next."""
        if self.forced():
            return token == self.forced()[0]
        if self._bits is None and token not in self._endings.ids:  # quicker than finding all that are
            return bool(self._matcher.validate_tokens([token]))
        return bool(self._allowed()[token >> 3] >> (token & 7) & 1)

    def mask(self) -> BoolArray:
        """The tokens that may come next: bool [vocab]."""
        if self.forced():
            only = np.zeros(self._vocab_size, dtype=np.bool_)
            only[self.forced()[0]] = True
            return only
        bits = np.unpackbits(self._allowed(), count=self._vocab_size, bitorder="little")
        return bits.view(np.bool_)

    def advance(self, token: int) -> None:
        """Take a token into the text. GrammarError if it may not come next."""
        forced = self.forced()  # also if nobody asked: where a run begins decides how it is cut into tokens
        if forced and token != forced[0]:
            raise self._error()
        self._take(token)
        self._forced = forced[1:] or None

    def _take(self, token: int) -> None:
        """Advance, not asking what is forced."""
        if token in self._endings.ids and not self._ended and self._matcher.is_accepting():
            self._ended = True
        elif self._ended or not self._matcher.consume_token(token):
            raise self._error()
        self._forced = self._bits = None

    def branch(self) -> Constraint:
        """A twin at the same place. What is done to the one does not touch the other."""
        twin = copy.copy(self)
        twin._matcher = self._matcher.deep_copy()
        return twin

    def _look_ahead(self) -> tuple[int, ...]:
        """The run of tokens without an alternative."""
        ahead = self.branch()
        run: list[int] = []
        while len(run) < MOST_FORCED and not ahead._ended:
            tokens = ahead._next_run()
            if not tokens:
                break
            try:
                for token in tokens[: MOST_FORCED - len(run)]:
                    ahead._take(token)
                    run.append(token)
            except GrammarError:  # a limit: the text may not come so far
                break
        return tuple(run)

    def _next_run(self) -> list[int]:
        """The canonical tokens of the bytes that have no alternative here, as far as they are settled."""
        if self._ended:
            return []
        if self._matcher.is_stopped():
            return [self._endings.ids[0]] if not self._matcher.is_error() else []
        return list(self._matcher.compute_ff_tokens())

    def _allowed(self) -> UInt8Array:
        """One bit for each id that may come next: uint8 [(vocab + 7) // 8]."""
        if self._bits is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8).copy()
            if self._ended or self._matcher.is_error():
                raise self._error()
            if not self._endings.eager:
                without = bits.copy()
                for token in self._endings.ids:
                    without[token >> 3] &= ~np.uint8(1 << (token & 7))
                bits = without if without.any() else bits
            self._bits = bits
        return self._bits

    def _error(self) -> GrammarError:
        reason = self._matcher.get_error().split("\n")[0][:200] or "nothing may follow"
        return GrammarError(
            f"the output cannot go on by its grammar: {reason}. Use a simpler schema, regex or grammar."
        )
