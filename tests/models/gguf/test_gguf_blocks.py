"""Block formats, held bit for bit to the gguf package, which is llama.cpp's own Python reader."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from paceline.models.gguf.blocks import CHUNK_VALUES, FORMATS, dequantize


@pytest.mark.parametrize("kind", FORMATS)
def test_numbers_and_sizes_are_those_of_the_file_format(kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    form = FORMATS[kind]
    assert (form.number, (form.block_size, form.block_bytes)) == (number, gguf.GGML_QUANT_SIZES[number])


@pytest.mark.parametrize("kind", FORMATS)
def test_any_bytes_give_the_reference_values_bit_for_bit(kind: str) -> None:
    form = FORMATS[kind]
    random = np.random.default_rng(5)
    # whole bytes at random: every quant, every scale, infinities and NaN among them
    blocks = random.integers(0, 256, size=(37, 3 * form.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]).astype(np.float32)
    values = dequantize(kind, blocks)
    same_bits = values.view(np.uint32) == expected.view(np.uint32)
    assert values.shape == (37, 3 * form.block_size)
    assert np.all(same_bits | (np.isnan(values) & np.isnan(expected)))


@pytest.mark.parametrize("kind", ["F16", "Q4_1", "Q6_K"])
def test_rows_are_decoded_alike_alone_and_in_a_tensor_of_many_chunks(kind: str) -> None:
    form = FORMATS[kind]
    columns = 8 * 256
    rows = 5 * CHUNK_VALUES // columns + 3
    random = np.random.default_rng(6)
    bytes_per_row = columns // form.block_size * form.block_bytes
    blocks = random.integers(0, 60, size=(rows, bytes_per_row), dtype=np.uint8)
    values = dequantize(kind, blocks)
    for row in (0, 1, rows // 2, rows - 1):
        np.testing.assert_array_equal(values[row : row + 1], dequantize(kind, blocks[row : row + 1]))


def test_a_tensor_without_rows_has_no_values() -> None:
    assert dequantize("Q4_0", np.zeros((0, 18), dtype=np.uint8)).shape == (0, 32)
