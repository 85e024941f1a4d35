"""Draft heads in GGUF files are those of the folders that were converted, or are refused with the reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models.config import RopeConfig
from paceline.models.files.safetensors_writer import encode
from paceline.models.gguf.reader import GgufTensor, read_gguf
from paceline.models.heads import gguf_heads
from paceline.models.heads.checkpoint import HeadCheckpoint, load_head, write_head
from paceline.models.heads.config import BlockAttention, HeadConfig
from paceline.models.heads.export import export_head
from paceline.models.heads.fingerprint import head_fingerprint
from paceline.models.heads.registry import resolve_head
from paceline.models.heads.torch_block import BlockHead
from paceline.models.heads.torch_head import make_head
from paceline.models.registry import load_checkpoint
from paceline.models.transformer.rope import rope_frequencies
from tests.models.heads import tiny_heads
from tests.models.heads.driver import random_checkpoint
from tests.models.heads.gguf_head_files import convert_head
from tests.models.heads.test_formats import LLAMA3_ROPE
from tests.models.heads.test_torch_head import causal, sequence
from tests.models.heads.tiny_heads import CONFIGS, random_shared
from tests.train.objectives.test_block import output_of

EPS = 2.0**-13  # files have it in 32 bits
EAGLE3, DFLASH, DSPARK = (
    replace(config, rms_norm_eps=EPS) for config in (tiny_heads.EAGLE3, tiny_heads.DFLASH, tiny_heads.DSPARK)
)
LAYERS = (1, 2, 3)  # hidden states, which the converter writes into each file
NAMES = ("eagle3", "norm_before_fc", "norm_before_residual", "target's head", "own embedding", "linear rope")
EAGLE3_HEADS = {name: replace(CONFIGS[name], feature_layers=LAYERS, rms_norm_eps=EPS) for name in NAMES}
BLOCK_HEADS = {
    "dflash": DFLASH,
    "dspark": DSPARK,
    "dspark without an anchor": replace(DSPARK, block=replace(DSPARK.block, sample_from_anchor=False)),
    "dflash with an own lm_head": replace(DFLASH, draft_vocab_size=91, own_lm_head=True),
}
HEADS = EAGLE3_HEADS | BLOCK_HEADS
# sizes of whole blocks of quantized values
WIDE: dict[str, Any] = {"hidden_size": 64, "target_hidden_size": 64, "head_dim": 16, "num_heads": 4}
WIDE |= {"intermediate_size": 96}


def saved(folder: Path, config: HeadConfig) -> Path:
    """The folder of a random head, in a format that can say all that the config has."""
    form = "speculators" if config.norm_before_residual else "vllm"
    write_head(random_checkpoint(config), folder, form)
    if form == "speculators":  # the converter reads these keys at the top
        values = json.loads((folder / "config.json").read_text())
        path = folder / "config.json"
        path.write_text(json.dumps({**values["transformer_layer_config"], **values, "model_type": "llama"}))
    return folder


def edited(folder: Path, **more: object) -> Path:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **more}))
    return folder


def assert_same(file: HeadCheckpoint, head: HeadCheckpoint) -> None:
    assert file.config == head.config
    assert file.tensors.keys() == head.tensors.keys()
    for name, tensor in head.tensors.items():
        np.testing.assert_array_equal(file.tensors[name].float32(), tensor.float32(), err_msg=name)
    assert (file.draft_ids is None) == (head.draft_ids is None)
    assert head.draft_ids is None or np.array_equal(file.draft_ids, head.draft_ids)


@torch.inference_mode()
def logits_of(head: HeadCheckpoint) -> np.ndarray:
    """What the network of a head guesses from features that are the same for every head of its sizes."""
    config, shared = head.config, random_shared()
    features, tokens = sequence(config)
    weights = {name: torch.from_numpy(tensor.float32()) for name, tensor in head.tensors.items()}
    if config.block is not None:
        block = BlockHead(config, shared)
        block.load_state_dict(weights)
        anchor = len(features) - 1
        output = output_of(block, torch.from_numpy(features), torch.from_numpy(tokens), anchor)
        return block.guesses(output, torch.from_numpy(tokens[: len(output)])).numpy()
    network = make_head(config, shared)
    network.load_state_dict(weights)
    count = len(features)
    states = network.fuse(torch.from_numpy(features))
    output = network(states, torch.from_numpy(tokens[:count]), torch.arange(count), causal)
    return network.logits(output).numpy()


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_that_of_its_folder(tmp_path, name):
    folder = saved(tmp_path, HEADS[name])
    file, head = load_head(convert_head(folder)), load_head(folder)
    assert head.config == HEADS[name]
    assert_same(file, head)
    np.testing.assert_array_equal(logits_of(file), logits_of(head))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.parametrize("config", [replace(EAGLE3, feature_layers=LAYERS), DSPARK], ids=["eagle3", "dspark"])
def test_matrices_of_every_kind_have_the_values_of_the_gguf_package(tmp_path, config, kind):
    config = replace(config, **WIDE)
    if config.block is not None:
        config = replace(config, block=replace(config.block, markov_rank=32))
    folder = saved(tmp_path, config)
    head = load_head(folder)
    file = load_head(convert_head(folder, kind))
    quantization = gguf.GGMLQuantizationType[kind]
    rounded = {
        name: encode(
            gguf.quants.dequantize(gguf.quants.quantize(tensor.float32(), quantization), quantization)
            if len(tensor.shape) == 2
            else tensor.float32()
        )
        for name, tensor in head.tensors.items()
    }
    assert_same(file, replace(head, tensors=rounded))
    assert file.tensors["fc.weight"].kind == kind


def test_a_matrix_of_k_quants_has_the_values_of_the_gguf_package(tmp_path, monkeypatch):
    """The package does not quantize to them: any bytes will do, but for scales that are no numbers."""
    config = replace(EAGLE3, feature_layers=LAYERS, hidden_size=256, target_hidden_size=256)
    blocks = np.random.default_rng(2).integers(0, 96, (256, 3 * 144), dtype=np.uint8)
    matrix = GgufTensor((256, 3 * 256), "Q4_K", blocks)
    folder = saved(tmp_path, config)
    path = changed(folder, monkeypatch, lambda file: file.tensors.update({"fc.weight": matrix}))
    found, head = load_head(path), load_head(folder)
    expected = encode(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q4_K))
    assert_same(found, replace(head, tensors={**head.tensors, "fc.weight": expected}))


@pytest.mark.parametrize(
    ("config", "key"), [(DFLASH, "target_layer_ids"), (EAGLE3, "eagle_aux_hidden_state_layer_ids")]
)
def test_layers_are_numbered_as_what_they_read(tmp_path, plant, config, key):
    """A file has i for the hidden state i; the config.json of a parallel head has i - 1."""
    folder = saved(tmp_path, replace(config, feature_layers=(1, 3, 2)))
    values = json.loads((folder / "config.json").read_text())
    found = values.get("dflash_config", values)[key]
    path = convert_head(folder)
    stored = read_gguf(path).metadata[f"{'dflash' if config.block else 'eagle3'}.target_layers"]
    assert stored.tolist() == [1, 3, 2]
    assert found == ([0, 2, 1] if config.block else [1, 3, 2])
    assert load_head(path).config.feature_layers == load_head(folder).config.feature_layers == (1, 3, 2)
    right = gguf_heads._feature_layers
    plant(gguf_heads, "_feature_layers", lambda fields: tuple(layer + 1 for layer in right(fields)))
    assert load_head(path).config.feature_layers != load_head(folder).config.feature_layers


def test_windows_are_those_of_marked_layers_and_see_the_whole_block(tmp_path):
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    folder = edited(saved(tmp_path, DFLASH), **windows, use_sliding_window=True)
    file = load_head(convert_head(folder))
    assert file.config.block.layers == (BlockAttention(6), BlockAttention())
    assert_same(file, load_head(folder))
    with pytest.raises(CheckpointError, match=r"attention\.sliding_window_pattern; expected a flag for each"):
        load_head(convert_head(folder, without=("dflash.attention.sliding_window_pattern",)))


def test_scaled_angles_are_read_from_their_divisors(tmp_path):
    config = replace(EAGLE3, feature_layers=LAYERS, rope=LLAMA3_ROPE)
    folder = saved(tmp_path, config)
    file = load_head(convert_head(folder))
    expected = rope_frequencies(config.rope, config.head_dim)
    found = rope_frequencies(file.config.rope, config.head_dim)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert not np.allclose(expected, rope_frequencies(RopeConfig(config.rope.theta), config.head_dim))
    np.testing.assert_allclose(logits_of(file), logits_of(load_head(folder)), atol=1e-5)


def test_what_older_files_leave_out(tmp_path):
    folder = saved(tmp_path, replace(DSPARK, block=replace(DSPARK.block, size=16)))
    names = ("block_size", "sample_from_anchor")
    file = load_head(convert_head(folder, without=tuple(f"dflash.{name}" for name in names)))
    assert_same(file, load_head(folder))


def test_a_confidence_head_without_its_axis_of_one_and_without_a_bias(tmp_path, monkeypatch):
    """Quantizers of files drop axes of 1, and llama.cpp reads files without the bias."""
    head = load_head(saved(tmp_path, DSPARK))
    whole = gguf_head_tensors(tmp_path)
    monkeypatch.setattr(gguf_heads, "read_gguf", lambda path: whole)
    weight = whole.tensors["conf_proj.weight"]
    whole.tensors["conf_proj.weight"] = replace(weight, shape=weight.shape[1:])
    del whole.tensors["conf_proj.bias"]
    zero = encode(np.zeros(1, dtype=np.float32))
    expected = {**head.tensors, "confidence_head.proj.bias": zero}
    assert_same(load_head(whole.path), replace(head, tensors=expected))


def gguf_head_tensors(folder: Path):
    return read_gguf(convert_head(folder))


def changed(folder: Path, monkeypatch, change) -> Path:
    """The file of a folder's head, which reads as `change` leaves it."""
    file = gguf_head_tensors(folder)
    change(file)
    monkeypatch.setattr(gguf_heads, "read_gguf", lambda path: file)
    return file.path


@pytest.mark.parametrize(
    ("config", "change", "error", "message"),
    [
        (EAGLE3, {"eagle3.block_count": 2}, CheckpointError, "expected 1, the layers of an EAGLE-3 head"),
        (EAGLE3, {"eagle3.target_layers": None}, CheckpointError, "lacks target_layers; expected a list"),
        (EAGLE3, {"eagle3.norm_before_fc": True}, CheckpointError, r"lacks the tensor input_norm\.weight"),
        (EAGLE3, {"eagle3.rope.dimension_count": 6}, UnsupportedModelError, "rope.dimension_count is 6"),
        (EAGLE3, {"general.architecture": "llama"}, CheckpointError, "--draft model:.*"),
        (EAGLE3, {"general.architecture": "gemma4-assistant"}, CheckpointError, "--draft assistant:.*"),
        (DFLASH, {"tokenizer.ggml.mask_token_id": 999}, CheckpointError, "a token below 173"),
        (DFLASH, {"tokenizer.ggml.mask_token_id": None}, CheckpointError, "lacks tokenizer.ggml.mask_token"),
        (DFLASH, {"dflash.hyper_connection.count": 4}, UnsupportedModelError, "of DeepSeek V4"),
        (DFLASH, {"dflash.block_size": 1}, CheckpointError, "an integer from 2"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, monkeypatch, config, change, error, message):
    folder = saved(tmp_path, replace(config, feature_layers=LAYERS))
    path = changed(folder, monkeypatch, lambda file: file.metadata.update(change))
    with pytest.raises(error, match=message):
        load_head(path)


@pytest.mark.parametrize(
    ("name", "like", "message"),
    [
        ("fc.scale", "output_norm.weight", r"tensor 'fc\.scale' is not one that dflash models have"),
        ("blk.0.attn_q.bias", "output_norm.weight", r"layers\.0\.self_attn\.q_proj\.bias"),
        ("d2t", "output_norm.weight", r"d2t is F32 of shape"),
    ],
)
def test_a_tensor_that_heads_do_not_have_is_refused(tmp_path, monkeypatch, name, like, message):
    folder = saved(tmp_path, DFLASH)
    path = changed(folder, monkeypatch, lambda file: file.tensors.update({name: file.tensors[like]}))
    with pytest.raises(CheckpointError, match=message):
        load_head(path)


def test_a_head_is_no_model_and_the_message_says_how_to_draft_with_it(tmp_path):
    for config, method in ((EAGLE3_HEADS["eagle3"], "eagle3"), (DFLASH, "dflash"), (DSPARK, "dspark")):
        path = convert_head(saved(tmp_path / method, config))
        with pytest.raises(UnsupportedModelError, match=f"a draft head, not a model.* --draft {method}:"):
            load_checkpoint(path)


def test_it_is_named_exported_and_fingerprinted_as_a_file(tmp_path):
    folder = saved(tmp_path / "folder", EAGLE3_HEADS["eagle3"])
    path = convert_head(folder).rename(tmp_path / "files.gguf")
    (tmp_path / "alone").mkdir()
    alone = path.rename(tmp_path / "alone" / "eagle3-tiny-F32.gguf")
    assert resolve_head(f"eagle3:{alone}") == resolve_head(str(alone.parent)) == alone
    export_head(str(alone), tmp_path / "out", "vllm")
    assert_same(load_head(tmp_path / "out"), load_head(folder))
    assert head_fingerprint(alone) != head_fingerprint(alone.parent)
