"""Weights of 4 bits in training: what is learned with them is what engines serve."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from paceline.models.quantized.writer import pack
from paceline.train.loop.rounding import GROUP, STEPS, round_matrices, rounded, rounded_weights


@pytest.fixture
def matrix() -> torch.Tensor:
    return torch.randn(16, 4 * GROUP, generator=torch.Generator().manual_seed(0)) / 10


def as_the_cpu_backend_rounds(values: np.ndarray) -> np.ndarray:
    """w = d q + m: 15 steps from the smallest of 32 to the largest; see backends/cpu/weights/packing.py."""
    groups = values.reshape(len(values), -1, GROUP)
    smallest = groups.min(2, keepdims=True).astype(np.float16).astype(np.float32)
    scale = ((groups.max(2, keepdims=True) - smallest) / STEPS).astype(np.float16).astype(np.float32)
    return (np.rint((groups - smallest) / scale) * scale + smallest).reshape(values.shape)


def test_the_cpu_backend_serves_rounded_weights_as_they_are(matrix: torch.Tensor) -> None:
    step = float(matrix.abs().max()) / STEPS
    learned = rounded(matrix).numpy()
    assert np.abs(as_the_cpu_backend_rounds(learned) - learned).max() < 0.02 * step
    # of the exact weights it would make others
    assert np.abs(as_the_cpu_backend_rounds(matrix.numpy()) - learned).max() > 0.3 * step


def test_files_of_4_bits_hold_rounded_weights(matrix: torch.Tensor) -> None:
    again, exact = (pack(values.numpy(), 4) for values in (rounded(matrix), matrix))
    assert all(np.array_equal(again[part].data, exact[part].data) for part in exact)


def test_matrices_are_rounded_for_a_while_or_for_good_but_for_fc() -> None:
    network = nn.ModuleDict({name: nn.Linear(GROUP, 8) for name in ("fc", "q_proj")})
    parameters = dict(network.named_parameters())
    before = {name: each.detach().clone() for name, each in parameters.items()}
    with rounded_weights(parameters):
        changed = {name for name in parameters if not torch.equal(parameters[name], before[name])}
    assert changed == {"q_proj.weight"}
    assert all(torch.equal(parameters[name], before[name]) for name in parameters)
    round_matrices(parameters)
    assert torch.equal(parameters["q_proj.weight"], rounded(before["q_proj.weight"]))
