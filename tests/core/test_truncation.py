"""Truncation: from users' options to the record, and from the record to an array row and back."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from paceline.core.params import SamplingParams
from paceline.core.truncation import KEEPS_ALL, NUM_FIELDS, OPTIONS, Truncation
from paceline.serve.openai.protocol import SamplingFields
from paceline.terminal.flag_groups import SAMPLING
from tests.verify.truncations import EXAMPLES, TRUNCATIONS, VALUES, truncation_of


@given(TRUNCATIONS)
def test_the_record_of_a_request_survives_as_a_row_of_an_array(truncation):
    params = SamplingParams(**truncation._asdict())
    assert params.truncation == truncation
    rows = np.array([params.truncation, KEEPS_ALL], dtype=np.float64)
    assert rows.shape == (2, NUM_FIELDS)
    again = truncation_of(rows[0])
    assert again == truncation
    assert [type(value) for value in again] == [option.kind for option in OPTIONS.values()]


def test_the_defaults_keep_everything_and_any_other_value_does_not():
    assert SamplingParams().truncation is not None
    assert SamplingParams().truncation.keeps_all
    assert SamplingParams(top_k=-1).truncation.keeps_all
    assert not any(truncation.keeps_all for truncation in EXAMPLES[1:])


def test_every_option_is_a_field_of_each_interface_and_is_tried_by_the_property_tests():
    names = set(Truncation._fields)
    assert names <= set(SamplingParams.__dataclass_fields__)
    assert names <= set(SamplingFields.model_fields)
    assert names <= {flag.name for flag in SAMPLING}
    assert names == set(VALUES)
    for name in names:
        assert any(getattr(own, name) != getattr(KEEPS_ALL, name) for own in EXAMPLES), name
