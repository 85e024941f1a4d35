"""LoRA adapters: what merged weights would give, the same bytes alone, together and drafted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.torch
import torch

from paceline.backends.base import Backend
from paceline.backends.cpu import CpuBackend
from paceline.backends.torch.backend import TorchBackend
from paceline.build import LoadedModel
from paceline.config import EngineConfig
from paceline.core.params import SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.frontend.async_engine import AsyncEngine
from paceline.engine.frontend.client import EngineClient
from paceline.errors import ConfigError, ModelError, RequestError
from paceline.models.checkpoint import Checkpoint
from paceline.models.files.safetensors_writer import encode
from paceline.models.lora import Adapter, load_adapter
from paceline.models.registry import load_checkpoint, load_with_tokenizer
from paceline.serve.http.app import make_app
from paceline.serve.loading import with_adapters
from paceline.serve.service import Service
from tests.backends.driver import drive
from tests.draft.model.test_draft_model_cpu import save_tokenizer
from tests.large import repeated
from tests.lossless.adapter_engines import PROMPT, TREE, answers, make_engine, requests_with_cached_pages
from tests.lossless.adapter_files import ALPHA, RANK, save_adapter
from tests.scale.fake import Fleet
from tests.tiny import save_checkpoint

MODULES = {
    "a": ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"),
    "b": ("self_attn.o_proj", "mlp.up_proj"),
}


def write_adapter(folder: Path, checkpoint: Checkpoint, modules: Sequence[str], **options: Any) -> Path:
    """A folder as peft saves it, with random matrices for these modules of every layer."""
    generator, tensors = torch.Generator().manual_seed(len(modules)), {}
    for layer in range(checkpoint.config.num_layers):
        for module in modules:
            name = f"model.layers.{layer}.{module}"
            out, inputs = checkpoint.tensors[f"{name}.weight"].shape
            rank = options.get("rank_pattern", {}).get(module, RANK)
            for side, shape in (("A", (rank, inputs)), ("B", (out, rank))):
                values = 0.2 * torch.randn(shape, generator=generator)
                tensors[f"base_model.model.{name}.lora_{side}.weight"] = values
    return save_adapter(folder, tensors, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("llama")
    save_tokenizer(save_checkpoint("llama", root))
    return root


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    return load_with_tokenizer(folder)[0]


@pytest.fixture(scope="module")
def adapters(folder: Path, checkpoint: Checkpoint) -> list[Adapter]:
    folders = {name: write_adapter(folder / name, checkpoint, modules) for name, modules in MODULES.items()}
    return [load_adapter(name, saved, checkpoint.config) for name, saved in folders.items()]


@pytest.fixture(scope="module", params=["torch", "cpu"])
def model(request: pytest.FixtureRequest, folder: Path, adapters: list[Adapter]) -> LoadedModel:
    checkpoint, tokenizer = load_with_tokenizer(folder)
    backend = make_backend(request.param, checkpoint, adapters)
    return LoadedModel(backend, tokenizer, checkpoint.config)


def make_backend(
    name: str, checkpoint: Checkpoint, adapters: list[Adapter], quantization: str = "auto"
) -> Backend:
    """A batch-invariant backend."""
    if name == "torch":
        return TorchBackend.load(checkpoint, row_by_row=True, adapters=adapters)
    options: dict[str, Any] = {"threads": 1, "max_rows": 64, "quantization": quantization}
    return CpuBackend.load(checkpoint, **options, adapters=adapters)


def merged(checkpoint: Checkpoint, adapter: Adapter) -> Checkpoint:
    """The model with the adapter's products added to its matrices."""
    tensors = dict(checkpoint.tensors)
    for module, change in adapter.matrices.items():
        name = f"{module}.weight"
        tensors[name] = encode(tensors[name].float32() + change.up @ change.down)
    return replace(checkpoint, tensors=tensors)


def test_an_adapter_gives_the_logits_of_merged_weights(
    checkpoint: Checkpoint, adapters: list[Adapter]
) -> None:
    adapted = TorchBackend.load(checkpoint, adapters=adapters)
    for adapter in adapters:
        ours = TorchBackend(adapted.adapters[adapter.name], 64)
        logits = [
            drive(backend, pages_each=3)[0].run(PROMPT)
            for backend in (ours, TorchBackend.load(merged(checkpoint, adapter)))
        ]
        np.testing.assert_allclose(*logits, rtol=0, atol=1e-4)
        plain = drive(TorchBackend.load(checkpoint), pages_each=3)[0].run(PROMPT)
        assert np.abs(plain - logits[0]).max() > 0.1


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_patterns_give_modules_a_rank_and_an_alpha_of_their_own(
    backend: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """The first pattern that the end of a module's name matches decides, as in peft."""
    ranks = {"mlp.down_proj": 7, "self_attn.q_proj": 2}
    alphas = {
        "0.self_attn.q_proj": 5.0,
        "q_proj": 9.0,
        "^model.layers.1.mlp.down_proj": 3.0,
        r"layers\.0": 1.0,
    }
    expected = {  # (rank, alpha)
        "model.layers.0.self_attn.q_proj": (2, 5.0),
        "model.layers.1.self_attn.q_proj": (2, 9.0),
        "model.layers.0.self_attn.v_proj": (RANK, ALPHA),
        "model.layers.0.mlp.down_proj": (7, ALPHA),
        "model.layers.1.mlp.down_proj": (7, 3.0),
    }
    options: dict[str, Any] = {"rank_pattern": ranks, "alpha_pattern": alphas}
    folder = write_adapter(tmp_path / "x", checkpoint, MODULES["a"], **options)
    stored = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    adapter = load_adapter("x", folder, checkpoint.config)
    for module, (rank, alpha) in expected.items():
        second = stored[f"base_model.model.{module}.lora_B.weight"].numpy()
        assert adapter.matrices[module].down.shape[0] == rank
        np.testing.assert_allclose(adapter.matrices[module].up, second * (alpha / rank), rtol=1e-6)
    request = drive(make_backend(backend, checkpoint, [adapter], quantization="none"), pages_each=3)[0]
    request.adapter = "x"
    whole = drive(TorchBackend.load(merged(checkpoint, adapter)), pages_each=3)[0].run(PROMPT)
    np.testing.assert_allclose(request.run(PROMPT), whole, rtol=0, atol=5e-4)
    broken = write_adapter(tmp_path / "y", checkpoint, MODULES["a"], alpha_pattern={"q_(proj": 2.0})
    with pytest.raises(ModelError, match=r"alpha_pattern has q_\(proj .* a regular expression"):
        load_adapter("y", broken, checkpoint.config)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe-raw-weights", "glm4-moe", "gpt-oss"])
def test_of_mixtures_the_attention_may_change(family: str, backend: str, tmp_path: Path) -> None:
    """Also if the adapter was trained on the language model of a larger one, and changes that too."""
    checkpoint = load_checkpoint(save_checkpoint(family, tmp_path / "model"))
    attention = [f"self_attn.{part}_proj" for part in "qkvo"]
    folder = write_adapter(tmp_path / "adapter", checkpoint, attention)
    file = folder / "adapter_model.safetensors"
    tensors = {
        name.replace("model.model.layers", "model.model.language_model.layers"): tensor
        for name, tensor in safetensors.torch.load_file(file).items()
    }
    vision = "base_model.model.model.vision_tower.layers.0.fc1.lora_A.weight"
    safetensors.torch.save_file(tensors | {vision: torch.zeros(3, 5)}, file)
    adapter = load_adapter("x", folder, checkpoint.config)
    adapted = make_backend(backend, checkpoint, [adapter], quantization="none")
    request = drive(adapted, pages_each=3)[0]
    request.adapter = "x"
    expected = drive(TorchBackend.load(merged(checkpoint, adapter)), pages_each=3)[0].run(PROMPT)
    np.testing.assert_allclose(request.run(PROMPT), expected, rtol=0, atol=5e-4)
    experts = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight"
    safetensors.torch.save_file(tensors | {experts: torch.zeros(3, 5)}, file)
    with pytest.raises(ModelError, match=r"mlp\.experts\.base_layer does not fit .* another model"):
        load_adapter("x", folder, checkpoint.config)


@pytest.mark.parametrize("family", ["gemma3", "olmo2", "phi3"])
def test_of_other_families_too_also_where_a_file_joins_matrices(family: str, tmp_path: Path) -> None:
    """As files of phi3 do; what reads the rows is shared, what gives them is split."""
    checkpoint = load_checkpoint(save_checkpoint(family, tmp_path / family))
    folder, values = tmp_path / "adapter", np.random.default_rng(3)
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    joined = {"self_attn.qkv_proj": [*"qkv"], "mlp.gate_up_proj": ["gate", "up"], "mlp.down_proj": ["down"]}
    tensors, expected = {}, dict(checkpoint.tensors)
    for layer in range(checkpoint.config.num_layers):
        for module, parts in joined.items():
            place = f"model.layers.{layer}.{module.split('.')[0]}."
            names = [f"{place}{part}_proj.weight" for part in parts]
            rows, inputs = [shapes[name][0] for name in names], shapes[names[0]][1]
            down, up = (0.2 * values.standard_normal(size) for size in ((RANK, inputs), (sum(rows), RANK)))
            saved = f"base_model.model.model.layers.{layer}.{module}.lora_"
            tensors |= {f"{saved}A.weight": torch.tensor(down).float()}
            tensors |= {f"{saved}B.weight": torch.tensor(up).float()}
            for name, part in zip(names, np.split(up @ down, np.cumsum(rows)[:-1]), strict=True):
                change = (ALPHA / RANK * part).astype(np.float32)
                expected[name] = encode(checkpoint.tensors[name].float32() + change)
    save_adapter(folder, tensors)
    adapted = TorchBackend.load(checkpoint, adapters=[load_adapter("x", folder, checkpoint.config)])
    ours = TorchBackend(adapted.adapters["x"], 64)
    logits = [
        drive(backend, pages_each=3)[0].run(PROMPT)
        for backend in (ours, TorchBackend.load(replace(checkpoint, tensors=expected)))
    ]
    np.testing.assert_allclose(*logits, rtol=0, atol=3e-4)


@pytest.mark.parametrize(
    ("temperature", "methods"), [(0.8, ("off", "suffix")), (0, ("ngram", TREE))], ids=["sampled", "greedy"]
)
def test_alone_together_and_drafted_the_bytes_are_the_same(
    model: LoadedModel, folder: Path, temperature: float, methods: Sequence[Any]
) -> None:
    names = ["", "a", "b"]
    alone = [answers(make_engine(model, folder, "off"), [name], temperature)[0] for name in names]
    assert len(set(alone)) == 3
    for method in methods:
        assert answers(make_engine(model, folder, method), names, temperature) == alone * 2, method


def test_pages_are_shared_within_an_adapter_only(model: LoadedModel, folder: Path) -> None:
    found = requests_with_cached_pages(make_engine(model, folder, "off"))
    assert found == [False, False, True, False, False]


def test_a_request_names_the_adapter_after_the_model(model: LoadedModel, folder: Path) -> None:
    async def main() -> list[str]:
        engine = make_engine(model, folder, "off")
        front = AsyncEngine(engine, model.tokenizer, max_queue=9)
        front.start()
        config = EngineConfig.from_options(
            model=str(folder), lora_modules=[f"a={folder / 'a'}", f"b={folder / 'b'}"]
        )
        service = Service(front, model.tokenizer, with_adapters(("m",), config))
        transport = httpx.ASGITransport(make_app(service))
        body = {
            "prompt": PROMPT,
            "temperature": 0,
            "max_tokens": 6,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        async with httpx.AsyncClient(transport=transport, base_url="http://m", timeout=60) as client:
            listed = (await client.get("/v1/models")).json()["data"]
            assert [(entry["id"], entry["parent"]) for entry in listed] == [
                ("m", None),
                ("m:a", "m"),
                ("m:b", "m"),
            ]
            assert (await client.post("/v1/completions", json=body | {"model": "m:c"})).status_code == 404
            asked = [
                client.post("/v1/completions", json=body | {"model": name}) for name in ("m", "m:a", "m:b")
            ]
            found = [answer.json()["choices"][0]["token_ids"] for answer in await asyncio.gather(*asked)]
        await front.stop()
        service.workers.shutdown()
        return [str(ids) for ids in found]

    assert len(set(asyncio.run(main()))) == 3


@pytest.mark.parametrize("model", [*repeated("torch"), "cpu"], indirect=True)
def test_on_replicas_the_bytes_are_those_of_one_engine_also_when_one_dies(
    checkpoint: Checkpoint, adapters: list[Adapter], model: LoadedModel, folder: Path
) -> None:
    names, tokens = ["", "a", "b"] * 2, 25
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.8, seed=3)

    def replica() -> Engine:
        backend = make_backend(model.backend.name, checkpoint, adapters)
        return make_engine(LoadedModel(backend, model.tokenizer, checkpoint.config), folder, "off")

    async def ask(engine: EngineClient, number: int) -> list[int]:
        stream = await engine.submit(PROMPT, params, str(number), adapter=names[number])
        return list((await stream.finished()).outputs[0].token_ids)

    async def main() -> None:
        alone = AsyncEngine(make_engine(model, folder, "off"), model.tokenizer, max_queue=9)
        alone.start()
        expected = await asyncio.gather(*[ask(alone, number) for number in range(len(names))])
        await alone.stop()
        assert len({tuple(ids) for ids in expected}) == 3
        async with Fleet(replica, model.tokenizer) as there:
            asking = asyncio.gather(*[ask(there.engine, number) for number in range(len(names))])
            first = there.replicas.all[0]
            while not any(request.num_output for request in first.engine.unfinished):
                await asyncio.sleep(0.005)
            await first.kill()
            assert await asking == expected
            assert there.engine.num_resumed > 0

    asyncio.run(asyncio.wait_for(main(), 120))


def test_what_cannot_be_served_is_refused(
    model: LoadedModel, folder: Path, checkpoint: Checkpoint, adapters: list[Adapter], tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match="no adapter 'c'; load it with --lora-modules"):
        make_engine(model, folder, "off").add_request(PROMPT, SamplingParams(), adapter="c")
    with pytest.raises(ConfigError, match="expected NAME=FOLDER"):
        EngineConfig.from_options(model=str(folder), lora_modules=["sql"])
    dora = write_adapter(tmp_path / "dora", checkpoint, MODULES["a"], use_dora=True)
    with pytest.raises(ModelError, match=r"use_dora 'True' is not supported\. Merge"):
        load_adapter("dora", dora, checkpoint.config)
    with pytest.raises(
        ModelError, match=r"adapter x has no adapter_config\.json in .* --lora-modules x=FOLDER"
    ):
        load_adapter("x", tmp_path / "nowhere", checkpoint.config)
    shorter = replace(checkpoint.config, num_layers=1)
    with pytest.raises(
        ModelError, match=r"model\.layers\.1\..*which this model lacks.* other target_modules"
    ):
        load_adapter("a", folder / "a", shorter)
    other = replace(checkpoint.config, hidden_size=64)
    with pytest.raises(ModelError, match="belongs to another model"):
        load_adapter("a", folder / "a", other)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("modules_to_save", ["lm_head"]),
        ("alora_invocation_tokens", [5, 6]),
        ("layer_replication", [[0, 1], [0, 2]]),
        ("init_lora_weights", "pissa"),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("use_bdlora", {"target_modules_bd_a": ["q_proj"], "nblocks": 2}),
        ("kasa_config", {"beta": 0.1}),
    ],
)
def test_what_would_change_more_than_some_products_is_refused(
    option: str, value: object, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "x", checkpoint, MODULES["a"], **{option: value})
    with pytest.raises(ModelError, match=rf"{option} .* is not supported\. Merge"):
        load_adapter("x", folder, checkpoint.config)


@pytest.mark.parametrize(
    "name", ["lm_head.lora_A", "model.embed_tokens.lora_embedding_A", "lm_head", "model.embed_tokens"]
)
def test_embeddings_and_heads_are_refused_by_name(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "x", checkpoint, MODULES["a"])
    file = folder / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(file) | {f"base_model.model.{name}.weight": torch.zeros(3, 5)}
    safetensors.torch.save_file(tensors, file)
    with pytest.raises(ModelError, match=rf"the tensor base_model\.model\.{name}\.weight is not supported"):
        load_adapter("x", folder, checkpoint.config)


def test_a_rank_above_the_sizes_of_the_matrix_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Threads keep the products with A in buffers that are sized by the model, not by the adapter."""
    largest = max(checkpoint.tensors["model.layers.0.self_attn.q_proj.weight"].shape)
    for rank in (largest, largest + 1):
        ranks = {"self_attn.q_proj": rank}
        write_adapter(tmp_path / str(rank), checkpoint, ["self_attn.q_proj"], rank_pattern=ranks)
    assert load_adapter("x", tmp_path / str(largest), checkpoint.config).matrices
    with pytest.raises(ModelError, match=rf"has rank {largest + 1} for .*q_proj, more than .* Merge"):
        load_adapter("x", tmp_path / str(largest + 1), checkpoint.config)


def test_a_matrix_that_is_changed_twice_is_reported(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """By itself and as a part of a joined one: one of the two would be lost."""
    folder = write_adapter(tmp_path / "x", checkpoint, ["self_attn.q_proj"])
    rows = sum(checkpoint.tensors[f"model.layers.0.self_attn.{part}_proj.weight"].shape[0] for part in "qkv")
    joined = "base_model.model.model.layers.0.self_attn.qkv_proj.lora_"
    file = folder / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(file)
    inputs = checkpoint.config.hidden_size
    tensors |= {f"{joined}A.weight": torch.zeros(RANK, inputs), f"{joined}B.weight": torch.zeros(rows, RANK)}
    safetensors.torch.save_file(tensors, file)
    with pytest.raises(ModelError, match=r"changes model\.layers\.0\.self_attn\.q_proj twice"):
        load_adapter("x", folder, checkpoint.config)
