"""Folders that peft itself has written (write_peft_folders.py) give what peft adds to its model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from paceline.models.lora import Adapter, load_adapter
from paceline.models.registry import load_checkpoint
from tests.lossless.write_peft_folders import FOLDERS, WRITTEN, sums
from tests.tiny import save_checkpoint

# parameters of files that join several of our matrices, in their order
JOINED = {
    "self_attn.qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "mlp.gate_up_proj": ["gate_proj", "up_proj"],
    "mlp.experts.gate_up_proj": ["gate_proj", "up_proj"],
    "mlp.experts.down_proj": ["down_proj"],
}


def change_of(parameter: str, changes: dict[str, np.ndarray], num_experts: int) -> np.ndarray:
    """What an adapter adds to a parameter of the file; what was used leaves `changes`."""
    layer, kind = ".".join(parameter.split(".")[:3]), ".".join(parameter.split(".")[3:5])
    block = kind.split(".")[0]
    if ".experts." in parameter:
        names = JOINED[".".join(parameter.split(".")[3:])]
        of_experts = [f"{layer}.mlp.experts.{expert}" for expert in range(num_experts)]
        parts = [[changes.pop(f"{expert}.{name}") for name in names] for expert in of_experts]
        return np.stack([np.concatenate(own) for own in parts])
    if kind in JOINED:
        return np.concatenate([changes.pop(f"{layer}.{block}.{name}") for name in JOINED[kind]])
    return changes.pop(parameter.removesuffix(".weight"))


@pytest.fixture(params=WRITTEN)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def test_a_folder_of_peft_changes_what_peft_changes(name: str, tmp_path: Path) -> None:
    config = load_checkpoint(save_checkpoint(WRITTEN[name][0], tmp_path)).config
    adapter: Adapter = load_adapter(name, FOLDERS / name, config)
    changes = {key: own.up @ own.down for key, own in adapter.matrices.items()}
    deltas = json.loads((FOLDERS / name / "deltas.json").read_text())
    assert deltas
    for parameter, expected in deltas.items():
        found = change_of(parameter, changes, config.moe.num_experts if config.moe else 0)
        np.testing.assert_allclose(sums(found), expected, rtol=1e-4, atol=1e-3, err_msg=parameter)
    assert not changes, "more is changed than peft changes"
