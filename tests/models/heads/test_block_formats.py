"""Parallel heads in the files of others: read as their authors and speculators write them, or refused."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import CheckpointError, ConfigError, HeadMismatchError, UnsupportedModelError
from paceline.models.files.safetensors_writer import encode
from paceline.models.heads.block_formats import read_block_config
from paceline.models.heads.checkpoint import load_head, write_head
from paceline.models.heads.config import BlockAttention, BlockConfig, TargetName, usual_block_layers
from paceline.models.heads.export import export_head
from paceline.models.heads.fingerprint import check_target
from paceline.models.registry import load_checkpoint
from tests.models.heads.driver import random_checkpoint
from tests.models.heads.test_formats import assert_equal
from tests.models.heads.tiny_heads import BLOCK_CONFIGS, DFLASH, DSPARK, EAGLE3, random_tensors
from tests.tiny import save_checkpoint

EXPORTED = set(BLOCK_CONFIGS) - {"windows", "own mask"}
FULL = BlockAttention()


@pytest.mark.parametrize("form", ["sglang", "vllm", "speculators"])
@pytest.mark.parametrize("name", BLOCK_CONFIGS)
def test_what_is_written_is_what_is_read(tmp_path, name, form):
    head = random_checkpoint(replace(BLOCK_CONFIGS[name], target=TargetName("0123456789abcdef", "a/target")))
    if name not in EXPORTED or (name == "jetspec" and form == "speculators"):
        with pytest.raises(ConfigError, match=r"cannot be exported|export this head as vllm"):
            write_head(head, tmp_path, form)
        return
    write_head(head, tmp_path, form)
    assert_equal(head, load_head(tmp_path))


def test_a_head_with_norms_of_the_features_is_for_no_other_engine(tmp_path):
    write_head(random_checkpoint(BLOCK_CONFIGS["dspark with norms"]), tmp_path / "head", "vllm")
    with pytest.raises(ConfigError, match="--no-fc-norm"):
        export_head(str(tmp_path / "head"), tmp_path / "out", "vllm")


# The configurations that their authors publish, with what does not matter here left out

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "layer_types": ["full_attention"] * 5,
}
QWEN3_8B = {
    **QWEN3,
    "architectures": ["DFlashDraftModel"],
    "block_size": 16,
    "num_target_layers": 36,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}
DSPARK_8B = {
    **QWEN3,
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 7,
    "mask_token_id": 151669,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
}
SPECULATORS_8B = {
    "architectures": ["DSparkSpeculator"],
    "speculators_model_type": "dspark",
    "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
    "block_size": 7,
    "mask_token_id": 151669,
    "transformer_layer_config": QWEN3,
}
SHAPES_8B = {
    "fc.weight": (4096, 5 * 4096),
    "layers.0.self_attn.q_norm.weight": (128,),
}
HEADS_8B = {
    "markov_head.markov_w1.weight": (151936, 256),
    "markov_head.markov_w2.weight": (151936, 256),
    "confidence_head.proj.weight": (1, 4352),
}


DFLASH2 = {
    "architectures": ["DFlash2DraftModel"],
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
}


def read(values: dict[str, Any], **shapes: tuple[int, ...]):
    return read_block_config(values, "head/config.json", {**SHAPES_8B, **shapes})


def test_dflash_of_its_authors():
    config = read(QWEN3_8B)
    assert (config.kind, config.feature_layers) == ("dflash", (2, 10, 18, 26, 34))
    assert config.block == BlockConfig(16, 151669, (FULL,) * 5)
    assert config.block.num_drafts == 15
    assert config.rope.theta == 1e6
    assert config.qk_norm
    assert not config.own_lm_head


@pytest.mark.parametrize("values", [DSPARK_8B, SPECULATORS_8B], ids=["plain", "speculators"])
def test_dspark_reads_the_same_layers_in_both_formats_and_samples_from_the_anchor(values):
    config = read(values, **HEADS_8B)
    assert (config.kind, config.feature_layers) == ("dspark", (2, 10, 18, 26, 34))
    assert config.block == BlockConfig(
        7, 151669, (FULL,) * 5, True, markov_rank=256, confidence=True, confidence_with_markov=True
    )
    assert config.block.num_drafts == 7
    assert read({**values, "sample_from_anchor": False}, **HEADS_8B).block.num_drafts == 6


def test_dflash_of_speculators_does_not_sample_from_the_anchor():
    values = {**SPECULATORS_8B, "speculators_model_type": "dflash", "architectures": ["DFlashSpeculator"]}
    assert (read(values).kind, read(values).block.num_drafts) == ("dflash", 6)


def test_dflash2_of_speculators():
    values = {**SPECULATORS_8B, **DFLASH2, "speculators_model_type": "dflash2"}
    values["architectures"] = ["DFlash2Speculator"]
    config = read(values)
    assert (config.kind, config.feature_layers) == ("dflash", (2, 10, 18, 26, 34))
    assert (config.block.convolution_group, config.block.selector_rank) == (16, 256)
    assert config.block.num_drafts == 6


def test_layers_that_the_config_leaves_out_are_spread_over_the_target():
    nested = {"mask_token_id": 151669}
    assert read({**QWEN3_8B, "dflash_config": nested}).feature_layers == (2, 10, 18, 26, 34)
    # 1 + 6.5 and 1 + 19.5 are rounded to even
    assert usual_block_layers(30, 5) == (2, 9, 15, 21, 28)


def test_causal_heads_and_windows():
    jetspec = {**QWEN3_8B, "dflash_config": {**QWEN3_8B["dflash_config"], "causal_head": True}}
    assert read(jetspec).block.layers == (BlockAttention(None, True),) * 5
    types = ["sliding_attention"] * 4 + ["full_attention"]
    windows = {**QWEN3_8B, "layer_types": types, "sliding_window": 2048}
    assert read(windows).block.layers == (*[BlockAttention(2048)] * 4, FULL)
    layer = {**QWEN3, "layer_types": types, "sliding_window": 2048}
    speculators = {**SPECULATORS_8B, "transformer_layer_config": layer}
    assert read(speculators).block.layers == (*[BlockAttention(2048, True)] * 4, FULL)
    dflash2 = read({**windows, **DFLASH2})
    assert dflash2.block.layers == (*[BlockAttention(2048, True)] * 4, FULL)
    assert read({**windows, **DFLASH2, "is_causal": False}).block.layers[0] == BlockAttention(2048)
    assert (dflash2.kind, dflash2.feature_layers) == ("dflash", (2, 10, 18, 26, 34))
    assert not dflash2.block.sample_from_anchor
    layer = {key: value for key, value in QWEN3.items() if key != "layer_types"} | {"sliding_window": None}
    at_the_top = {
        **SPECULATORS_8B,
        "layer_types": types,
        "sliding_window": 2048,
        "transformer_layer_config": layer,
    }
    assert read(at_the_top).block.layers == (*[BlockAttention(2048, True)] * 4, FULL)
    both_ways = {**speculators, "sliding_window_non_causal": True}
    assert read(both_ways).block.layers == (*[BlockAttention(2048)] * 4, FULL)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({**DFLASH2, "conv_kernel_size": 3}, UnsupportedModelError, "conv_kernel_size 3 is not supported"),
        ({**DFLASH2, "conv_group_size": 7}, CheckpointError, "a divisor of hidden_size"),
        ({"markov_head_type": "gated"}, UnsupportedModelError, "markov_head_type vanilla"),
        ({"topk_context": 64}, UnsupportedModelError, "topk_context is not supported"),
        ({"rope_interleave": True}, UnsupportedModelError, "interleaved rotary embedding"),
        ({"rope_is_neox_style": False}, UnsupportedModelError, "interleaved rotary embedding"),
        ({"shift_label": True}, UnsupportedModelError, "shift_label is not supported"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "only silu"),
        ({"block_size": 1}, CheckpointError, "block_size = '1'; expected an integer from 2"),
        ({"mask_token_id": 151936}, CheckpointError, "a token below 151936, or a mask_embedding.pt"),
        ({"layer_types": ["full_attention"]}, CheckpointError, "a list of 5 types of attention"),
        ({"target_layer_ids": []}, CheckpointError, "a list of layer numbers"),
        ({"dflash_config": {}, "target_layer_ids": [1]}, CheckpointError, "lacks mask_token_id"),
        (
            {"dflash_config": {"mask_token_id": 1}, "num_target_layers": None},
            CheckpointError,
            "lacks target_la",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_reason(changes, error, message):
    with pytest.raises(error, match=message):
        read({**QWEN3_8B, **changes})


def test_heads_of_others_for_targets_that_interleave_rope_are_refused(tmp_path):
    target = load_checkpoint(save_checkpoint("llama", tmp_path)).config
    check_target(DFLASH, target, "", "head")
    glm = replace(target, family="glm4")
    with pytest.raises(HeadMismatchError, match="interleave the rotary embedding"):
        check_target(DFLASH, glm, "", "head")
    trained_here = replace(DFLASH, target=TargetName("0" * 16))
    check_target(trained_here, glm, "0" * 16, "head")
    check_target(replace(EAGLE3, feature_layers=(1, 2)), glm, "", "head")


def test_an_embedding_of_mask_lies_beside_the_weights(tmp_path):
    config = replace(DFLASH, block=replace(DFLASH.block, mask_embedding=True))
    tensors = random_tensors(config)
    write_head(random_checkpoint(DFLASH), tmp_path, "vllm")
    embedding = torch.from_numpy(tensors["mask_embedding"])
    torch.save(embedding[None], tmp_path / "mask_embedding.pt")
    loaded = load_head(tmp_path)
    assert loaded.config == config
    np.testing.assert_array_equal(loaded.tensors["mask_embedding"].float32(), embedding.numpy())


def test_files_that_lack_a_tensor_or_have_another_are_refused(tmp_path):
    head = random_checkpoint(DSPARK)
    names = [name for name in head.tensors if name != "layers.1.mlp.up_proj.weight"]
    write_head(replace(head, tensors={name: head.tensors[name] for name in names}), tmp_path, "vllm")
    with pytest.raises(CheckpointError, match=r"lacks the tensor layers\.1\.mlp\.up_proj\.weight"):
        load_head(tmp_path)
    gate = {**head.tensors, "markov_head.gate_proj.weight": encode(np.zeros((9, 69), np.float32))}
    write_head(replace(head, tensors=gate), tmp_path, "vllm")
    with pytest.raises(CheckpointError, match=r"markov_head\.gate_proj\.weight"):
        load_head(tmp_path)


def test_files_with_a_prefix_are_read(tmp_path):
    head = random_checkpoint(DFLASH)
    write_head(head, tmp_path, "vllm")
    tensors = {f"model.{name}": torch.from_numpy(t.float32()) for name, t in head.tensors.items()}
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert_equal(head, load_head(tmp_path))


def test_paceline_export_prints_the_command_of_the_other_engine(tmp_path, paceline):
    write_head(random_checkpoint(DSPARK), tmp_path / "ours", "vllm")
    given = ("export", tmp_path / "ours", tmp_path / "theirs", "--target", "a/target", "--format")
    code, printed, _ = paceline(*given, "speculators")
    assert code == 0
    config = json.loads(shlex.split(printed.splitlines()[1])[-1])
    assert (config["method"], config["num_speculative_tokens"]) == ("dspark", 4)
    assert_equal(random_checkpoint(DSPARK), load_head(tmp_path / "theirs"))
    code, printed, _ = paceline(*given, "sglang", "--force")
    assert printed.splitlines()[1].endswith(
        f"--speculative-algorithm DSPARK --speculative-draft-model-path {tmp_path / 'theirs'}"
    )


def test_a_config_says_what_other_engines_look_for(tmp_path):
    write_head(random_checkpoint(DSPARK), tmp_path, "vllm")
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["architectures"] == ["Qwen3DSparkModel"]
    assert values["target_layer_ids"] == [0, 2]
    write_head(random_checkpoint(DSPARK), tmp_path, "speculators")
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["aux_hidden_state_layer_ids"] == [1, 3]
    assert values["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
