"""`paceline models`: thin commands over the registry."""

from __future__ import annotations

import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.numpy
from typer.testing import CliRunner

from paceline.errors import CheckpointError, ModelError, UnsupportedModelError
from paceline.models import needs
from paceline.terminal import models as commands
from tests import tiny
from tests.models.heads.gguf_head_files import convert_head
from tests.models.heads.test_gguf_heads import DSPARK, EAGLE3_HEADS, saved
from tests.models.model_files import config_of, random_tensors, write_gguf


def run(*arguments: str) -> str:
    result = CliRunner().invoke(commands.app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_list_reports_what_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    rows = json.loads(run("list", "--json"))
    assert [(row["alias"], row["fetched"]) for row in rows if "hub" not in row] == [
        ("smollm2-135m", False),
        ("qwen2.5-coder-1.5b", False),
    ]
    assert {"alias": "qwen3:4b", "model": "Qwen/Qwen3-4B-GGUF", "hub": True} in rows
    assert "smollm2-135m (default)" in run("list")


def test_list_cuts_no_name_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "…" not in run("list")


def test_pull_prints_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "pull", lambda name: Path("models") / name)
    assert run("pull") == "models/smollm2-135m\n"
    assert run("pull", "qwen2.5-coder-1.5b") == "models/qwen2.5-coder-1.5b\n"
    monkeypatch.setattr(commands, "resolve", lambda name: Path("hub") / name)
    assert run("pull", "qwen3:4b") == "hub/qwen3:4b\n"


def test_show_reports_config_tensors_and_tokenizer(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "mixtral", random_tensors(config_of("mixtral")), kind="Q8_0")
    facts = json.loads(run("show", str(path), "--json"))
    assert facts["config"]["moe"]["layers"] == [0, 1]
    assert facts["tensors"]["total"]["tensors"] == len(random_tensors(config_of("mixtral")))
    assert set(facts["tensors"]) == {"F32", "Q8_0", "total", "parameters"}
    assert facts["tokenizer"] == {"vocab_size": 80, "bos_id": 0, "eos_ids": [0, 1], "chat_template": True}
    kept = {(own["backend"], own["quantization"]): own for own in facts["runs"]}
    assert {backend for backend, _ in kept} == {"cpu", "torch", "cuda"}
    assert not any(own["refused"] for own in facts["runs"])
    assert kept["cpu", "int4"]["total_bytes"] < kept["cpu", "native"]["total_bytes"]  # Q8_0 stays int8
    assert facts["drafters"]["suffix"] == "yes"
    more = json.loads(run("show", str(path), "--json", "--max-num-seqs", "3"))
    assert more["runs"][0]["cache_bytes"] == 3 * facts["runs"][0]["cache_bytes"]
    text = run("show", str(path))
    assert "Q8_0" in text
    assert "theta" in text
    for label in ("layers", "KV heads", "context length", "tied embeddings", "EOS tokens", "[0, 1]"):
        assert label in text
    of_model = re.sub("drafters.*?└", "", text.split("\n", 1)[1], flags=re.DOTALL)  # named as flags take them
    assert not re.findall("[a-z]+_[a-z_]+", of_model)
    assert "low_freq_factor" not in text  # as it is by default: it says nothing of this model
    assert "window" not in text


def test_show_has_records_within_a_field_in_words(tmp_path: Path) -> None:
    text = run("show", str(tiny.save_checkpoint("gemma3", tmp_path)))
    assert "[default, theta 1,000,000, default]" in text  # RoPE of each layer
    assert "[9, none, 9]" in text  # sliding windows
    assert "RopeConfig" not in text


def test_show_says_why_a_backend_refuses_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = "attention beside a recurrence"
    monkeypatch.setitem(needs.BACKEND_BLOCKS, "cuda", needs.KNOWN_BLOCKS - {block})
    folder = tiny.save_checkpoint("falcon-h1", tmp_path)
    text = run("show", str(folder / "model.safetensors"))  # any of its files names a model
    assert f"cuda refuses this falcon_h1 model: it has no kernels for {block}." in text
    assert "cpu refuses" not in text


def test_show_counts_of_layers_with_a_window_what_is_kept(tmp_path: Path) -> None:
    """Two of three layers: of a long context, what 2 requests' windows and the chunks in flight take."""
    folder = tiny.save_checkpoint("gemma3", tmp_path)

    def cached(context: int) -> dict[str, int]:
        shown = run("show", str(folder), "--json", "--max-model-len", str(context), "--max-num-seqs", "2")
        facts = json.loads(shown)
        of_layer = facts["cache"]["kv_values_per_token"] // 3
        assert facts["cache"]["window_values_per_token"] == 2 * of_layer
        assert facts["cache"]["window_group"] == 9
        return {run["backend"]: run["cache_bytes"] // of_layer for run in facts["runs"]}

    sizes = {"cpu": 2, "torch": 4, "cuda": 2}  # of a value, with the last of each backend's quantizations
    short, long, longer = cached(100), cached(100_000), cached(100_016)
    for backend, size in sizes.items():
        assert short[backend] == 2 * 100 * 3 * size
        rows = 2048 if backend == "cuda" else 512
        windows = 1 + 2 * (1 + 9) + 2 * (rows // 16 + 1)  # pages
        assert long[backend] == (2 * 100_000 + 2 * 16 * windows) * size
        assert longer[backend] - long[backend] == 2 * 16 * size  # of the layer without a window


def test_show_says_what_would_run_a_hybrid(tmp_path: Path) -> None:
    folder = tiny.save_checkpoint("lfm2", tmp_path)
    (folder / "tokenizer.json").unlink(missing_ok=True)
    facts = json.loads(run("show", str(folder), "--json"))
    assert facts["cache"]["state_bytes_per_request"] > 0
    assert facts["drafters"]["layerskip"].startswith("refused: recurrent layers")
    assert "tokenizer.json" in facts["tokenizer"]["refused"]


def test_show_says_which_blocks_for_multi_token_prediction_draft(tmp_path: Path) -> None:
    for name, begin in (("hy-v3", "refused: the block of hy_v3"), ("glm4-moe-lite", "yes")):
        folder = tiny.save_checkpoint(name, tmp_path / name)
        tensors = safetensors.numpy.load_file(folder / "model.safetensors")
        tensors["model.layers.3.enorm.weight"] = np.ones(60, dtype=np.float32)
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        assert json.loads(run("show", str(folder), "--json"))["drafters"]["mtp"].startswith(begin)


@pytest.mark.parametrize(
    ("values", "method"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["DFlashDraftModel"], "block_size": 8}, "dflash"),
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({"medusa_num_heads": 4}, "medusa"),
    ],
)
def test_a_draft_head_is_called_one(tmp_path: Path, values: dict[str, object], method: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | values))
    with pytest.raises(CheckpointError, match=f"is a draft head, not a model. .* --draft {method}:"):
        run("show", str(tmp_path))


@pytest.mark.parametrize(
    ("architecture", "kind", "words"),
    [
        ("llama", "adapter", "is a LoRA adapter, not a model. .* --lora-modules"),
        ("clip", "mmproj", "is the vision or audio part of a model"),
        ("clip", "model", "is the vision or audio part of a model"),
        ("llama", "imatrix", "is an importance matrix"),
    ],
)
def test_a_gguf_file_without_a_model_is_called_what_it_is(
    tmp_path: Path, architecture: str, kind: str, words: str
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "own.gguf", architecture)
    writer.add_type(kind)
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.zeros((8, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=words):
        run("show", str(tmp_path / "own.gguf"))


def test_show_says_what_drafts_with_the_head_of_a_gguf_file(tmp_path: Path) -> None:
    for config, method in ((EAGLE3_HEADS["eagle3"], "eagle3"), (DSPARK, "dspark")):
        path = convert_head(saved(tmp_path / method, config))
        facts = json.loads(run("show", str(path), "--json"))
        assert facts["draft_head"] == facts["config"]["kind"] == method
        assert facts["tensors"]["F32"]["tensors"] > 10
        text = run("show", str(path))
        assert "feature layers" in text
        assert f"--draft {method}:{path}" in text.replace("\n", "")


def test_a_users_mistake_reaches_the_command_line_as_our_error() -> None:
    with pytest.raises(ModelError, match="Did you mean"):
        run("pull", "smollm2")
