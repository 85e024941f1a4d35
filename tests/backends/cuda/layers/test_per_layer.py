"""The second embedding of Gemma's E sizes is that of models/transformer/blocks.py."""

from __future__ import annotations

import torch

from paceline.models.config import ModelConfig, PerLayerInput, RopeConfig
from paceline.models.files.layout import expected_tensors
from paceline.models.transformer import blocks

HIDDEN, SIZE, LAYERS, VOCAB_SIZE, EPS = 60, 7, 3, 40, 1e-5


def test_per_layer_embeddings_are_gated_and_projected(device: torch.device, dtype: torch.dtype) -> None:
    from paceline.backends.cuda.kernels.products.matrix import scratch_for
    from paceline.backends.cuda.kernels.residual import plain
    from paceline.backends.cuda.layers.per_layer import (
        PerLayerGate,
        give_inputs,
        load_per_layer_inputs,
        make_per_layer_buffers,
        project_given,
    )
    from paceline.backends.cuda.weights.tiled import matrix

    torch.manual_seed(4)
    inputs = PerLayerInput(SIZE, VOCAB_SIZE)
    sizes = VOCAB_SIZE, HIDDEN, LAYERS, 2, 1, 16, 8, EPS
    config = ModelConfig(
        "gemma4_text", *sizes, RopeConfig(), 64, True, activation="gelu_tanh", per_layer_input=inputs
    )
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in expected_tensors(config)}
    there = {name: tensor.to(device) for name, tensor in tensors.items()}
    ours = load_per_layer_inputs(config, there.__getitem__)
    assert ours is not None
    place = "model.layers.1"
    gate = PerLayerGate(
        matrix(there[f"{place}.per_layer_input_gate.weight"], None),
        matrix(there[f"{place}.per_layer_projection.weight"], None),
        there[f"{place}.post_per_layer_input_norm.weight"],
    )
    buffers = make_per_layer_buffers(ours, gate, 16, ours.norm)
    scratch = scratch_for([ours.projection, gate.gate, gate.projection], 16, device)
    tokens = torch.tensor([5, 0, 39, 7], dtype=torch.int32)
    rows = torch.zeros(16, ours.projection.depth, dtype=dtype)
    rows[:4, :HIDDEN] = torch.randn(4, HIDDEN)
    read = plain(rows.to(device), torch.ones(16, 1, device=device))
    give_inputs(ours, tokens.to(device), read, buffers, scratch)
    added = torch.zeros(16, 64, device=device)
    project_given(gate, 1, read, "gelu_tanh", added, 4, buffers, scratch)

    def wide(name: str) -> torch.Tensor:
        return tensors[name].float()

    embedded = rows[:4, :HIDDEN].float()
    given = blocks.PerLayerInputs(wide, config, inputs)(tokens, embedded)
    got = buffers.given[:4].cpu().view(4, LAYERS, SIZE).transpose(0, 1)
    torch.testing.assert_close(got, given, rtol=1e-2, atol=1e-2)
    theirs = blocks.PerLayerGate(wide, place, config, inputs)
    expected = theirs.projection(theirs.activation(theirs.gate(embedded), given[1]))
    torch.testing.assert_close(added[:4, :HIDDEN].cpu(), expected, rtol=2e-2, atol=5e-2)
