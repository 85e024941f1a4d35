"""Detokenizer: incremental text of an output, never half a character or part of a stop string.

A character is held back until its bytes are complete; bytes that are not UTF-8 become U+FFFD, as in a decode
of the whole text. Text that may be the start of a stop string is held back too. Tokens that cannot end the
output are decoded together, when their text is asked for.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

from paceline.core.params import SamplingParams

Utf8Decoder = codecs.getincrementaldecoder("utf-8")
Watch: TypeAlias = Callable[[str], bool]  # called with each piece of an output; True: the output ends with it


class TextTokenizer(Protocol):
    """The part of a tokenizer that an engine needs."""

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


class Detokenizer:
    """The text of one output, growing token by token."""

    def __init__(self, tokenizer: TextTokenizer, params: SamplingParams, watch: Watch | None = None) -> None:
        """`watch` may end the output, besides the stop strings of the params."""
        self.ended = False  # `watch` has ended the output
        self.may_stop = bool(params.stop_strings) or watch is not None  # the text can end the output
        self._watch = watch
        self._tokenizer = tokenizer
        self._skip_special = params.skip_special_tokens
        self._stops = params.stop_strings
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._decoder = Utf8Decoder(errors="replace")
        self._undecoded: list[int] = []  # tokens after the decoded text
        self._text = ""  # all decoded text; after a stop, only the text before it
        self._search_from = 0  # no stop string may start before this character
        self._released = 0  # characters that `take` has returned
        self._holding = True  # False at the end: then everything is released

    @property
    def text(self) -> str:
        """All text so far that is not held back."""
        self._decode()
        return self._text[: self._certain()]

    def append(self, token: int, num_output: int) -> str | None:
        """The stop string that this token, number `num_output` of the output from 1, completes; or None."""
        self._decode()
        if self._skip_special and self._tokenizer.is_special(token):
            return None
        return self._grow(self._decoder.decode(self._tokenizer.token_bytes(token)), num_output)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens of an output that its text cannot end."""
        self._undecoded.extend(tokens)

    def _decode(self) -> None:
        """Decode the tokens that were appended since the last time."""
        if self._undecoded:
            bytes_of, is_special = self._tokenizer.token_bytes, self._tokenizer.is_special
            tokens = self._undecoded
            shown = [token for token in tokens if not is_special(token)] if self._skip_special else tokens
            pieces = b"".join([bytes_of(token) for token in shown])
            self._text += self._decoder.decode(pieces, final=not self._holding)
            self._undecoded = []

    def finish(self) -> None:
        """End the text: release what is held back; half a character becomes U+FFFD."""
        self._holding = False
        if not self._undecoded:  # else they are decoded when the text is asked for: passes do not wait for it
            self._text += self._decoder.decode(b"", final=True)

    def take(self) -> str:
        """The new text since the last call, without what is held back."""
        self._decode()
        certain = self._certain()
        delta = self._text[self._released : certain]
        self._released = certain
        return delta

    def _grow(self, piece: str, num_output: int) -> str | None:
        before = len(self._text)
        self._text += piece
        if self._watch is not None:
            self.ended = self._watch(piece) and num_output > self._min_tokens
        if not self._stops:
            return None
        if num_output <= self._min_tokens:
            self._search_from = len(self._text)
            return None
        match = self._first_stop(before)
        if match is None:
            return None
        start, stop = match
        self._text = self._text[: start + len(stop) if self._include_stop else start]
        self._decoder.reset()
        return stop

    def _first_stop(self, before: int) -> tuple[int, str] | None:
        """The start and text of the stop string after `before` that ends first; None if there is none.

        The result does not depend on token boundaries: it is as if characters came one by one. Of two stop
        strings that end together, the longer is returned.
        """
        matches = []
        for stop in self._stops:
            start = self._text.find(stop, max(self._search_from, before - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop

    def _certain(self) -> int:
        """The number of leading characters that cannot become part of a stop string."""
        if not self._holding or not self._stops:
            return len(self._text)
        return min(self._possible_start(stop) for stop in self._stops)

    def _possible_start(self, stop: str) -> int:
        """Where this stop string may have started without being complete; else the end of the text."""
        end = len(self._text)
        start = self._text.find(stop[0], max(self._search_from, end - len(stop) + 1))
        while start >= 0 and not stop.startswith(self._text[start:]):
            start = self._text.find(stop[0], start + 1)
        return start if start >= 0 else end
