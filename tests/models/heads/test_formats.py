"""Heads in the files of others: read in every format, written in two, refused with the reason."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.errors import CheckpointError, ConfigError, UnsupportedModelError
from paceline.models.config import RopeConfig
from paceline.models.files.safetensors_files import safetensors_checkpoint
from paceline.models.files.safetensors_writer import encode
from paceline.models.heads.checkpoint import HeadCheckpoint, load_head, write_head
from paceline.models.heads.config import TargetName
from paceline.models.heads.export import export_head
from paceline.models.heads.fingerprint import check_target, target_fingerprint
from paceline.models.heads.registry import resolve_head
from paceline.models.heads.shipped import DEFAULT_TARGET, SHIPPED
from paceline.models.quantized.method import Quantization
from paceline.models.quantized.modules import dequantized
from paceline.models.quantized.writer import can_pack, pack
from paceline.train.loop.rounding import rounded
from tests.models.heads.driver import random_checkpoint
from tests.models.heads.tiny_heads import CONFIGS, EAGLE, EAGLE3, P_EAGLE, VOCAB, random_tensors
from tests.tiny import save_checkpoint

LLAMA3_ROPE = RopeConfig(500.0, "llama3", 8.0, 1.0, 4.0, 64)
TARGET = TargetName("0123456789abcdef", "some/target")


def assert_equal(ours: HeadCheckpoint, theirs: HeadCheckpoint) -> None:
    assert ours.config == theirs.config
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in ours.tensors.items():
        assert theirs.tensors[name].kind == tensor.kind
        assert np.array_equal(theirs.tensors[name].blocks(), tensor.blocks())
    assert (ours.draft_ids is None) == (theirs.draft_ids is None)
    assert ours.draft_ids is None or np.array_equal(ours.draft_ids, theirs.draft_ids)


@pytest.mark.parametrize("form", ["sglang", "speculators"])
@pytest.mark.parametrize(
    "name",
    [name for name, config in CONFIGS.items() if config.kind != "mtp"]
    + ["llama3 rope", "with a target", "p-eagle"],
)
def test_what_is_written_is_what_is_read(tmp_path, name, form):
    more = {
        "llama3 rope": replace(EAGLE3, rope=LLAMA3_ROPE),
        "with a target": replace(EAGLE3, target=TARGET),
        "p-eagle": P_EAGLE,
    }
    config = (CONFIGS | more)[name]
    refused = config.norm_before_residual if form == "sglang" else config.kind == "eagle"
    head = random_checkpoint(config)
    if refused:
        with pytest.raises(ConfigError, match="export this"):
            write_head(head, tmp_path, form)
        return
    write_head(head, tmp_path, form)
    assert_equal(head, load_head(tmp_path))
    assert_equal(head, load_head(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_16_bit_tensors_keep_their_bits(tmp_path, kind):
    tensors = {name: encode(values, kind) for name, values in random_tensors(EAGLE3).items()}
    head = replace(random_checkpoint(EAGLE3), tensors=tensors)
    write_head(head, tmp_path, "sglang")
    assert_equal(head, load_head(tmp_path))
    dtype = json.loads((tmp_path / "config.json").read_text())["torch_dtype"]
    assert dtype == {"F16": "float16", "BF16": "bfloat16"}[kind]


def test_bfloat16_is_rounded_as_torch_rounds():
    values = np.random.default_rng(0).standard_normal(4096).astype(np.float32) * 1e3
    expected = torch.from_numpy(values).bfloat16().float().numpy()
    assert np.array_equal(encode(values, "BF16").float32(), expected)


def llama_config(**more: object) -> dict[str, object]:
    return {
        "model_type": "llama",
        "hidden_size": 60,
        "intermediate_size": 85,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 14,
        "rms_norm_eps": 1e-4,
        "rope_theta": 500.0,
        "max_position_embeddings": 256,
        "vocab_size": VOCAB,
        **more,
    }


def torch_tensors(head: HeadCheckpoint, layer: str) -> dict[str, torch.Tensor]:
    named = {name: torch.from_numpy(tensor.float32()) for name, tensor in head.tensors.items()}
    named = {name.replace("midlayer.", layer): tensor for name, tensor in named.items()}
    if head.draft_ids is not None:
        ids = torch.from_numpy(head.draft_ids.astype(np.int64))
        named["d2t"] = ids - torch.arange(len(ids))
        named["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return named


def test_a_head_as_safeailab_publishes_it(tmp_path):
    head = random_checkpoint(EAGLE3)
    torch.save(torch_tensors(head, "midlayer."), tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(llama_config(draft_vocab_size=91)))
    assert_equal(head, load_head(tmp_path))


def test_an_eagle_1_head_with_a_copy_of_the_targets_head(tmp_path):
    head = random_checkpoint(EAGLE)
    tensors = torch_tensors(head, "layers.0.") | {"lm_head.weight": torch.zeros(VOCAB, 60)}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(llama_config()))
    assert_equal(head, load_head(tmp_path))


def test_an_eagle_1_head_as_speculators_publishes_it(tmp_path):
    head = random_checkpoint(EAGLE)
    tensors = torch_tensors(head, "transformer.")
    tensors["fusion_fc.weight"] = tensors.pop("fc.weight")
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    config = {"speculators_model_type": "eagle", "transformer_layer_config": llama_config()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_equal(head, load_head(tmp_path))


def test_sglang_numbers_layers_and_vllm_hidden_states(tmp_path):
    head = random_checkpoint(replace(EAGLE3, feature_layers=(1, 2, 3)))
    write_head(head, tmp_path, "sglang")
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert values["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    del values["eagle_aux_hidden_state_layer_ids"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert load_head(tmp_path).config.feature_layers == (1, 2, 3)


def test_paceline_export(tmp_path, paceline):
    head = random_checkpoint(replace(EAGLE3, target=TARGET))
    write_head(head, tmp_path / "ours", "sglang")
    out = str(tmp_path / "theirs")
    given = ("export", str(tmp_path / "ours"), out)
    code, printed, _ = paceline(*given, "--format", "speculators", "--target", "their/name")
    folder, command = printed.splitlines()
    assert (code, folder) == (0, out)
    *start, config = shlex.split(command)
    assert start == ["vllm", "serve", "their/name", "--speculative-config"]
    assert json.loads(config) == {"method": "eagle3", "model": out, "num_speculative_tokens": 5}
    assert_equal(head, load_head(tmp_path / "theirs"))
    values = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert values["speculators_config"]["verifier"]["name_or_path"] == "their/name"
    code, _, error = paceline("export", tmp_path / "ours", tmp_path / "new", "--format", "gguf")
    assert code == 2
    assert "Use one of sglang, vllm, speculators." in error


def test_export_overwrites_nothing_unless_forced(tmp_path, paceline):
    write_head(random_checkpoint(EAGLE3), tmp_path / "ours", "sglang")
    given = ("export", tmp_path / "ours", tmp_path / "theirs", "--format")
    assert paceline(*given, "speculators")[0] == 0
    code, _, error = paceline(*given, "vllm")
    assert code == 2
    assert "has a model.safetensors already" in error
    assert "--force" in error
    assert "speculators_config" in (tmp_path / "theirs" / "config.json").read_text()
    code, printed, _ = paceline(*given, "sglang", "--force")
    assert code == 0
    assert "sglang.launch_server --model-path TARGET --speculative-algorithm EAGLE3" in printed
    assert "speculators_config" not in (tmp_path / "theirs" / "config.json").read_text()
    for itself in (tmp_path / "ours", tmp_path / "ours" / "model.safetensors"):
        code, _, error = paceline("export", itself, tmp_path / "ours", "--format", "vllm", "--force")
        assert code == 2
        assert "where the head itself is" in error


@pytest.mark.parametrize(("quantization", "error"), [("int4", 0.1), ("int8", 0.01)])
def test_a_head_of_few_bits_is_a_little_rounded_and_becomes_one_of_16_bits_again(
    tmp_path, quantization, error
):
    sizes = {"hidden_size": 64, "target_hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    config = replace(EAGLE3, **sizes)
    head = random_checkpoint(config)
    write_head(head, tmp_path / "few", "sglang", quantization=quantization)
    few = load_head(tmp_path / "few")
    assert few.config == head.config
    matrices = [name for name, tensor in head.tensors.items() if can_pack(tensor.shape)]
    assert len(matrices) > 6
    for name, tensor in head.tensors.items():
        exact, rounded = tensor.float32(), few.tensors[name].float32()
        off = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
        assert 0 < off < error if name in matrices else off == 0
    write_head(few, tmp_path / "wide", "speculators")
    wide = load_head(tmp_path / "wide")
    assert {tensor.kind for tensor in wide.tensors.values()} <= {"F16", "F32"}
    for name in matrices:
        assert np.allclose(wide.tensors[name].float32(), few.tensors[name].float32(), rtol=1e-3)


def test_an_unknown_quantization_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="'int3' is no quantization of heads"):
        write_head(random_checkpoint(EAGLE3), tmp_path, "sglang", quantization="int3")


def test_training_rounds_weights_as_files_do():
    matrix = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    parts = {f"x.{name}": tensor for name, tensor in pack(matrix, 4).items()}
    stored = dequantized(parts, Quantization("compressed-tensors", ""))["x.weight"].float32()
    assert np.array_equal(rounded(torch.from_numpy(matrix)).numpy(), stored)


@pytest.mark.parametrize("name", ["shipped", "eagle3:shipped"])
def test_the_shipped_head_has_a_name(tmp_path, paceline, name):
    code, printed, _ = paceline("export", name, tmp_path / "out", "--format", "vllm", "--target", "a/b")
    assert code == 0
    assert "vllm serve a/b" in printed
    folder = SHIPPED / "eagle3" / DEFAULT_TARGET
    assert resolve_head(name) == folder
    shipped, written = load_head(folder).tensors, load_head(tmp_path / "out").tensors  # in 4 and in 16 bits
    assert shipped.keys() == written.keys()
    for part, tensor in shipped.items():
        assert np.allclose(tensor.float32(), written[part].float32(), rtol=1e-3), part


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("eagle3", "no draft head 'eagle3'.*'shipped', which names the head that comes with paceline"),
        ("medusa:shipped", "a head of the method medusa: give one of eagle3"),
        ("x" * 5000, "no draft head 'xxx"),
    ],
)
def test_a_head_that_is_not_there_is_named(name, message):
    with pytest.raises(CheckpointError, match=message):
        resolve_head(name)
    with pytest.raises(
        CheckpointError, match=r"no eagle3 head is shipped for this target, only for .*smollm2-135m"
    ):
        resolve_head("shipped", fingerprint="another")


def test_a_missing_norm_before_residual_is_read_as_vllm_reads_it(tmp_path):
    for form, expected in (("sglang", False), ("speculators", True)):
        write_head(random_checkpoint(EAGLE3), tmp_path / form, form)
        path = tmp_path / form / "config.json"
        values = json.loads(path.read_text())
        values.pop("norm_before_residual", None)
        path.write_text(json.dumps(values))
        assert load_head(tmp_path / form).config.norm_before_residual is expected


def edited(tmp_path, **more: object):
    write_head(random_checkpoint(EAGLE3), tmp_path, "sglang")
    values = json.loads((tmp_path / "config.json").read_text()) | more
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"num_hidden_layers": 2}, CheckpointError, "lacks the tensor layers.1.self_attn"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "gelu"),
        ({"hidden_size": 61}, CheckpointError, "asks for floats of shape"),
        ({"fc_norm": True}, CheckpointError, r"lacks the tensor fc_norm.0.weight"),
        ({"fc_norm": True, "norm_before_fc": True}, CheckpointError, "norm_before_fc"),
        ({"vocab_size": 80}, CheckpointError, "outside 0..79"),
        ({"eagle_aux_hidden_state_layer_ids": "all"}, CheckpointError, "a list of layer numbers"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path, more, error, message):
    with pytest.raises(error, match=message):
        load_head(edited(tmp_path, **more))


def test_a_folder_without_a_head_or_with_other_tensors_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no draft head"):
        load_head(tmp_path)
    head = random_checkpoint(EAGLE3)
    write_head(replace(head, tensors={**head.tensors, "more.weight": encode(np.ones(3))}), tmp_path, "sglang")
    with pytest.raises(CheckpointError, match=r"more\.weight"):
        load_head(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="no file of tensors"):
        load_head(tmp_path / "pytorch_model.bin")


def test_code_in_a_pickle_is_never_run(tmp_path):
    class Harm:
        def __reduce__(self):
            return (open, (str(tmp_path / "harm"), "w"))

    torch.save({"fc.weight": Harm()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError):
        load_head(tmp_path)
    assert not (tmp_path / "harm").exists()


def test_a_head_is_refused_by_another_target(tmp_path):
    target = safetensors_checkpoint(save_checkpoint("llama", tmp_path))
    fingerprint = target_fingerprint(target)
    config = replace(EAGLE3, target=TargetName(fingerprint, "me"), feature_layers=(1, 2, 3))
    check_target(config, target.config, fingerprint, "head")
    check_target(replace(config, target=None), target.config, fingerprint, "head")
    check_target(replace(config, target=TARGET), target.config, "", "head")
    check_target(replace(config, target=TARGET), target.config, fingerprint, "head", any_target=True)
    for wrong, reason in (
        ({"target": TARGET}, r"trained for another target, some/target \(0123456789abcdef; this one is "),
        ({"vocab_size": 999}, "999 tokens"),
        ({"target_hidden_size": 64}, "hidden size 64"),
        ({"feature_layers": (2, 3, 4)}, r"only 0 to 3"),
        ({"hidden_size": 44}, "no embedding of its own"),
    ):
        with pytest.raises(ConfigError, match=reason):
            check_target(replace(config, **wrong), target.config, fingerprint, "head")


def test_a_fingerprint_is_that_of_the_weights_and_not_of_their_rounding(tmp_path):
    checkpoint = safetensors_checkpoint(save_checkpoint("llama", tmp_path))
    fingerprint = target_fingerprint(checkpoint)
    rounded = {
        name: encode(tensor.float32(), "BF16" if "norm" in name else "F16")
        for name, tensor in checkpoint.tensors.items()
    }
    assert target_fingerprint(replace(checkpoint, tensors=rounded)) == fingerprint
    name = "model.layers.1.input_layernorm.weight"
    trained = rounded | {name: encode(checkpoint.tensors[name].float32() * 1.01)}
    assert target_fingerprint(replace(checkpoint, tensors=trained)) != fingerprint


@pytest.mark.parametrize("name", ["mask_token_id", "pard_token", "ptd_token_id"])
def test_the_mask_token_of_a_p_eagle_head_has_several_names(tmp_path, name):
    write_head(random_checkpoint(P_EAGLE), tmp_path, "vllm")
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["num_hidden_layers"] == 3
    values[name] = values.pop("mask_token_id")
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert load_head(tmp_path).config == P_EAGLE
    (tmp_path / "config.json").write_text(json.dumps({**values, name: VOCAB}))
    with pytest.raises(CheckpointError, match=f"{name} .* a token below {VOCAB}"):
        load_head(tmp_path)


@pytest.mark.parametrize("layers", [(1, 4, 4), (3, 1)])
def test_only_features_that_other_engines_read_in_this_order_are_exported(tmp_path, layers):
    for folder, chosen in (("wrong", layers), ("right", (1, 4))):
        write_head(random_checkpoint(replace(EAGLE3, feature_layers=chosen)), tmp_path / folder, "vllm")
    export_head(str(tmp_path / "right"), tmp_path / "out", "vllm")
    with pytest.raises(ConfigError, match=f"reads the hidden states {', '.join(map(str, layers))}"):
        export_head(str(tmp_path / "wrong"), tmp_path / "none", "vllm")


def test_p_eagle_of_speculators(tmp_path):
    write_head(random_checkpoint(P_EAGLE), tmp_path, "speculators")
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["speculators_model_type"] == values["speculators_config"]["algorithm"] == "peagle"
    assert load_head(tmp_path).config == P_EAGLE
    del values["norm_before_residual"]  # false there, unlike that of eagle3
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert load_head(tmp_path).config == P_EAGLE


def test_vllm_is_told_that_a_head_drafts_in_one_pass(tmp_path, paceline):
    write_head(random_checkpoint(P_EAGLE), tmp_path / "ours", "vllm")
    given = ("--format", "vllm", "--target", "a/b")
    _, printed, _ = paceline("export", tmp_path / "ours", tmp_path / "theirs", *given)
    config = json.loads(shlex.split(printed.splitlines()[1])[-1])
    assert (config["method"], config["parallel_drafting"]) == ("eagle3", True)


def test_a_head_with_all_tokens_has_no_list_of_them(tmp_path):
    head = random_checkpoint(replace(EAGLE3, draft_vocab_size=VOCAB))
    ids = np.arange(VOCAB, dtype=np.int32)
    write_head(replace(head, draft_ids=ids), tmp_path, "vllm")
    assert load_head(tmp_path).draft_ids is None
    write_head(replace(head, draft_ids=ids[::-1]), tmp_path, "vllm")  # its rows are of other tokens
    assert np.array_equal(load_head(tmp_path).draft_ids, ids[::-1])
