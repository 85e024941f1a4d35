"""The blocks for multi-token prediction of GGUF files are those of the safetensors that were converted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.backends.cpu import CpuBackend
from paceline.core.trees import PLAIN, DraftPlan
from paceline.draft.heads.mtp import MtpDrafter, MtpOptions
from paceline.errors import CheckpointError
from paceline.models.checkpoint import Checkpoint
from paceline.models.families.config_reader import model_config
from paceline.models.gguf.checkpoint import gguf_checkpoint
from paceline.models.gguf.reader import read_gguf
from paceline.models.heads.mtp import mtp_head
from paceline.models.registry import load_checkpoint
from tests import tiny_families
from tests.draft.heads.test_eagle_cpu import ROWS, run_engine
from tests.draft.heads.test_mtp import target_of
from tests.draft.mimo import DEEPSEEK, QWEN, Names, random_with_block
from tests.models.gguf.test_gguf_families import FAMILIES
from tests.models.gguf.test_gguf_hybrids import write
from tests.models.gguf_converter import with_gguf
from tests.models.model_files import MODELS, random_tensors, write_gguf

NEXTN = {
    "mtp.fc.weight": "eh_proj",
    "mtp.pre_fc_norm_embedding.weight": "enorm",
    "mtp.pre_fc_norm_hidden.weight": "hnorm",
    "mtp.norm.weight": "shared_head_norm",
}


def assert_equal_blocks(file: Checkpoint, model: Checkpoint) -> None:
    assert file.config.num_layers == model.config.num_layers
    assert set(file.mtp) == set(model.mtp)
    for name, tensor in model.mtp.items():
        np.testing.assert_array_equal(file.mtp[name].float32(), tensor.float32(), err_msg=name)
    mtp_head(file.config, file.mtp)  # complete, and of the right shapes


@pytest.mark.parametrize(("family", "names"), [("qwen3-next-experts", QWEN), ("deepseek-v3", DEEPSEEK)])
def test_a_block_is_that_of_the_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, names: Names
) -> None:
    monkeypatch.setitem(tiny_families.TORCH_FAMILIES, family, FAMILIES[family])
    random_with_block(family, names, tmp_path)
    assert_equal_blocks(load_checkpoint(with_gguf(tmp_path) / "model.gguf"), load_checkpoint(tmp_path))


def with_block(folder: Path, family: str) -> tuple[Checkpoint, Path]:
    """A model of Qwen 3.5 with a block, and its GGUF file."""
    random_with_block(family, QWEN, folder)
    model = load_checkpoint(folder)
    layers = model.config.num_layers
    tensors = {
        name.replace("mtp.layers.0.", f"model.layers.{layers}."): tensor
        for name, tensor in model.mtp.items()
        if name not in NEXTN
    }
    longer = replace(
        model,
        config=replace(model.config, num_layers=layers + 1),
        tensors={**model.tensors, **tensors},
    )
    nextn = {f"blk.{layers}.nextn.{part}.weight": model.mtp[name].float32() for name, part in NEXTN.items()}
    return model, write(folder / "model.gguf", longer, nextn)


@pytest.mark.parametrize("family", ["qwen3-5", "qwen3-5-moe"])
def test_a_block_of_qwen_3_5_is_that_of_the_safetensors(tmp_path: Path, family: str) -> None:
    model, path = with_block(tmp_path, family)
    assert_equal_blocks(load_checkpoint(path), model)


def test_a_block_of_glm_is_read_without_the_targets_matrices(tmp_path: Path) -> None:
    values = MODELS["glm4_moe"]
    layers, width = values["num_hidden_layers"], values["hidden_size"]
    tensors = random_tensors(model_config(values | {"num_hidden_layers": layers + 1}, "glm"))
    part = f"blk.{layers}.nextn"
    whole = np.ones((values["vocab_size"], width), np.float32)
    extra = {f"{part}.embed_tokens.weight": whole, f"{part}.shared_head_head.weight": whole}
    extra |= {f"{part}.{name}.weight": np.ones(width, np.float32) for name in ("enorm", "hnorm")}
    extra[f"{part}.shared_head_norm.weight"] = np.ones(width, np.float32)
    extra[f"{part}.eh_proj.weight"] = np.ones((width, 2 * width), np.float32)
    file = read_gguf(write_gguf(tmp_path / "model.gguf", "glm4_moe", tensors, extra=extra))
    file.metadata.update({"glm4moe.block_count": layers + 1, "glm4moe.nextn_predict_layers": 1})
    checkpoint = gguf_checkpoint(file)
    mtp_head(checkpoint.config, checkpoint.mtp)
    layer = f"model.layers.{layers}."
    for name in (name for name in tensors if name.startswith(layer)):
        np.testing.assert_array_equal(checkpoint.mtp[name].float32(), tensors[name], err_msg=name)
    assert not any("embed_tokens" in name or "shared_head.head" in name for name in checkpoint.mtp)


def test_a_block_that_a_file_lacks_is_named(tmp_path: Path) -> None:
    extra = {"blk.2.nextn.enorm.weight": np.ones(32, np.float32)}
    tensors = random_tensors(model_config(MODELS["glm4_moe"], "glm"))
    file = read_gguf(write_gguf(tmp_path / "model.gguf", "glm4_moe", tensors, extra=extra))
    file.metadata.update({"glm4moe.block_count": 3, "glm4moe.nextn_predict_layers": 1})
    checkpoint = gguf_checkpoint(file)
    with pytest.raises(CheckpointError, match=r"looked for the tensor model\.layers\.2\."):
        mtp_head(checkpoint.config, checkpoint.mtp)


def test_same_tokens_with_the_block_of_a_file(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(with_block(tmp_path, "qwen3-5")[1])
    backend = CpuBackend.load(checkpoint, quantization="int8", threads=1, max_rows=ROWS)
    drafter = MtpDrafter.load(MtpOptions(min_prob=0.0), target_of(checkpoint, backend))
    added, _ = run_engine(backend, drafter, PLAIN, DraftPlan("mtp", 4), DraftPlan("mtp", 6, 2))
    expected, _ = run_engine(backend, None, PLAIN)
    assert [one.output_token_ids for one in added] == [one.output_token_ids for one in expected]
    assert sum(one.speculative.num_draft_tokens for one in added) > 30
    assert not any(one.failed_drafters for one in added)
