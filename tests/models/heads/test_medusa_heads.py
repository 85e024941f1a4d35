"""Medusa heads: what they compute, and their files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.errors import CheckpointError
from paceline.models.files.safetensors_writer import encode
from paceline.models.heads.config import TargetName
from paceline.models.heads.medusa import (
    MedusaCheckpoint,
    MedusaConfig,
    NumpyMedusa,
    load_medusa,
    write_medusa,
)
from paceline.models.heads.torch_medusa import TorchMedusa

CONFIG = MedusaConfig(num_heads=3, num_layers=2, hidden_size=60, draft_vocab_size=173)


def random_medusa(config: MedusaConfig = CONFIG, draft_ids: np.ndarray | None = None) -> MedusaCheckpoint:
    rng = np.random.default_rng(6)
    shapes = config.expected_tensors()
    tensors = {name: encode(rng.standard_normal(shape, dtype=np.float32) * 0.2) for name, shape in shapes}
    return MedusaCheckpoint(config, tensors, draft_ids, Path("random"))


def assert_equal(ours: MedusaCheckpoint, theirs: MedusaCheckpoint) -> None:
    assert ours.config == theirs.config
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert all(np.array_equal(t.blocks(), theirs.tensors[name].blocks()) for name, t in ours.tensors.items())
    assert np.array_equal(ours.draft_ids, theirs.draft_ids)


def test_both_networks_are_the_formula():
    head = random_medusa()
    states = np.random.default_rng(1).standard_normal((4, 60), dtype=np.float32)
    expected = np.empty((3, 4, 173))
    for k in range(3):
        for row, x in enumerate(states.astype(np.float64)):
            for layer in range(2):
                weight, bias = (head.tensors[f"blocks.{k}.layers.{layer}.{p}"] for p in ("weight", "bias"))
                y = weight.float32().astype(np.float64) @ x + bias.float32()
                x = x + y / (1 + np.exp(-y))
            expected[k, row] = head.tensors[f"lm_heads.{k}.weight"].float32().astype(np.float64) @ x
    torch_heads = TorchMedusa.load(head, torch.device("cpu"), torch.float32)
    np.testing.assert_allclose(NumpyMedusa(head).run(states), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(torch_heads.run(states), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_what_is_written_is_what_is_read(tmp_path, layers):
    config = replace(CONFIG, num_layers=layers, target=TargetName("abc", "some/target"))
    assert_equal(random_medusa(config), load_medusa(_written(random_medusa(config), tmp_path)))
    ids = np.arange(5, 178, dtype=np.int32)
    trimmed = random_medusa(config, ids)
    assert_equal(trimmed, load_medusa(_written(trimmed, tmp_path)))


def _written(head: MedusaCheckpoint, folder: Path) -> Path:
    write_medusa(head, folder)
    return folder


def test_the_best_shape_of_a_tree_is_kept_with_the_heads(tmp_path):
    paths = ((0,), (0, 0), (3,), (0, 0, 1))
    assert load_medusa(_written(replace(random_medusa(), paths=paths), tmp_path)).paths == paths
    assert load_medusa(_written(random_medusa(), tmp_path)).paths == ()


@pytest.mark.parametrize(
    "paths", [[[0, 0]], [[0], [0]], [[]], [[-1]], [["0"]], [[0], [0, 0], [0, 0, 0, 0]], 3]
)
def test_invalid_paths_are_refused(tmp_path, paths):
    _written(random_medusa(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "medusa_choices": paths}))
    with pytest.raises(CheckpointError, match="each once and behind its own beginning"):
        load_medusa(tmp_path)


def authors_names(head: MedusaCheckpoint) -> dict[str, torch.Tensor]:
    config, named = head.config, {}
    for name, tensor in head.tensors.items():
        parts = name.split(".")
        theirs = f"{parts[1]}.{parts[3]}.linear.{parts[4]}" if parts[0] == "blocks" else ""
        named[theirs or f"{parts[1]}.{config.num_layers}.weight"] = torch.from_numpy(tensor.float32())
    return named


def test_the_file_of_medusas_authors(tmp_path):
    head = random_medusa()
    torch.save(authors_names(head), tmp_path / "medusa_lm_head.pt")
    assert_equal(head, load_medusa(tmp_path))
    assert_equal(head, load_medusa(tmp_path / "medusa_lm_head.pt"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"2.2.weight": None}, "tensor blocks.2.layers.0.bias has the shape"),
        ({"1.0.linear.bias": torch.zeros(59)}, r"has the shape \(59,\)"),
        ({"more": torch.zeros(3)}, "tensor more has the shape"),
        ({f"{k}.2.weight": None for k in range(3)}, "no Medusa heads"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path, change, message):
    tensors = {**authors_names(random_medusa()), **change}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    torch.save(kept, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match=message):
        load_medusa(tmp_path)


def test_a_folder_without_heads_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no Medusa heads"):
        load_medusa(tmp_path)
