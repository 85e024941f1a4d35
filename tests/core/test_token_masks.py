"""Token masks have one bit for each id, in the layout of llguidance and xgrammar."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.params import SamplingParams
from paceline.core.sampling import SamplingState
from paceline.core.token_masks import all_tokens, forbid, num_words, packed, packed_id, packed_ids, unpacked
from paceline.errors import ExhaustedError
from tests.constrain.tables import TableConstraint

SIZES = [1, 7, 31, 32, 33, 64, 303]


@pytest.mark.parametrize("size", SIZES)
def test_bit_i_of_a_word_is_its_id_and_those_beyond_the_vocabulary_are_zero(size: int) -> None:
    allowed = np.random.default_rng(size).random(size) < 0.5
    mask = packed(allowed)
    assert (mask.dtype, mask.shape) == (np.int32, (num_words(size),))
    bits = [int(word) >> bit & 1 for word in mask.view(np.uint32) for bit in range(32)]
    assert bits == [*allowed.astype(int).tolist(), *[0] * (32 * num_words(size) - size)]
    assert unpacked(mask, size).tolist() == allowed.tolist()
    assert packed_ids(np.flatnonzero(allowed), size).tolist() == mask.tolist()
    assert all_tokens(size).tolist() == packed(np.ones(size, dtype=np.bool_)).tolist()
    assert packed_id(size - 1, size).tolist() == packed(np.arange(size) == size - 1).tolist()


@pytest.mark.parametrize("size", SIZES)
def test_forbidden_ids_may_be_repeated(size: int) -> None:
    ids, mask = np.random.default_rng(size).integers(0, size, 20), all_tokens(size)
    forbid(mask, ids)
    assert set(np.flatnonzero(unpacked(mask, size))) == set(range(size)) - set(ids.tolist())


def masked_by(params: SamplingParams, allowed: set[int] | None, output: tuple[int, ...] = ()) -> set[int]:
    """What the mask of ten ids allows after an output; 9 ends it, and (5, 4) is a bad word."""
    constraint = None if allowed is None else TableConstraint(10, lambda path: allowed)
    state = SamplingState(params, 0, (), (9,), constraint, bad_words=[(5, 4)])  # type: ignore[arg-type]
    for token in output:
        state.advance(token)
    before = None if constraint is None else constraint.packed_mask().tolist()
    mask = state.token_mask(len(output), 10)
    assert before is None or constraint.packed_mask().tolist() == before  # type: ignore[union-attr]
    return set(np.flatnonzero(unpacked(mask, 10)).tolist())


def test_a_mask_is_what_the_constraint_allows_and_no_option_forbids() -> None:
    few = SamplingParams(allowed_token_ids=[1, 4, 5, 9], min_tokens=2)
    assert masked_by(SamplingParams(), None) == set(range(10))
    assert masked_by(few, None) == {1, 4, 5}
    assert masked_by(few, None, (5,)) == {1, 5}
    assert masked_by(few, None, (5, 5)) == {1, 5, 9}
    assert masked_by(few, {4, 5, 6}, (5,)) == {5}


def test_options_that_forbid_all_that_a_constraint_allows_do_not_count() -> None:
    few = SamplingParams(allowed_token_ids=[4], min_tokens=2)
    assert masked_by(few, {9}) == {9}
    assert masked_by(few, {4, 5}, (5,)) == {4, 5}
    with pytest.raises(ExhaustedError, match="allowed_token_ids, bad_words and min_tokens"):
        masked_by(few, None, (5,))
