"""Packed weights are the rounded ones, and products of them are those of plain torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.files.layout import expected_tensors
from paceline.models.gguf.blocks import dequantize
from paceline.models.registry import load_checkpoint

WIDTH, DEPTH = 64, 512
WHOLE_STEPS = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
PACKINGS = ("int8", "int4", "mxfp4", "fp8", "fp8_blocks")


def rounded(weight: torch.Tensor, packing: str) -> torch.Tensor:
    """What the packed weights stand for: float32 [rows, depth]."""
    from paceline.backends.cuda.kernels.products import packing as room

    if packing == "fp8":
        codes, scales = room.round_to_fp8(weight)
        return codes.view(torch.float8_e4m3fn).float() * scales[:, None]
    if packing == "fp8_blocks":
        codes, scales = room.round_to_fp8_blocks(weight)
        numbers = codes.view(torch.float8_e4m3fn).float().view(*scales.shape, -1)
        return (numbers * scales[..., None]).flatten(1)
    round_to = {"int8": room.round_to_int8, "int4": room.round_to_int4, "mxfp4": room.round_to_mxfp4}
    codes, scales = round_to[packing](weight)
    if packing == "mxfp4":
        codes = torch.tensor([*room.E2M1, *(-value for value in room.E2M1)])[codes.long()]
    return (codes.view(len(weight), -1, room.GROUP).float() * scales.float()[..., None]).flatten(1)


@pytest.mark.parametrize(
    ("packing", "bound"),
    [("int8", 0.01), ("int4", 0.1), ("mxfp4", 0.15), ("fp8", 0.04), ("fp8_blocks", 0.04)],
)
def test_a_product_of_packed_weights(
    packing: str, bound: float, device: torch.device, dtype: torch.dtype
) -> None:
    from paceline.backends.cuda.kernels.products import matrix
    from paceline.backends.cuda.kernels.products.linear import add_product
    from paceline.backends.cuda.kernels.products.packing import step_of

    torch.manual_seed(6)
    weight, rows = torch.randn(WIDTH, DEPTH) / 20, torch.randn(16, DEPTH).to(dtype)
    tiling = matrix.Tiling(columns=64, step=step_of(packing), splits=2, packing=packing)
    packed = matrix.tile_matrix(weight.to(device), WIDTH, tiling)
    hidden, norm = torch.zeros(16, WIDTH, device=device), torch.ones(WIDTH, device=device, dtype=dtype)
    prepared = torch.empty(16, WIDTH, device=device, dtype=dtype)
    normed = matrix.Normed(prepared, torch.empty(16, 1, device=device), WIDTH, 1e-5)
    add_product(rows.to(device), packed, hidden, norm, normed, 3, matrix.scratch_for([packed], 3, device))
    expected = rows[:3].float() @ rounded(weight, packing).T
    torch.testing.assert_close(hidden[:3].cpu(), expected, rtol=1e-3, atol=2e-3)
    whole = rows[:3].float() @ weight.T
    assert float((expected - whole).norm() / whole.norm()) < bound


def test_norms_ahead_of_packed_weights(device: torch.device, dtype: torch.dtype) -> None:
    from paceline.backends.cuda.kernels.products import matrix
    from paceline.backends.cuda.kernels.products.linear import project

    torch.manual_seed(7)
    weight, rows = torch.randn(WIDTH, DEPTH) / 20, torch.randn(16, DEPTH).to(dtype)
    packed = matrix.tile_matrix(weight.to(device), WIDTH, matrix.Tiling(columns=64, step=128, packing="int8"))
    squares = rows.float().square().view(16, 8, -1).sum(-1)[:, :7].contiguous()  # a count to be filled up
    normed = matrix.Normed(rows.to(device), squares.to(device), DEPTH, 1e-5)
    output = torch.zeros(16, WIDTH, device=device)
    project(normed, packed, output, 2, matrix.scratch_for([packed], 2, device))
    factor = (squares.sum(-1, keepdim=True) / DEPTH + 1e-5).rsqrt()
    expected = (rows.float() @ rounded(weight, "int8").T * factor)[:2]
    torch.testing.assert_close(output[:2].cpu(), expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize(("kind", "packing", "size"), [("Q8_0", "int8", 34), ("Q4_0", "int4", 18)])
def test_blocks_of_a_file_stay_what_they_are(kind: str, packing: str, size: int) -> None:
    """A block is a scale and 32 numbers, one of them the largest there is: so converters write it."""
    generator = np.random.default_rng(5)
    blocks = generator.integers(0, 256, (8, 4, size), dtype=np.uint8)
    blocks[:, :, :2] = (generator.random((8, 4, 1)) / 100).astype(np.float16).view(np.uint8)
    blocks[:, :, 2:] = np.where(blocks[:, :, 2:] == 128, 7, blocks[:, :, 2:])  # -128 is no number of Q8_0
    blocks[:, :, 2] = 127 if kind == "Q8_0" else 0  # of Q4_0: two times -8
    values = torch.from_numpy(dequantize(kind, blocks.reshape(8, -1))).view(8, -1)
    assert torch.equal(rounded(values, packing), values)


def test_values_of_mxfp4_blocks_stay_what_they_are() -> None:
    """Whatever the largest of a block is."""
    generator = np.random.default_rng(5)
    blocks = generator.integers(0, 256, (8, 4, 17), dtype=np.uint8)
    blocks[:, :, 0] = generator.integers(110, 125, (8, 4))  # the exponent, plus 127
    blocks[1, :, 1:] &= 0x33  # no 2 or more
    blocks[2, 1:, 1:] = 0x99  # -0.5 only, and nothing
    blocks[2, 0, 1:] = 0
    values = torch.from_numpy(dequantize("MXFP4", blocks.reshape(8, -1))).view(8, -1)
    assert torch.equal(rounded(values, "mxfp4"), values)


def test_numbers_of_e4m3_stay_what_they_are_whatever_the_largest_is() -> None:
    """Of files with a scale by row, or one: few rows have the largest number there is."""
    from paceline.backends.cuda.kernels.products.packing import round_to_fp8

    generator = torch.Generator().manual_seed(4)
    codes = torch.randn(64, 128, generator=generator).mul(50).to(torch.float8_e4m3fn).float()
    weight = codes * torch.rand(64, 1, generator=generator)
    numbers, scales = round_to_fp8(weight)
    got = numbers.view(torch.float8_e4m3fn).float() * scales[:, None]
    torch.testing.assert_close(got, weight, rtol=1e-6, atol=0)


def test_sizes_are_padded_to_whole_steps_of_packed_weights() -> None:
    """As 2880 of gpt-oss to 3072: here 500 to 512. The results are those of the model as it is."""
    from paceline.backends.cuda.weights.model_weights import load_weights

    config = ModelConfig("llama", 64, 500, 1, 2, 1, 256, 250, 1e-5, RopeConfig(), 16, True)
    torch.manual_seed(9)
    tensors = {name: torch.randn(shape) / 20 for name, shape in expected_tensors(config)}
    weights = load_weights(config, tensors.__getitem__, lambda name: "int4")
    (layer,) = weights.layers
    packed = (layer.qkv, layer.output, layer.gate_up, layer.down)
    assert [(own.tiling.packing, own.depth) for own in packed] == [("int4", 512)] * 3 + [("int4", 256)]
    assert (weights.hidden, layer.output.padded_width, weights.norm[500:].any()) == (512, 512, False)


def k_blocks(kind: str, rows: int, depth: int) -> np.ndarray:
    """Random blocks of a file, uint8 [rows, bytes], whose scales are numbers."""
    generator = np.random.default_rng(8)
    values, size, halves = {
        "Q4_1": (32, 20, slice(0, 4)),
        "Q4_K": (256, 144, slice(0, 4)),
        "Q6_K": (256, 210, slice(208, 210)),
    }[kind]
    blocks = generator.integers(0, 256, (rows, depth // values, size), dtype=np.uint8)
    count = (halves.stop - halves.start) // 2
    scales = (generator.random((rows, depth // values, count)) / 500).astype(np.float16)
    blocks[..., halves] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K", "Q6_K"])
def test_a_product_of_a_files_own_blocks(kind: str, device: torch.device, dtype: torch.dtype) -> None:
    """As exact as one of float32 weights: nothing is rounded but what rows are."""
    from paceline.backends.cuda.kernels.products import matrix
    from paceline.backends.cuda.kernels.products.linear import project
    from paceline.backends.cuda.kernels.products.packing import BLOCKS, block_lines, depth_of, step_of

    blocks = k_blocks(kind, WIDTH, DEPTH)
    weight = torch.from_numpy(dequantize(kind, blocks))
    packing, lines = BLOCKS[kind], block_lines(torch.from_numpy(blocks).to(device), kind)
    assert depth_of(lines, packing) == DEPTH
    tiling = matrix.Tiling(columns=64, step=step_of(packing), splits=2, packing=packing)
    packed = matrix.tile_matrix(lines, WIDTH, tiling)
    rows = torch.randn(16, DEPTH, generator=torch.Generator().manual_seed(3)).to(dtype)
    normed = matrix.Normed(rows.to(device), torch.ones(16, 1, device=device), 1, 0.0)
    output = torch.zeros(16, WIDTH, device=device)
    project(normed, packed, output, 3, matrix.scratch_for([packed], 3, device))
    expected = rows[:3].double() @ weight.double().T
    assert float((output[:3].cpu() - expected).norm() / expected.norm()) < 2e-5


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_matrix_of_zeros_is_packed_as_zeros(packing: str) -> None:
    assert not rounded(torch.zeros(2, 128), packing).any()


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="the interpreter multiplies by numpy, which sums as it likes"
)
@pytest.mark.parametrize("packing", [*PACKINGS, "q41", "q4k", "q6k"])
def test_a_row_has_the_same_bits_among_any_number_of_rows(
    packing: str, device: torch.device, dtype: torch.dtype
) -> None:
    from paceline.backends.cuda.kernels.products import matrix
    from paceline.backends.cuda.kernels.products.linear import project
    from paceline.backends.cuda.kernels.products.packing import BLOCKS, block_lines, step_of

    torch.manual_seed(6)
    weight, rows = torch.randn(WIDTH, DEPTH, device=device) / 20, torch.randn(128, DEPTH, device=device)
    for kind, own in BLOCKS.items():
        if packing == own:
            weight = block_lines(torch.from_numpy(k_blocks(kind, WIDTH, DEPTH)).to(device), kind)
    tiling = matrix.Tiling(columns=64, step=step_of(packing), splits=2, packing=packing)
    packed = matrix.tile_matrix(weight, WIDTH, tiling)
    normed = matrix.Normed(rows.to(dtype), torch.ones(128, 1, device=device), 1, 0.0)
    found = []
    for number in (1, 20, 64, 128):
        output = torch.zeros(128, WIDTH, device=device)
        project(normed, packed, output, number, matrix.scratch_for([packed], number, device))
        found.append(output[0])
    assert all(torch.equal(found[0], other) for other in found)
    assert found[0].any()


def test_layers_keep_a_files_own_blocks_where_their_depth_allows_it() -> None:
    """Depths: 256 of most matrices, and 192, no multiple of a step, of down."""
    from paceline.backends.cuda.weights.model_weights import load_weights, packing_for

    config = ModelConfig("llama", 64, 256, 2, 4, 2, 64, 192, 1e-5, RopeConfig(), 64, tie_embeddings=True)
    shapes = dict(expected_tensors(config))
    kinds = {
        "model.layers.0.self_attn.v_proj.weight": "Q6_K",
        "model.layers.1.self_attn.o_proj.weight": "Q8_0",
    }

    def take(name: str) -> torch.Tensor:
        return torch.zeros(shapes[name], dtype=torch.float32 if "_proj" in name else torch.float16)

    def packings(quantization: str) -> list[str]:
        packing = packing_for(quantization, lambda name: kinds.get(name, "Q4_0"))
        weights = load_weights(config, take, packing)
        stored = {torch.float16, torch.int32, torch.float8_e4m3fn}
        assert {matrix.weight.dtype for matrix in weights.matrices} <= stored
        return [matrix.tiling.packing for matrix in weights.matrices]

    # queries, keys and values are one matrix: the largest kind of the three decides
    first, second = ["int8", "int4", "int4", "none"], ["int4", "int8", "int4", "none"]
    assert packings("native") == [*first, *second, "none"]
    assert packings("fp8") == [*["e4m3"] * 8, "none"]
    assert packings("none") == ["none"] * 9


def test_layers_keep_the_blocks_of_k_quants_where_they_are_of_one_kind() -> None:
    from paceline.backends.cuda.kernels.products.packing import block_lines
    from paceline.backends.cuda.weights.model_weights import load_weights, packing_for

    config = ModelConfig("llama", 64, 256, 1, 4, 2, 64, 256, 1e-5, RopeConfig(), 64, tie_embeddings=True)
    shapes = dict(expected_tensors(config))

    def kind_of(name: str) -> str:
        return "Q6_K" if "v_proj" in name or "down_proj" in name else "Q4_K"

    def take(name: str) -> torch.Tensor:
        return torch.zeros(shapes[name], dtype=torch.float32 if "_proj" in name else torch.float16)

    def blocks(name: str) -> torch.Tensor:
        return block_lines(torch.from_numpy(k_blocks(kind_of(name), *shapes[name])), kind_of(name))

    weights = load_weights(config, take, packing_for("native", kind_of), blocks)
    # values are of another kind than queries and keys, with which they are one matrix
    assert [own.tiling.packing for own in weights.matrices] == ["int8", "q4k", "q4k", "q6k", "none"]
    assert [own.depth for own in weights.matrices] == [256] * 5


@pytest.mark.parametrize(
    ("format", "packing", "bound"),
    [("fp8-block", "fp8_blocks", 1e-6), ("awq", "q41", 2e-3), ("w4a16-zeros", "q41", 2e-3)],
)
def test_quantized_safetensors_keep_their_bits(
    format: str, packing: str, bound: float, tmp_path: Path, device: torch.device
) -> None:
    """The product of zero point and scale is rounded to float16, and nothing else."""
    from paceline.backends.cuda.kernels.products import matrix
    from paceline.backends.cuda.kernels.products.linear import project
    from paceline.backends.cuda.weights.loading import load_checkpoint_weights

    pytest.importorskip("gguf")
    from tests.models.quantized import files

    sizes = files.VALUES | WHOLE_STEPS | {"intermediate_size": 512}
    expected = files.write(tmp_path, *files.FORMATS[format], sizes)
    weights = load_checkpoint_weights(load_checkpoint(tmp_path), device, "float16", "native")
    (layer,) = weights.layers
    assert {own.tiling.packing for own in (layer.qkv, layer.output, layer.gate_up, layer.down)} == {packing}
    rows = torch.eye(512, device=device, dtype=torch.float16)[200:216]  # some columns of the matrix
    normed = matrix.Normed(rows, torch.ones(16, 1, device=device), 1, 0.0)
    output = torch.zeros(16, 256, device=device)
    project(normed, layer.down, output, 16, matrix.scratch_for([layer.down], 16, device))
    whole = expected["model.layers.0.mlp.down_proj.weight"].float()
    torch.testing.assert_close(
        output.T.cpu(), whole[:, 200:216], rtol=bound, atol=bound * float(whole.abs().max())
    )


def test_blocks_that_are_no_whole_steps_are_rounded_to_int8(tmp_path: Path, device: torch.device) -> None:
    """256 values of a step: 384 are none, but they are three of 128, the step of int8."""
    from paceline.backends.cuda.weights.loading import load_checkpoint_weights

    pytest.importorskip("gguf")
    from tests.models.quantized import files

    sizes = files.VALUES | WHOLE_STEPS | {"intermediate_size": 384}
    files.write(tmp_path, *files.FORMATS["awq"], sizes)
    weights = load_checkpoint_weights(load_checkpoint(tmp_path), device, "float16", "native")
    assert [own.tiling.packing for own in weights.matrices] == ["q41", "q41", "q41", "int8", "none"]
