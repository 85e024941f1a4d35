"""Streamed text, wrapped at words."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

FENCE = "```"
PIECES = re.compile(r"\n|[^\S\n]+|\S")  # a line break, spaces, or a character


class WordWrap:
    """Writes text that comes in pieces, with a line break before a word that would not fit.

    A word is written when it is complete. Code between ``` is written as it comes.
    """

    def __init__(self, write: Callable[[str], None], width: int) -> None:
        """`width`: columns of a line."""
        self._write = write
        self._width = width
        self._column = 0
        self._word = ""  # not written yet
        self._line = ""  # the current line of the text, as far as it is needed to find a fence
        self._in_code = False

    def feed(self, text: str) -> None:
        """Take the next piece of the text."""
        for piece in PIECES.findall(text):
            if len(self._line) < len(FENCE):
                self._line += piece
            if self._in_code:
                self._put(piece)
            elif piece.isspace() or columns(piece) > 1:  # lines may break at wide characters
                self._end_word()
                self._word = piece
                self._end_word()
            else:
                self._word += piece
            if piece == "\n":
                self._in_code ^= self._line.startswith(FENCE)
                self._line = ""

    def flush(self) -> None:
        """Write the last word."""
        self._end_word()

    def _end_word(self) -> None:
        word, self._word = self._word, ""
        if word.isspace() and word != "\n":
            # spaces at the end of a line are not carried over to the next
            self._put(word if self._column + columns(word) <= self._width else "\n")
        elif word:
            if self._column and word != "\n" and self._column + columns(word) > self._width:
                self._put("\n")
            self._put(word)

    def _put(self, text: str) -> None:
        self._column = 0 if text == "\n" else self._column + columns(text)
        self._write(text)


def columns(text: str) -> int:
    """Columns of a terminal that a text takes."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)
