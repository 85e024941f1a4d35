"""LoRA adapters of models with recurrent layers: the logits of merged files, the same bytes anywhere."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from paceline.backends.torch.backend import TorchBackend
from paceline.build import LoadedModel
from paceline.core.request import Request
from paceline.errors import ModelError
from paceline.models.heads.checkpoint import write_head
from paceline.models.lora import load_adapter
from paceline.models.registry import load_checkpoint, load_with_tokenizer
from paceline.models.transformer.recurrent import States, StateView
from tests.backends.driver import drive
from tests.draft.model.test_draft_model_cpu import save_tokenizer
from tests.large import repeated
from tests.lossless.adapter_engines import PROMPT, TREE, make_engine, outcomes_of, requests_with_cached_pages
from tests.lossless.adapter_files import save_adapter_and_merged
from tests.lossless.test_adapters_of_families import backend_of
from tests.models.gguf_support import gguf_pairs
from tests.models.heads.driver import random_checkpoint
from tests.models.heads.tiny_heads import EAGLE3
from tests.planted import Plant
from tests.tiny import save_checkpoint

# products of recurrent layers, and those of all layers, as files name them
RECURRENT = r"(linear_attn|mamba|mixer|conv)\.(in_proj\w*|out_proj)\.weight$"
ALL_LINEAR = RECURRENT + (
    r"|(self_attn|mixer)\.([qkvo]|out)_proj\.weight$"
    r"|(mlp|experts\.\d+|shared_experts?|feed_forward|mixer)\.((gate|up|down)_proj|w[123])\.weight$"
    r"|shared_mlp\.(input|output)_linear\.weight$"
)
CASES = [
    ("lfm2", RECURRENT),
    ("lfm2", ALL_LINEAR),
    ("lfm2-moe", ALL_LINEAR),
    ("qwen3-5", RECURRENT),
    ("qwen3-5-moe", ALL_LINEAR),
    ("qwen3-next", RECURRENT),
    ("qwen3-next", ALL_LINEAR),
    ("granite-hybrid", RECURRENT),
    ("granite-hybrid-dense", ALL_LINEAR),
    ("nemotron-h", RECURRENT),
    ("nemotron-h", ALL_LINEAR),
    ("falcon-h1", RECURRENT),
    ("falcon-h1", ALL_LINEAR),
    ("falcon-h1-without-norm", RECURRENT),
]
IDS = [f"{family}-{'recurrent' if wanted is RECURRENT else 'all-linear'}" for family, wanted in CASES]
ENGINES = ["lfm2", "qwen3-next", "falcon-h1"]
NAMES = ["", "a", "b"]


def expected_logits(folder: Path) -> np.ndarray:
    """transformers' logits of PROMPT [tokens, vocab]."""
    from transformers import AutoModelForCausalLM

    options = {"dtype": torch.float32, "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    with torch.inference_mode():
        found: np.ndarray = model(torch.tensor([PROMPT])).logits[0].numpy()
    return found


@pytest.mark.parametrize(("family", "wanted"), CASES, ids=IDS)
def test_logits_and_greedy_tokens_are_those_of_transformers_for_the_merged_file(
    family: str, wanted: str, tmp_path: Path
) -> None:
    model = save_checkpoint(family, tmp_path / "model")
    made = save_adapter_and_merged(model, tmp_path / "made", wanted)
    checkpoint = load_checkpoint(model)
    adapter = load_adapter("x", made / "adapter", checkpoint.config)
    merged = drive(TorchBackend.load(load_checkpoint(made / "merged")), pages_each=3)[0].run(PROMPT)
    expected = expected_logits(made / "merged")
    # transformers scans in chunks: of nemotron-h, its logits are up to 4e-4 from ours without adapters
    distance = np.abs(merged - expected).max()
    assert distance < 1e-3
    plain = drive(TorchBackend.load(checkpoint), pages_each=3)[0].run(PROMPT)
    for name in ("torch", "cpu"):
        backend = backend_of(name, checkpoint, [adapter])
        request = drive(backend, pages_each=3)[0]
        request.adapter = "x"
        logits = request.run(PROMPT)
        np.testing.assert_allclose(logits, merged, rtol=0, atol=1e-4, err_msg=name)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 + distance, err_msg=name)
        assert (logits.argmax(axis=1) == expected.argmax(axis=1)).all()
        assert np.abs(logits - plain).max() > 1


def made_engine(name: str, family: str, root: Path) -> tuple[LoadedModel, Path]:
    """A model of the family with two adapters, of recurrent layers and of all matrices."""
    folder = save_checkpoint(family, root / "model")
    save_tokenizer(folder)
    checkpoint, tokenizer = load_with_tokenizer(folder)
    adapters = []
    for adapter, wanted in (("a", RECURRENT), ("b", ALL_LINEAR)):
        made = save_adapter_and_merged(folder, root / adapter, wanted, scale=0.1)
        adapters.append(load_adapter(adapter, made / "adapter", checkpoint.config))
    write_head(random_checkpoint(EAGLE3), folder / "head", "sglang")
    norm = checkpoint.tensors["model.norm.weight"].float32()
    backend = backend_of(name, checkpoint, adapters)
    return LoadedModel(backend, tokenizer, checkpoint.config, final_norm=norm), folder


@pytest.mark.parametrize(
    "subject",
    [
        ("torch", "qwen3-next"),
        *(("cpu", family) for family in ENGINES),
        *repeated(*(("torch", family) for family in ENGINES if family != "qwen3-next")),
    ],
    ids="-".join,
)
def test_alone_together_and_drafted_the_bytes_are_the_same(subject: tuple[str, str], tmp_path: Path) -> None:
    """Also in chunks of a prompt, and with prefixes found again, whose states are those of the adapter."""
    model, folder = made_engine(*subject, tmp_path)
    head = {"method": "eagle3", "model": str(folder / "head"), "num_speculative_tokens": 6, "branching": 2}
    for temperature, methods in ((0.8, ("suffix", head)), (0.0, (TREE,))):
        plain = [make_engine(model, folder, "off") for _ in NAMES]
        alone = [
            outcomes_of(engine, [name], temperature)[0].bytes()
            for engine, name in zip(plain, NAMES, strict=True)
        ]
        assert alone[0] != alone[1] != alone[2] != alone[0]
        for method in methods:
            drafted = outcomes_of(make_engine(model, folder, method, rows=12), NAMES, temperature)
            assert [outcome.bytes() for outcome in drafted] == alone * 2
            assert sum(outcome.count("num_draft_tokens") for outcome in drafted) > 0
            assert not any(child.failed_drafters for outcome in drafted for child in outcome.children)
    found = requests_with_cached_pages(make_engine(model, folder, "off"))
    assert found == [False, False, True, False, False]


def test_states_that_advance_along_rows_of_another_adapter_would_be_noticed(
    plant: Plant, tmp_path: Path
) -> None:
    """A pass of torch runs adapters one by one: without this, each request has rows of the first part."""

    def add_views(self: States, views: dict[int, StateView], num_rows: int) -> None:
        self.views |= views

    model, folder = made_engine("torch", "qwen3-5", tmp_path)

    def requests() -> list[Request]:
        outcomes = outcomes_of(make_engine(model, folder, "off"), NAMES, 0.0)
        return [child for outcome in outcomes for child in outcome.children]

    right = [request.output_token_ids for request in requests()]
    plant(States, "add_views", add_views)
    found = requests()
    plant.assert_noticed(found, [request.output_token_ids for request in found], right)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "granitemoehybrid", "nemotron_h"])
def test_adapters_have_the_order_of_safetensors_for_gguf_files_too(
    family: str, backend: str, tmp_path: Path
) -> None:
    """In files of qwen3.5 the value heads that share a key head are no neighbours."""
    for number, (file, model) in enumerate(gguf_pairs(family)):
        made = save_adapter_and_merged(model.source, tmp_path / str(number), ALL_LINEAR)
        adapted = backend_of(backend, file, [load_adapter("x", made / "adapter", file.config)])
        request = drive(adapted, pages_each=3)[0]
        request.adapter = "x"
        expected = drive(TorchBackend.load(load_checkpoint(made / "merged")), pages_each=3)[0].run(PROMPT)
        np.testing.assert_allclose(request.run(PROMPT), expected, rtol=0, atol=1e-4)


def test_for_gguf_files_with_factors_in_their_weights_they_are_refused(tmp_path: Path) -> None:
    file, model = gguf_pairs("falcon_h1")[0]
    made = save_adapter_and_merged(model.source, tmp_path / "made", RECURRENT)
    with pytest.raises(ModelError, match=r"GGUF file of falcon_h1 .* Serve the safetensors"):
        load_adapter("x", made / "adapter", file.config)


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("qwen3-5", "linear_attn.conv1d"),
        ("qwen3-5", "linear_attn.norm"),
        ("falcon-h1", "mamba.conv1d"),
        ("falcon-h1", "mamba"),  # A_log, D or dt_bias, which peft calls by the module that has them
        ("lfm2", "conv.conv"),
        ("nemotron-h", "mixer.conv1d"),
    ],
)
def test_what_is_no_product_is_refused_by_name(family: str, module: str, tmp_path: Path) -> None:
    folder = save_checkpoint(family, tmp_path / "model")
    made = save_adapter_and_merged(folder, tmp_path / "made", RECURRENT)
    file = made / "adapter" / "adapter_model.safetensors"
    name = f"base_model.model.model.layers.0.{module}.lora_A.weight"
    safetensors.torch.save_file(safetensors.torch.load_file(file) | {name: torch.zeros(3, 5)}, file)
    refused = rf"{re.escape(name)} is not supported; .* neither convolutions, decay rates nor norms.* merge"
    with pytest.raises(ModelError, match=refused):
        load_adapter("x", made / "adapter", load_checkpoint(folder).config)


def test_nemotron_h_under_the_names_of_either_version_of_transformers(tmp_path: Path) -> None:
    """Version 4 calls the decoder `backbone`, version 5 `model`."""
    folder = save_checkpoint("nemotron-h", tmp_path / "model")
    config = load_checkpoint(folder).config
    made = save_adapter_and_merged(folder, tmp_path / "made", ALL_LINEAR)
    file = made / "adapter" / "adapter_model.safetensors"
    tensors, found = safetensors.torch.load_file(file), []
    for decoder in ("backbone", "model"):
        renamed = {
            re.sub(r"^base_model\.model\.(backbone|model)\.", f"base_model.model.{decoder}.", name): tensor
            for name, tensor in tensors.items()
        }
        safetensors.torch.save_file(renamed, file)
        found.append(set(load_adapter("x", file.parent, config).matrices))
    assert found[0] == found[1]
    assert "model.layers.0.mamba.in_proj" in found[0]
