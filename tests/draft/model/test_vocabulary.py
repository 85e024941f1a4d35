"""Pairs of vocabularies: which are refused, which tokens are shared, and how the rest is spelled."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.draft.model.vocabulary import common_vocabulary, trimmed_vocabulary, vocabulary_intersection
from paceline.errors import ConfigError


class Texts:
    """A tokenizer that is a list of token strings."""

    def __init__(self, *tokens: bytes, special: tuple[int, ...] = ()) -> None:
        self._tokens = tokens
        self._special = special
        self.vocab_size = len(tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id] if token_id < len(self._tokens) else b""

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special


LETTERS = Texts(b"a", b"b", b"c", b" the")


def test_an_equal_vocabulary_leaves_logits_as_they_are():
    vocabulary = common_vocabulary(LETTERS, LETTERS, 4, 4, "draft")
    logits = np.arange(4, dtype=np.float32)
    assert vocabulary.target_logits(logits) is logits
    assert [vocabulary.draft_id(token) for token in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("target_size", "draft_size"), [(6, 4), (4, 6)])
def test_padding_is_never_proposed_where_the_target_has_none_and_is_fine_elsewhere(target_size, draft_size):
    vocabulary = common_vocabulary(LETTERS, LETTERS, target_size, draft_size, "draft")
    logits = vocabulary.target_logits(np.arange(draft_size, dtype=np.float32))
    assert logits.tolist() == [0, 1, 2, 3, -np.inf, -np.inf][:target_size]


def test_ids_that_only_one_tokenizer_has_are_padding():
    longer = Texts(b"a", b"b", b"c", b" the", b"[PAD]")
    holed = Texts(b"a", b"", b"c", b" the")
    common_vocabulary(LETTERS, longer, 8, 8, "draft")
    common_vocabulary(longer, LETTERS, 8, 8, "draft")
    common_vocabulary(LETTERS, holed, 8, 8, "draft")


def test_a_different_vocabulary_is_refused_with_the_first_differences_and_the_remedies():
    other = Texts(b"a", b"c", b"b", b"\xc3")
    with pytest.raises(ConfigError) as error:
        common_vocabulary(LETTERS, other, 4, 4, "some/draft")
    message = str(error.value)
    for part in (
        "'some/draft'",
        "3 ids differ",
        "id 1 is 'b' to the target and 'c' to the draft",
        "id 3 is ' the' to the target and '\\\\xc3' to the draft",
        "use_heterogeneous_vocab",
        "with the target's tokenizer",
    ):
        assert part in message


def test_shared_strings_are_found_under_other_ids():
    target = Texts(b"x", b"the", b"cat", b"<end>", special=(3,))
    draft = Texts(b"cat", b"<end>", b"dog", b"the", special=(1,))
    vocabulary = vocabulary_intersection(target, draft, 5, 4, "draft")
    pairs = dict(zip(vocabulary.target_ids.tolist(), vocabulary.draft_ids.tolist(), strict=True))
    assert pairs == {1: 3, 2: 0, 3: 1}
    logits = vocabulary.target_logits(np.array([1, 2, 3, 4], dtype=np.float32))
    assert logits.tolist() == [-np.inf, 4, 1, 2, -np.inf]
    assert [vocabulary.draft_id(token) for token in (1, 2, 3)] == [3, 0, 1]


def test_tokens_that_are_not_shared_are_spelled_by_the_longest_pieces():
    target = Texts(b"there", "é".encode(), b"<a>re", b"\xfft", b"")
    draft = Texts(b"t", b"h", b"e", b"the", b"re", b"\xc3", b"\xa9", b"<a>", b"<", b"a", b">", special=(7,))
    vocabulary = vocabulary_intersection(Texts(*target._tokens, b"t"), draft, 9, 11, "draft")
    assert vocabulary.spelling(0) == [3, 4]  # the re
    assert vocabulary.spelling(1) == [5, 6]  # byte by byte
    assert vocabulary.spelling(2) == [8, 9, 10, 4]  # a special token is not text
    assert vocabulary.spelling(3) == [0]  # 0xff cannot be said
    assert vocabulary.spelling(4) == []
    assert vocabulary.spelling(5) == [0]
    assert vocabulary.spelling(8) == []  # padding


def test_of_several_ids_with_one_string_the_last_is_meant():
    target = Texts(b"a", b"b", b"a")
    draft = Texts(b"a", b"a", b"c")
    vocabulary = vocabulary_intersection(target, draft, 3, 3, "draft")
    assert (vocabulary.target_ids.tolist(), vocabulary.draft_ids.tolist()) == ([2], [1])
    assert vocabulary.spelling(0) == vocabulary.spelling(2) == [1]


def test_vocabularies_without_a_common_token_are_refused():
    with pytest.raises(ConfigError, match="'draft' shares no token"):
        vocabulary_intersection(Texts(b"a"), Texts(b"b"), 1, 1, "draft")


def test_a_head_guesses_some_tokens_of_the_target_and_never_others():
    vocabulary = trimmed_vocabulary(np.array([1, 4], dtype=np.int32), 6)
    for logits in ([2.0, -3.0], [0.5, 7.0]):
        row = vocabulary.target_logits(np.array(logits, dtype=np.float32)).tolist()
        assert row == [-np.inf, logits[0], -np.inf, -np.inf, logits[1], -np.inf]
    every = np.arange(6, dtype=np.float32)
    assert trimmed_vocabulary(None, 6).target_logits(every) is every
    assert vocabulary.draft_id(4) == 4, "what it reads are the target's ids"
