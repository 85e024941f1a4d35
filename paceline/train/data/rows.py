"""JSON rows from files that may be large or damaged: JSON Lines, or one JSON array.

Files are UTF-8, or UTF-16 with a byte order mark. Only the current row is held in memory.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from paceline.errors import ConfigError

BETWEEN_ROWS = re.compile(r"[\s,]*")
CHUNK = 1 << 20  # characters read at once from a JSON array
MAX_ROW = 1 << 24  # characters; a longer row is skipped


class BadRow(Exception):
    """An unusable row; the message is the reason."""


def read_rows(path: Path) -> Iterator[Any]:
    """The rows of a file as parsed JSON, with a BadRow in place of each row that does not parse."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(
            f"The prompts {path} cannot be read ({error}): give a file of JSON lines."
        ) from None
    with _as_text(file) as text:
        start = text.read(1)
        while start.isspace():
            start = text.read(1)
        yield from _array_rows(text) if start == "[" else _line_rows(start, text)


def _as_text(file: BufferedReader) -> TextIOWrapper:
    """The file as text. Bytes that are not UTF-8 become lone surrogates, which are refused later."""
    utf16 = file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    encoding, errors = ("utf-16", "replace") if utf16 else ("utf-8-sig", "surrogateescape")
    return TextIOWrapper(file, encoding, errors, newline="\n")


def _line_rows(start: str, file: TextIO) -> Iterator[Any]:
    """The rows of a JSON Lines file; its bytes `start` have already been read."""
    line = start + file.readline(MAX_ROW)
    while line:
        if len(line) >= MAX_ROW and not line.endswith("\n"):
            yield BadRow("too long")
            while line and not line.endswith("\n"):
                line = file.readline(MAX_ROW)
        elif not line.isspace():
            try:
                yield json.loads(line.lstrip("\ufeff"))  # a byte order mark inside a concatenated file
            except (ValueError, RecursionError):
                yield BadRow("broken JSON")
        line = file.readline(MAX_ROW)


def _array_rows(file: TextIO) -> Iterator[Any]:
    """The elements of a JSON array whose opening bracket has been read, one at a time.

    There is no way to resume after a broken element, so the rest counts as one broken row.
    """
    decoder = json.JSONDecoder()
    text, position = "", 0
    while piece := file.read(CHUNK):
        text, position = text[position:] + piece, 0
        while True:
            position = BETWEEN_ROWS.match(text, position).end()  # type: ignore[union-attr]  # matches always
            if text.startswith("]", position):
                return
            try:
                row, position = decoder.raw_decode(text, position)
            except (ValueError, RecursionError):
                break  # the row may continue in the next chunk
            yield row
        if len(text) - position > MAX_ROW:
            break
    if position < len(text):
        yield BadRow("broken JSON")
