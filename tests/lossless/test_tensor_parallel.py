"""The promise for tensor parallelism: every drafter gives, on several ranks, the bytes of one device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.build import LoadedModel, build_engine
from paceline.config import EngineConfig
from paceline.core.params import SamplingParams
from paceline.models.heads.checkpoint import write_head
from paceline.models.heads.medusa import write_medusa
from paceline.models.registry import DEFAULT_MODEL, load_with_tokenizer, resolve
from tests.backends.cuda.logical_ranks import captured_together, driven
from tests.backends.torch.sharded import save_sharded, sharded
from tests.draft.mimo import random_mimo
from tests.draft.model.test_draft_model_cpu import save_tokenizer
from tests.large import repeated
from tests.lossless.subject import Outcome
from tests.models.heads.driver import random_checkpoint
from tests.models.heads.test_medusa_heads import random_medusa
from tests.models.heads.tiny_heads import BLOCK_CONFIGS, CONFIGS, EAGLE3, P_EAGLE

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
LOOK_UPS = ("off", "ngram", "suffix", "hybrid")
HEADS = ("eagle3", "p-eagle", "eagle", "dflash", "dspark", "medusa")
METHODS = (*LOOK_UPS, "draft_model", *HEADS, "layerskip")
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7, "seed": 1, "logprobs": 2},
    {"temperature": 1.0, "seed": 2, "top_p": 0.9, "repetition_penalty": 1.1, "n": 2},
]
ONE_GPU = ("p-eagle", "dflash", "dspark")  # cuda refuses the first, and the others on several GPUs
TOKENS, ROWS = 10, 64
PROMPTS = [[*range(3, 40), 5, 6, 7, 5, 6], [9, 8, 9, 8, 9, 8], list(range(100, 120))]


@contextmanager
def model_on(path: Path, ranks: int, dtype: str, device: str = "cpu") -> Iterator[LoadedModel]:
    """A model of the torch backend, shared by ranks that are threads."""
    checkpoint, tokenizer = load_with_tokenizer(path)
    with sharded(checkpoint, ranks, dtype, device) as backend:
        yield LoadedModel.of(checkpoint, backend, tokenizer)


@contextmanager
def cuda_model_on(path: Path, ranks: int, dtype: str, device: str = "cuda") -> Iterator[LoadedModel]:
    """A model of the cuda backend, shared by ranks that are threads and capture their graphs together."""
    from paceline.backends.cuda.backend import CudaBackend
    from paceline.backends.cuda.weights.shard import WHOLE

    checkpoint, tokenizer = load_with_tokenizer(path)

    def load(shard: Any, others: Any) -> CudaBackend:
        return CudaBackend.load_part(checkpoint, torch.device(device), dtype, "none", ROWS, shard, others)

    if ranks == 1:
        yield LoadedModel.of(checkpoint, load(WHOLE, None), tokenizer)
        return
    with captured_together(), driven(ranks, load) as backend:
        yield LoadedModel.of(checkpoint, backend, tokenizer)


def answers(model: LoadedModel, path: Path, method: Any, dtype: str) -> list[Outcome]:
    """The answers to three requests that run together, each with other sampling options."""
    options: dict[str, Any] = {"max_model_len": 200, "backend": model.backend.name, "dtype": dtype}
    if model.backend.name == "cuda":
        # few graphs to capture, and a small pool: the ranks share the GPU
        options |= {"max_num_seqs": 4, "max_num_batched_tokens": ROWS, "kv_cache_memory_bytes": 1 << 26}
    elif model.backend.device.type == "cuda":
        options["device"] = "cuda"
    config = EngineConfig.from_options(model=str(path), speculative_config=method, threads=1, **options)
    engine = build_engine(config, model).engine
    outcomes = []
    for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True):
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, **sampling)
        outcomes.append(Outcome(engine.add_request(prompt, params)))
        engine.step()
    while engine.has_unfinished:
        engine.step()
    engine.close()
    return outcomes


def assert_same_bytes(got: list[Outcome], expected: list[Outcome], method: Any) -> None:
    """The same answers, drafted for by the method on ranks as on one device."""
    assert [outcome.bytes() for outcome in got] == [outcome.bytes() for outcome in expected]
    for outcomes in (got, expected):
        drafted = sum(outcome.count("num_draft_tokens") for outcome in outcomes)
        assert (drafted > 0) == (method != "off")
        assert not any(child.failed_drafters for outcome in outcomes for child in outcome.children)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 8 KV heads in `model`, and a draft model and heads beside it."""
    root = tmp_path_factory.mktemp("tensor-parallel")
    for name, family in (("model", "qwen2"), ("draft", "llama")):
        (root / name).mkdir()
        save_tokenizer(save_sharded(family, root / name))
    # heads that use the target's embedding, and one also its output matrix
    write_head(random_checkpoint(replace(EAGLE3, own_embedding=False)), root / "eagle3", "sglang")
    write_head(random_checkpoint(CONFIGS["eagle"]), root / "eagle", "sglang")
    write_head(random_checkpoint(P_EAGLE), root / "p-eagle", "vllm")
    for name in ("dflash", "dspark"):
        write_head(random_checkpoint(BLOCK_CONFIGS[name]), root / name, "vllm")
    write_medusa(random_medusa(), root / "medusa")
    return root


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 2 KV heads with an MTP block."""
    folder = tmp_path_factory.mktemp("mimo")
    random_mimo(folder)
    save_tokenizer(folder)
    return folder


def config_of(method: str, folder: Path) -> Any:
    return {
        "ngram": {"method": "ngram", "prompt_lookup_min": 1},
        "hybrid": {"method": "hybrid", "fallback": {"method": "layerskip", "exit_layer": 2}},
        "draft_model": {"method": "draft_model", "model": str(folder / "draft"), "branching": 2},
        "eagle3": {"method": "eagle3", "model": str(folder / "eagle3"), "branching": 2},
        "p-eagle": {"method": "eagle3", "model": str(folder / "p-eagle")},
        "eagle": {"method": "eagle", "model": str(folder / "eagle")},
        "dflash": {"method": "dflash", "model": str(folder / "dflash")},
        "dspark": {"method": "dspark", "model": str(folder / "dspark")},
        "medusa": {"method": "medusa", "model": str(folder / "medusa"), "branching": 2},
        "layerskip": {"method": "layerskip", "exit_layer": 2},
    }.get(method, method if method == "off" else {"method": method})


# one that samples on every rank, a head that uses the target's matrices, and the target's own first layers
CASES = [("off", "float32", 2), ("eagle", "float32", 4), ("layerskip", "bfloat16", 2)]
OTHERS = [
    (method, dtype, ranks)
    for method in METHODS
    for dtype in ("float32", "bfloat16")
    for ranks in (2, 4, 8)
    if (method, dtype, ranks) not in CASES
]


@pytest.mark.parametrize("case", [*CASES, *repeated(*OTHERS)], ids=str)
def test_every_method_on_several_ranks(folder: Path, case: tuple[str, str, int]) -> None:
    compare(folder / "model", case, config_of(case[0], folder))


@pytest.mark.parametrize("dtype", repeated("float32", "bfloat16"))
def test_an_mtp_block_on_two_ranks(mimo: Path, dtype: str) -> None:
    compare(mimo, ("mtp", dtype, 2), {"method": "mtp"})


def compare(path: Path, case: tuple[str, str, int], config: Any, device: str = "cpu") -> None:
    method, dtype, ranks = case
    with model_on(path, 1, dtype, device) as one:
        expected = answers(one, path, config, dtype)
    with model_on(path, ranks, dtype, device) as several:
        got = answers(several, path, config, dtype)
    assert_same_bytes(got, expected, method)
    drafted = [sum(outcome.count("num_draft_tokens") for outcome in some) for some in (got, expected)]
    assert drafted[0] == drafted[1]


@needs_cuda
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("method", [method for method in METHODS if method not in ONE_GPU])
def test_every_method_on_ranks_of_the_cuda_backend(folder: Path, method: str, size: int) -> None:
    """Every method drafts. How much may depend on measured times, so the numbers are not compared."""
    config, path = config_of(method, folder), folder / "model"
    if isinstance(config, dict):
        config.pop("branching", None)  # chains are drafted in device passes
    with cuda_model_on(path, 1, "bfloat16") as one:
        expected = answers(one, path, config, "bfloat16")
    with cuda_model_on(path, size, "bfloat16") as several:
        got = answers(several, path, config, "bfloat16")
    assert_same_bytes(got, expected, method)


@needs_cuda
@pytest.mark.parametrize("case", [*CASES, *OTHERS], ids=str)
def test_every_method_on_several_ranks_of_one_gpu(folder: Path, case: tuple[str, str, int]) -> None:
    compare(folder / "model", case, config_of(case[0], folder), device="cuda")


@pytest.mark.real
@pytest.mark.parametrize("dtype", repeated("float32", "bfloat16"))
@pytest.mark.parametrize("method", ["off", "ngram", "eagle3", "layerskip"])
def test_a_real_model_on_three_ranks(method: str, dtype: str) -> None:
    """smollm2-135m has 3 KV heads; eagle3 is the head that is shipped for it."""
    compare(resolve(DEFAULT_MODEL), (method, dtype, 3), method if method == "off" else {"method": method})
