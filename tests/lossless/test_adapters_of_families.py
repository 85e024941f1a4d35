"""LoRA adapters of latent attention and of experts: the logits of merged files, the same bytes anywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.backends.base import Backend
from paceline.backends.cpu import CpuBackend
from paceline.backends.torch.backend import TorchBackend
from paceline.build import LoadedModel
from paceline.models.checkpoint import Checkpoint
from paceline.models.lora import Adapter, load_adapter
from paceline.models.registry import load_checkpoint, load_with_tokenizer
from tests.backends.driver import drive
from tests.draft.model.test_draft_model_cpu import save_tokenizer
from tests.lossless.adapter_engines import PROMPT, TREE, answers, make_engine
from tests.lossless.adapter_files import ALPHA, RANK, save_adapter, save_adapter_and_merged
from tests.tiny import save_checkpoint

ATTENTION = r"self_attn\.\w+_(proj|with_mqa)\.weight$"
MLPS = r"(mlp|experts\.\d+|shared_experts?)\.(gate|up|down|gate_up)_proj\.weight$"
CASES = [
    ("deepseek-v2", ATTENTION),
    ("deepseek-v3", ATTENTION),
    ("youtu", ATTENTION),
    ("mistral4", ATTENTION),
    ("deepseek-v3", MLPS),
    ("qwen3-moe", MLPS),
    ("qwen2-moe", MLPS),
    ("mixtral", r"experts\.\d+\.w[123]\.weight$"),
    ("gpt-oss", r"mlp\.experts\.(gate_up|down)_proj$"),
    ("glm4", ATTENTION + "|" + MLPS),
    ("cohere2", ATTENTION),
    ("afmoe", ATTENTION + "|" + MLPS),
    ("llama4", ATTENTION),
    ("gemma4", ATTENTION + "|" + MLPS),
    ("gemma4-moe", ATTENTION),
    ("arcee", MLPS),
    ("cohere", ATTENTION + "|" + MLPS),
    ("helium", ATTENTION),
    ("ernie4-5-moe", ATTENTION + "|" + MLPS),
    ("glm4-moe-lite", ATTENTION + "|" + MLPS),
    ("hy-v3", ATTENTION + "|" + MLPS),
]


def backend_of(name: str, checkpoint: Checkpoint, adapters: list[Adapter]) -> Backend:
    if name == "torch":
        return TorchBackend.load(checkpoint, row_by_row=True, adapters=adapters)
    return CpuBackend.load(checkpoint, quantization="none", threads=2, max_rows=64, adapters=adapters)


@pytest.mark.parametrize(("family", "wanted"), CASES, ids=lambda value: value[:12])
def test_an_adapter_gives_the_logits_of_the_merged_file(family: str, wanted: str, tmp_path: Path) -> None:
    model = save_checkpoint(family, tmp_path / "model")
    made = save_adapter_and_merged(model, tmp_path / "made", wanted)
    checkpoint = load_checkpoint(model)
    adapter = load_adapter("x", made / "adapter", checkpoint.config)
    plain = drive(TorchBackend.load(checkpoint), pages_each=3)[0].run(PROMPT)
    expected = drive(TorchBackend.load(load_checkpoint(made / "merged")), pages_each=3)[0].run(PROMPT)
    for name in ("torch", "cpu"):
        request = drive(backend_of(name, checkpoint, [adapter]), pages_each=3)[0]
        request.adapter = "x"
        logits = request.run(PROMPT)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3, err_msg=name)
        assert np.abs(logits - plain).max() > 0.1


def made_engine(name: str, family: str, root: Path) -> tuple[LoadedModel, Path]:
    """A model of the family with two adapters, of attention and of MLPs with all experts."""
    folder = save_checkpoint(family, root / "model")
    save_tokenizer(folder)
    checkpoint, tokenizer = load_with_tokenizer(folder)
    adapters = []
    for adapter, wanted in (("a", ATTENTION), ("b", MLPS)):
        made = save_adapter_and_merged(folder, root / adapter, wanted)
        adapters.append(load_adapter(adapter, made / "adapter", checkpoint.config))
    return LoadedModel(backend_of(name, checkpoint, adapters), tokenizer, checkpoint.config), folder


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("family", ["deepseek-v3", "qwen2-moe"])
def test_alone_together_and_drafted_the_bytes_are_the_same(family: str, backend: str, tmp_path: Path) -> None:
    model, folder = made_engine(backend, family, tmp_path)
    names = ["", "a", "b"]
    for method, temperature in (("suffix", 0.8), (TREE, 0.0)):
        alone = [answers(make_engine(model, folder, "off"), [name], temperature)[0] for name in names]
        assert len(set(alone)) == 3
        assert answers(make_engine(model, folder, method), names, temperature) == alone * 2


@pytest.mark.parametrize("is_swapped", [False, True])
def test_experts_in_one_parameter_are_read_in_the_order_of_either_version_of_peft(
    is_swapped: bool, tmp_path: Path
) -> None:
    """Parameters [experts, out, in], as transformers 5 has them of most mixtures; each has its own alpha."""
    folder = save_checkpoint("qwen3-moe", tmp_path / "model")
    config = load_checkpoint(folder).config
    assert config.moe is not None
    hidden, inner, experts = config.hidden_size, config.moe.intermediate_size, config.moe.num_experts
    values, sides, changes = np.random.default_rng(4), {}, {}
    layers = sorted(config.moe.layers)
    for layer in layers:
        for below, part, out, inputs in (
            ("", "gate_up", 2 * inner, hidden),
            (".base_layer", "down", hidden, inner),
        ):
            ups, downs = (values.standard_normal((experts, *own)) for own in ((out, RANK), (RANK, inputs)))
            changes[layer, part] = (2 * ALPHA if part == "down" else ALPHA) / RANK * ups @ downs
            a, b = (downs, ups) if is_swapped else (ups.swapaxes(1, 2), downs.swapaxes(1, 2))
            place = f"base_model.model.model.layers.{layer}.mlp.experts{below}.lora_"
            sides[f"{place}A.weight"] = torch.tensor(a.reshape(experts * RANK, -1)).float().contiguous()
            stored = b.transpose(1, 2, 0).reshape(b.shape[1], -1)
            sides[f"{place}B.weight"] = torch.tensor(stored).float().contiguous()
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    # peft finds the alpha by the parameter's name, which the tensors' names lack
    options = {"target_parameters": parameters, "alpha_pattern": {"experts.down_proj": 2 * ALPHA}}
    adapter = load_adapter("x", save_adapter(tmp_path / "x", sides, **options), config)
    assert len(adapter.matrices) == len(layers) * experts * 3
    for (layer, part), change in changes.items():
        for expert in range(experts):
            names = ["gate", "up"] if part == "gate_up" else ["down"]
            found = [
                adapter.matrices[f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj"] for name in names
            ]
            whole = np.concatenate([own.up @ own.down for own in found])
            np.testing.assert_allclose(whole, change[expert], rtol=0, atol=1e-3)
