"""The promise for models with recurrent layers: every drafter gives the bytes of plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.backends.base import Backend
from paceline.backends.cpu import CpuBackend
from paceline.backends.load import load_backend
from paceline.backends.options import BackendOptions
from paceline.backends.torch.backend import TorchBackend
from paceline.build import LoadedModel, build_engine
from paceline.config import EngineConfig
from paceline.core.params import SamplingParams
from paceline.errors import ConfigError
from paceline.models.heads.checkpoint import write_head
from paceline.models.registry import load_with_tokenizer
from tests.draft.model.test_draft_model_cpu import save_tokenizer
from tests.large import repeated
from tests.lossless.subject import Outcome
from tests.models.heads.driver import random_checkpoint
from tests.models.heads.tiny_heads import EAGLE3
from tests.tiny import save_checkpoint
from tests.tiny_families import HYBRIDS, MORE_HYBRIDS

PROMPTS = [[*range(3, 15), 5, 6, 7, 5, 6], [9, 8, 9, 8, 9, 8], list(range(100, 110))]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.8, "seed": 1, "logprobs": 2},
    {"temperature": 0.8, "seed": 2, "top_p": 0.9, "repetition_penalty": 1.1, "n": 2},
]
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "suffix tree": {"method": "suffix", "num_speculative_tokens": 8, "branching": 2},
    "eagle3 tree": {"method": "eagle3", "num_speculative_tokens": 6, "branching": 2},
}
OTHERS = [family for family in {**HYBRIDS, **MORE_HYBRIDS} if family != "qwen3-5"]


COMPILED = [("cpu", family) for family in ("qwen3-5", *OTHERS)]


@pytest.fixture(
    scope="module",
    params=[("torch", "qwen3-5"), *COMPILED, *repeated(*(("torch", one) for one in OTHERS))],
    ids="-".join,
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model, in one that is named after the backend that runs it."""
    backend, family = request.param
    root = tmp_path_factory.mktemp(family) / backend
    root.mkdir()
    save_tokenizer(save_checkpoint(family, root))
    write_head(random_checkpoint(EAGLE3), root / "head", "sglang")
    return root


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    checkpoint, tokenizer = load_with_tokenizer(folder)
    backend: Backend = TorchBackend.load(checkpoint, row_by_row=True)
    if folder.name == "cpu":
        backend = CpuBackend.load(checkpoint, quantization="int8", threads=1)
    norm = checkpoint.tensors["model.norm.weight"].float32()
    return LoadedModel(backend, tokenizer, checkpoint.config, final_norm=norm)


def answers(model: LoadedModel, folder: Path, method: Any) -> list[Outcome]:
    """The answers to three requests that run together, twice, each with other sampling options."""
    config = EngineConfig.from_options(
        model=str(folder),
        speculative_config=method,
        backend=folder.name,
        threads=1,
        max_model_len=64,
        max_num_seqs=3,
        max_num_batched_tokens=16,
    )
    engine, outcomes = build_engine(config, model).engine, []
    for prompt, sampling in zip(PROMPTS * 2, SAMPLINGS * 2, strict=True):
        params = SamplingParams(max_tokens=8, ignore_eos=True, **sampling)
        outcomes.append(Outcome(engine.add_request(prompt, params)))
        engine.step()
    while engine.has_unfinished:
        engine.step()
    engine.close()
    return outcomes


@pytest.fixture(scope="module")
def plain(model: LoadedModel, folder: Path) -> list[Outcome]:
    return answers(model, folder, "off")


@pytest.mark.parametrize("method", METHODS)
def test_drafts_change_no_byte(model: LoadedModel, folder: Path, plain: list[Outcome], method: str) -> None:
    config = dict(METHODS[method])
    if config["method"] == "eagle3":
        config["model"] = str(folder / "head")
    got = answers(model, folder, config)
    assert [outcome.bytes() for outcome in got] == [outcome.bytes() for outcome in plain]
    assert sum(outcome.count("num_draft_tokens") for outcome in got) > 0
    accepted = sum(outcome.count("num_accepted_draft_tokens") for outcome in got)
    assert accepted > 0 or method != "suffix tree"  # which finds the answers of the first time
    assert not any(child.failed_drafters for outcome in got for child in outcome.children)


def test_what_cannot_take_back_a_state_is_refused(model: LoadedModel, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"recurrent layers, whose states layerskip .* suffix"):
        answers(model, folder, {"method": "layerskip"})
    with pytest.raises(ConfigError, match=r"draft model .* recurrent layers.* without such layers"):
        answers(model, folder, {"method": "draft_model", "model": str(folder)})
    checkpoint, _ = load_with_tokenizer(folder)
    if folder.name == "torch":
        options = BackendOptions("torch", tensor_parallel_size=2)
        with pytest.raises(ConfigError, match=r"recurrent layers, which only one device can run\. Use 1"):
            load_backend(checkpoint, options, 16)
