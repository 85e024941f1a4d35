"""Answers on a terminal are wrapped at words, however they come in pieces."""

from __future__ import annotations

import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.terminal.wrap import WordWrap


def wrapped(text: str, width: int, step: int = 1) -> str:
    written: list[str] = []
    wrap = WordWrap(written.append, width)
    for start in range(0, len(text), step):
        wrap.feed(text[start : start + step])
    wrap.flush()
    return "".join(written)


words = st.lists(st.text("abc.", min_size=1, max_size=12), min_size=1, max_size=40)


@given(words, st.integers(12, 40), st.integers(1, 9))
def test_lines_are_those_of_textwrap_whatever_the_pieces(words, width, step):
    text = " ".join(words)
    lines = [line.rstrip() for line in wrapped(text, width, step).split("\n")]
    assert lines == textwrap.wrap(text, width, break_on_hyphens=False)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two\n\n  three", ["one two", "", "  three"]),  # line breaks and indents stay
        ("a " + "x" * 15 + " b", ["a", "x" * 15, "b"]),  # a word that fits nowhere is not broken
        ("日本語日本語", ["日本語日本", "語"]),  # lines may break between wide characters
        ("```\nx = 1234567890123\n```\naa bb cc dd", ["```", "x = 1234567890123", "```", "aa bb cc", "dd"]),
    ],
)
def test_what_is_not_prose_is_kept(text, lines):
    assert [line.rstrip() for line in wrapped(text, 10).split("\n")] == lines


def test_a_word_is_written_when_it_is_complete():
    written: list[str] = []
    wrap = WordWrap(written.append, 20)
    wrap.feed("hel")
    assert written == []
    wrap.feed("lo wor")
    assert "".join(written) == "hello "
    wrap.flush()
    assert "".join(written) == "hello wor"
