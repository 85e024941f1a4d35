"""Streamed text: whole characters only, no stop string, and in the end exactly the decoded whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.detokenizer import Detokenizer
from paceline.core.params import SamplingParams


class ByteTokenizer:
    """Token i is the byte i; 256 is special."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b"<end>"

    def is_special(self, token_id: int) -> bool:
        return token_id >= 256


def stream(tokens, **options):
    """The pieces that come out, and the stop string that ended it."""
    detokenizer = Detokenizer(ByteTokenizer(), SamplingParams(**options))
    pieces, stop = [], None
    for count, token in enumerate(tokens, start=1):
        stop = detokenizer.append(token, count)
        if stop is not None:
            break
        pieces.append(detokenizer.take())
    detokenizer.finish()
    pieces.append(detokenizer.take())
    assert "".join(pieces) == detokenizer.text
    return pieces, stop


def test_half_a_character_is_never_emitted():
    pieces, _ = stream("aé😀".encode())
    assert pieces == ["a", "", "é", "", "", "", "😀", ""]


def test_an_unfinished_character_at_the_end_becomes_the_replacement_character():
    assert "".join(stream("é".encode()[:1])[0]) == "\ufffd"


@given(st.binary(max_size=40))
def test_any_bytes_give_what_decoding_the_whole_gives(data):
    assert "".join(stream(data)[0]) == data.decode("utf-8", errors="replace")


@given(st.lists(st.binary(max_size=9), max_size=5), st.sets(st.integers(0, 4)))
def test_tokens_that_are_decoded_after_the_end_give_the_same(passes, asked):
    """The text of an output is decoded when it is asked for, at the latest after its end."""
    detokenizer, pieces = Detokenizer(ByteTokenizer(), SamplingParams()), []
    for number, tokens in enumerate(passes):
        detokenizer.extend(tokens)
        pieces += [detokenizer.take()] if number in asked else []
    detokenizer.finish()
    pieces.append(detokenizer.take())
    assert "".join(pieces) == detokenizer.text == b"".join(passes).decode("utf-8", errors="replace")


def test_special_tokens_are_left_out_or_spelled():
    assert "".join(stream([65, 256, 66])[0]) == "AB"
    assert "".join(stream([65, 256, 66], skip_special_tokens=False)[0]) == "A<end>B"


def test_a_stop_string_across_tokens_never_leaks():
    pieces, stop = stream(b"hello END world", stop="END")
    assert "".join(pieces) == "hello "
    assert stop == "END"
    assert all("E" not in piece for piece in pieces)


def test_text_that_only_looked_like_a_stop_is_released():
    pieces, stop = stream(b"ENTER", stop="END")
    assert stop is None
    assert pieces == ["", "", "ENT", "", "ER", ""]


def test_the_stop_string_is_kept_if_asked():
    assert "".join(stream(b"a. b", stop=".", include_stop_str_in_output=True)[0]) == "a."


def test_the_stop_that_is_complete_first_wins_and_of_equals_the_longer():
    assert stream(b"xabcd", stop=["abcd", "bc"])[1] == "bc"
    assert "".join(stream(b"xabc", stop=["c", "abc"])[0]) == "x"


def test_stop_strings_do_not_count_before_min_tokens():
    pieces, stop = stream(b"..a.b", stop=".", min_tokens=2)
    assert ("".join(pieces), stop) == ("..a", ".")


ALPHABET = st.text(alphabet="abé", max_size=30)


@given(ALPHABET, st.lists(st.text(alphabet="abé", min_size=1, max_size=4), min_size=1, max_size=3))
def test_streaming_ends_where_the_first_stop_string_is_complete(text, stops):
    """Against the plain definition: read character by character until a stop string is at the end."""
    expected = text
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            expected = text[: end - max(map(len, complete))]
            break
    pieces, _ = stream(text.encode(), stop=stops)
    assert "".join(pieces) == expected
