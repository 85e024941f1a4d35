"""Weights are rounded to 8 or 4 bits while they are loaded: no 16-bit copy of a model ever exists."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.backends.cpu.weights.packing import pack_matrices
from paceline.backends.options import BackendOptions
from paceline.backends.torch.backend import TorchBackend
from paceline.backends.torch.loading import load_pieces
from paceline.check.kernels import multiply
from paceline.errors import ConfigError
from paceline.models.checkpoint import Checkpoint
from paceline.models.families.config_reader import model_config
from paceline.models.files.layout import expected_tensors
from paceline.models.quantized.rounded import ROUNDINGS, rounded
from paceline.models.registry import load_checkpoint
from tests.backends.driver import drive
from tests.large import LARGE

MEGABYTE = 1 << 20
TOKENS = [3, 200, 17, 90]


def write_model(folder: Path, shards: int, **sizes: int) -> Checkpoint:
    """A llama with random weights in bfloat16, written tensor by tensor."""
    values = {"model_type": "llama", "num_attention_heads": 4, "max_position_embeddings": 64, **sizes}
    (folder / "config.json").write_text(json.dumps({**values, "rms_norm_eps": 1e-5}))
    shapes = dict(expected_tensors(model_config({**values, "rms_norm_eps": 1e-5}, "made")))
    noise = np.random.default_rng(3).standard_normal(1 << 16).astype(np.float32) / 16
    bits = (noise.view(np.uint32) >> 16).astype(np.uint16)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        own = sorted(shapes)[shard::shards]
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        weight_map |= dict.fromkeys(own, name)
        header, end = dict[str, Any](), 0
        for tensor in own:
            begin, end = end, end + 2 * math.prod(shapes[tensor])
            header[tensor] = {"dtype": "BF16", "shape": shapes[tensor], "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in own:
                file.write(np.resize(bits, math.prod(shapes[tensor])).tobytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return load_checkpoint(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """34 MB of matrices in 16 bits."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 256}
    return write_model(tmp_path_factory.mktemp("model"), shards=3, **sizes)


@pytest.fixture(scope="module")
def unrounded(model: Checkpoint) -> np.ndarray:
    """The logits of the model as its files hold it."""
    return drive(TorchBackend.load(model, max_rows=8), 1)[0].run(TOKENS)


def matrices_of(model: Checkpoint) -> dict[str, Any]:
    return {name: tensor for name, tensor in model.tensors.items() if name.endswith("_proj.weight")}


@pytest.mark.parametrize(
    ("backend", "quantization"),
    [("cpu", "int8"), ("cpu", "int4"), ("torch", "int8"), ("torch", "int4"), ("torch", "fp8")],
)
def test_loading_holds_the_result_and_a_few_megabytes(
    model: Checkpoint, backend: str, quantization: str
) -> None:
    in_16_bits = sum(tensor.stored.nbytes for tensor in matrices_of(model).values())
    if backend == "cpu":
        pack_matrices({"compiles first": model.tensors["lm_head.weight"]}, quantization, threads=1)
    tracemalloc.start()
    try:
        held: object
        if backend == "cpu":
            held = pack_matrices(matrices_of(model), quantization, threads=1)
        else:
            held = load_pieces(model, torch.device("cpu"), torch.bfloat16, quantization=quantization)
        size, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held is not None
    assert size < (0.36 if quantization == "int4" else 0.56) * in_16_bits
    assert peak - size < 9 * MEGABYTE < in_16_bits / 3


@pytest.mark.parametrize(("quantization", "error"), [("int8", 1 / 254), ("int4", 1 / 15), ("fp8", 1 / 16)])
def test_each_value_is_the_nearest_of_its_group_or_row(
    model: Checkpoint, quantization: str, error: float
) -> None:
    tensor = model.tensors["model.layers.1.mlp.up_proj.weight"]
    values, device = tensor.float32(), torch.device("cpu")
    whole = rounded(tensor, quantization, device, torch.float32).to_dense().numpy()
    groups = values.reshape(len(values), -1, 32)
    largest = np.abs(groups).max(2, keepdims=True).repeat(32, 2).reshape(values.shape)
    allowed = np.abs(values) * error if quantization == "fp8" else largest * error
    assert (np.abs(whole - values) <= allowed * 1.01 + 1e-4).all()
    part = rounded(tensor.take_rows(slice(5, 9)), quantization, device, torch.float32).to_dense().numpy()
    assert (part == whole[5:9]).all()  # so ranks and pieces have the same weights as one device


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_cpu_backend_has_the_weights_of_the_torch_backend(model: Checkpoint, quantization: str) -> None:
    tensor = model.tensors["model.layers.2.self_attn.o_proj.weight"]
    expected = rounded(tensor, quantization, torch.device("cpu"), torch.float32).to_dense().numpy()
    inputs = np.eye(tensor.shape[1], dtype=np.float32)[:96]  # a product with one input is its weights
    np.testing.assert_allclose(
        multiply(tensor, quantization, inputs), expected[:, :96].T, rtol=1e-3, atol=1e-6
    )


@pytest.mark.parametrize(("quantization", "distance"), [("int8", 0.02), ("fp8", 0.1), ("int4", 0.2)])
def test_the_torch_backend_runs_them(
    model: Checkpoint, unrounded: np.ndarray, quantization: str, distance: float
) -> None:
    backend = TorchBackend.load(model, quantization=quantization, max_rows=8)
    assert backend.weight_format == quantization
    found = drive(backend, 1)[0].run(TOKENS)
    assert 0 < np.abs(found - unrounded).mean() / np.abs(unrounded).mean() < distance


def test_what_a_backend_cannot_make_is_refused_with_what_it_can() -> None:
    with pytest.raises(
        ConfigError, match=r"quantization of the cpu backend must be one of .*int8, int4, got"
    ):
        BackendOptions("cpu", quantization="fp8")
    with pytest.raises(ConfigError, match=r"quantization of the torch backend must be one of .*fp8, got"):
        BackendOptions("torch", quantization="native")
    assert set(ROUNDINGS) == {"int8", "int4", "fp8"}


MEASURED = """
import resource, sys
from pathlib import Path
from paceline.backends.load import load_backend
from paceline.backends.options import BackendOptions
from paceline.models.registry import load_checkpoint
import paceline.backends.cpu, paceline.backends.torch.backend

def kilobytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))

options = BackendOptions(sys.argv[2], quantization=sys.argv[3], threads=2, dtype=sys.argv[4])
resting, anonymous = kilobytes("VmRSS"), kilobytes("RssAnon")
backend = load_backend(load_checkpoint(Path(sys.argv[1])), options, max_rows=16)
print((kilobytes("VmHWM") - resting) / (kilobytes("RssAnon") - anonymous), kilobytes("RssAnon") - anonymous)
"""


@pytest.mark.skipif(not LARGE, reason="writes and loads 1 GB: set PACELINE_TEST_LARGE=1")
def test_the_peak_of_a_process_is_at_most_1_2_times_the_result(tmp_path: Path) -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 11, "vocab_size": 4096}
    write_model(tmp_path, shards=4, **sizes)
    cases = ["cpu int8 auto", "cpu int4 auto", *(f"torch {own} bfloat16" for own in ROUNDINGS)]
    for case in cases:
        command = [sys.executable, "-c", MEASURED, str(tmp_path), *case.split()]
        ratio, size = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        print(f"{case}: {int(size) / 1000:.0f} MB, peak {float(ratio):.2f} times")
        assert float(ratio) < 1.2, case
